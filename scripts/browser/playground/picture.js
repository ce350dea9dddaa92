// What one scheduler did, as a picture: batch slots against steps, tokens and queue below them, and the block pool.
//
// Everything is drawn with a pen, rect(x, y, width, height, colour) and text(x, y, words, colour, options): a canvas on
// the page (canvas.js) or an SVG to save (svg.js). Colours are roles of the palette. Sizes are CSS pixels.

import { say } from "../browser/say.js";

const LEFT = 96; // what each slot has now
const GAP = 12;
const TOKENS = 34; // height of the strip with the tokens of each step
const WAITING = 24; // of the strip with the length of the queue
const QUEUE = 22; // of the row with the first requests of the queue
const MARK = 5; // of the mark below the step that is shown
const POOL = 112; // the pool is drawn as large as it can be within this height
const FONT = 11;

/** Where everything stands, for a picture of so many pixels' width. */
export function layout(width, recording, ratio = 1) {
  const { slots, blocks } = recording.settings;
  const whole = (pixels) => Math.max(1, Math.round(pixels * ratio)) / ratio; // edges on whole pixels of the screen
  const row = Math.max(11, Math.min(24, Math.floor(190 / slots)));
  const columns = width - LEFT;
  const column = whole(Math.max(2, Math.min(36, columns / Math.max(1, recording.frames.length))));
  const tokens = slots * row + MARK + GAP;
  const waiting = tokens + TOKENS + GAP;
  const queue = waiting + WAITING + GAP;
  const pool = queue + QUEUE + GAP;
  const cell = poolCell(width, blocks);
  const perRow = Math.max(1, Math.floor(width / cell));
  const height = pool + Math.ceil(blocks / perRow) * cell;
  const visible = Math.max(1, Math.floor(columns / column));
  return { width, height, row, column, visible, tokens, waiting, queue, pool, cell, perRow, slots, blocks, peaks: recording.peaks };
}

function poolCell(width, blocks) {
  for (let cell = 26; cell > 7; cell--) if (Math.ceil(blocks / Math.floor(width / cell)) * cell <= POOL) return cell;
  return 7;
}

/** The first step that is shown while step `at` is the last one. */
export const firstShown = (place, at) => Math.max(0, at - place.visible + 1);

/** The left edge of a step's column. */
export const columnEdge = (place, first, at) => LEFT + (at - first) * place.column;

/** The part of the picture that moves: all columns, from the first slot to the end of the strips. */
export const history = (place) => ({ x: LEFT, y: 0, width: place.width - LEFT, height: place.queue - GAP });

/** One step: a cell for each slot, and its part of the strips. */
export function drawColumn(pen, place, frame, x) {
  const gap = place.column >= 8 ? 2 : 0;
  const width = place.column - gap;
  let idle = 0;
  for (const [slot, request, role] of [...frame.slots, [place.slots]]) {
    for (; idle < slot; idle++) pen.rect(x, idle * place.row, width, place.row - 2, "wasted");
    idle = slot + 1;
    if (!role) break;
    pen.rect(x, slot * place.row, width, place.row - 2, role);
    if (request.length * 7 + 2 <= width) label(pen, x, slot * place.row, width, place.row - 2, request, role);
  }
  for (const slot of frame.lost) pen.rect(x, slot * place.row, Math.min(3, width), place.row - 2, "ink");
  const base = place.tokens + TOKENS;
  const scale = TOKENS / Math.max(place.peaks.tokens, frame.prompt + frame.generated); // more may come than was seen
  const [prompt, generated] = [frame.prompt * scale, frame.generated * scale];
  if (generated) pen.rect(x, base - generated, width, generated, "generated");
  if (prompt) pen.rect(x, base - generated - prompt, width, prompt, "prompt");
  const waiting = Math.min(1, frame.waiting / place.peaks.waiting) * WAITING;
  if (waiting) pen.rect(x, place.waiting + WAITING - waiting, width, waiting, "free");
}

/** What there is of this very step only: the mark, what each slot has, the scales' numbers, the queue. */
export function drawNow(pen, place, frame, x) {
  if (x !== null) pen.rect(x, place.slots * place.row, Math.max(place.column - 2, 3), MARK - 2, "ink");
  const small = Math.min(FONT, place.row - 2);
  const told = new Map((frame?.slots ?? []).map(([slot, ...rest]) => [slot, rest]));
  for (let slot = 0; slot < place.slots; slot++) {
    const [request, role, tokens] = told.get(slot) ?? ["", "wasted", 0];
    pen.rect(0, slot * place.row, LEFT - 14, place.row - 2, role);
    const words = request && `${request}: ${tokens || say("waits")}`;
    if (words) label(pen, 0, slot * place.row, LEFT - 14, place.row - 2, words, role, small);
  }
  const tokens = frame ? frame.prompt + frame.generated : 0;
  pen.text(0, place.tokens + 12, say("tokens"), "ink");
  pen.text(0, place.tokens + 27, say("{now} (max {max})", { now: tokens, max: place.peaks.tokens }), "ink", { bold: true });
  pen.text(0, place.waiting + 9, say("waiting"), "ink");
  pen.text(0, place.waiting + 23, say("{now} (max {max})", { now: frame?.waiting ?? 0, max: place.peaks.waiting }), "ink", { bold: true });
  drawQueue(pen, place, frame);
}

function drawQueue(pen, place, frame) {
  pen.text(0, place.queue + 15, say("next"), "ink");
  let x = 40;
  for (const request of frame?.queue ?? []) {
    const width = Math.max(22, request.length * 7 + 8);
    if (x + width > place.width - 44) break;
    pen.rect(x, place.queue, width, QUEUE - 2, "free");
    label(pen, x, place.queue, width, QUEUE - 2, request, "free");
    x += width + 3;
  }
  if (!frame?.queue.length) pen.text(x, place.queue + 15, say("no request waits"), "ink");
  else if (frame.waiting > frame.queue.length) pen.text(x + 3, place.queue + 15, `+ ${frame.waiting - frame.queue.length}`, "ink");
}

/** Where the row of the queue stands. */
export const queueRow = (place) => ({ x: 0, y: place.queue, width: place.width, height: QUEUE });

/** One block, where it stands in the pool. */
export function drawBlock(pen, place, block, [role, request]) {
  const x = (block % place.perRow) * place.cell;
  const y = place.pool + Math.floor(block / place.perRow) * place.cell;
  const size = place.cell - (place.cell > 9 ? 2 : 1);
  pen.rect(x, y, size, size, role);
  if (request && request.length * 6.5 <= size) label(pen, x, y, size, size, request, role, Math.min(FONT, size - 4));
}

/** All of it, as it is at step `at`. */
export function drawAll(pen, place, recording, at) {
  const first = firstShown(place, at);
  for (let step = first; step <= at; step++) drawColumn(pen, place, recording.frames[step], columnEdge(place, first, step));
  drawNow(pen, place, recording.frames[at], at < 0 ? null : columnEdge(place, first, at));
  recording.pool.forEach((held, block) => drawBlock(pen, place, block, held));
}

function label(pen, x, y, width, height, words, role, size = FONT) {
  pen.text(x + width / 2, y + height / 2 + size * 0.36, words, `on-${role}`, { align: "middle", size });
}

/** The left part, which is drawn anew at each step. */
export const nowArea = (place) => ({ x: 0, y: 0, width: LEFT, height: place.queue });

/** The strip that the mark stands in. */
export const markRow = (place) => ({ x: LEFT, y: place.slots * place.row - 1, width: place.width - LEFT, height: MARK + 1 });
