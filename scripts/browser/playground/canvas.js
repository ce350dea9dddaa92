// The picture on the page. A step later or earlier costs one column, one copy of what is drawn, and the changed blocks.

import {
  columnEdge, drawAll, drawBlock, drawColumn, drawNow, firstShown, history, layout, markRow, nowArea, queueRow,
} from "./picture.js";

const FONT_FAMILY = '"DejaVu Sans", Verdana, sans-serif';

class CanvasPen {
  constructor(context, palette) {
    this.context = context;
    this.palette = palette;
  }

  rect(x, y, width, height, colour) {
    this.context.fillStyle = this.palette[colour];
    this.context.fillRect(x, y, width, height);
  }

  text(x, y, words, colour, { align = "left", size = 11, bold = false } = {}) {
    this.context.fillStyle = this.palette[colour];
    this.context.font = `${bold ? "bold " : ""}${size}px ${FONT_FAMILY}`;
    this.context.textAlign = align === "middle" ? "center" : align;
    this.context.fillText(words, x, y);
  }
}

export class Canvas {
  #recording = null;
  #place = null;
  #shown = -1;
  #numFrames = 0;

  /** @param {HTMLCanvasElement} element as wide as its parent lets it be */
  constructor(element) {
    this.element = element;
    this.context = element.getContext("2d", { alpha: false });
  }

  /** Draw a recording from now on, in these colours, at frame `at`: after a new run, a change of size or of scheme. */
  reset(recording, palette, at) {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(200, Math.floor(this.element.parentElement.clientWidth));
    this.#recording = recording;
    this.#numFrames = recording.frames.length;
    this.#place = layout(width, recording, ratio);
    this.pen = new CanvasPen(this.context, palette);
    this.element.width = Math.round(width * ratio);
    this.element.height = Math.round(this.#place.height * ratio);
    this.element.style.height = `${this.#place.height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.#drawAnew(at);
  }

  /** Whether the recording has grown since: columns and scales are made for what there was. */
  get isOutgrown() {
    return this.#recording.frames.length > this.#numFrames;
  }

  /** Show frame `at`, −1: before the first. */
  show(at) {
    const [place, before] = [this.#place, this.#shown];
    if (at === before) return;
    const [first, firstBefore] = [firstShown(place, at), firstShown(place, before)];
    if (before < 0 || Math.abs(first - firstBefore) >= place.visible) return this.#drawAnew(at);
    if (first !== firstBefore) this.#shift(first - firstBefore);
    this.#clear(markRow(place));
    if (at < before) this.#clear(this.#columns(first, at + 1));
    for (let step = first; step < Math.min(firstBefore, at + 1); step++) this.#column(first, step);
    for (let step = Math.max(first, before + 1); step <= at; step++) this.#column(first, step);
    this.#clear(nowArea(place));
    this.#clear(queueRow(place));
    drawNow(this.pen, place, this.#recording.frames[at], at < 0 ? null : columnEdge(place, first, at));
    for (const block of this.#recording.moveTo(at)) drawBlock(this.pen, place, block, this.#recording.pool[block]);
    this.#shown = at;
  }

  #drawAnew(at) {
    this.#recording.moveTo(at);
    this.#clear({ x: 0, y: 0, width: this.#place.width, height: this.#place.height });
    drawAll(this.pen, this.#place, this.#recording, at);
    this.#shown = at;
  }

  #column(first, step) {
    drawColumn(this.pen, this.#place, this.#recording.frames[step], columnEdge(this.#place, first, step));
  }

  /** The columns from a step on. */
  #columns(first, step) {
    const area = history(this.#place);
    const x = columnEdge(this.#place, first, step);
    return { ...area, x, width: Math.max(0, area.x + area.width - x) };
  }

  /** Copy what is drawn to the left by so many columns, or to the right, and clear what it leaves. */
  #shift(columns) {
    const ratio = this.element.width / this.#place.width;
    const { x, y, width, height } = history(this.#place);
    const moved = columns * this.#place.column;
    const kept = width - Math.abs(moved);
    const [from, to] = moved > 0 ? [x + moved, x] : [x, x - moved];
    this.context.drawImage(
      this.element, from * ratio, y * ratio, kept * ratio, height * ratio, to, y, kept, height,
    );
    this.#clear({ x: moved > 0 ? x + kept : x, y, width: Math.abs(moved), height });
  }

  #clear({ x, y, width, height }) {
    this.pen.rect(x, y, width, height, "ground");
  }
}
