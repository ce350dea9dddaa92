// The live page: draws the pictures of `/live`, sends prompts to `/v1/completions`, and, if the model has a chat template,
// keeps a conversation going through `/v1/chat/completions`. No library, no other host.
//
// A picture is the JSON of `minicache.serving.http.live.LiveView.snapshot`. Whatever it does not say is not drawn: the page
// keeps no books of its own. Text goes into the page as text, never as HTML.

const NUM_COLORS = 10;
const MAX_ANSWERS = 24;
const SUGGESTIONS = [
  "Yesterday I", "Tomorrow she", "Did she", "Every day the teacher",
  "Last week my friends", "Will they", "Now we are", "Does the doctor",
];
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");

const find = (id) => document.getElementById(id);
const colorOf = (number) => `request-${(number - 1) % NUM_COLORS}`;
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const milliseconds = (ms) => `${ms < 10 ? ms.toFixed(1) : whole.format(ms)} ms`;

function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

function draw(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function say(id, text) {
  const element = find(id);
  if (element.textContent !== text) element.textContent = text;
}

/** One child of `list` for each key, in order; children of keys that are gone are removed. */
function keep(list, keys, create) {
  const old = new Map([...list.children].map((child) => [child.dataset.key, child]));
  keys.forEach((key, place) => {
    const child = old.get(String(key)) ?? create(key);
    child.dataset.key = key;
    old.delete(String(key));
    if (list.children[place] !== child) list.insertBefore(child, list.children[place] ?? null);
  });
  for (const child of old.values()) child.remove();
}

function chip(number) {
  return make("li", { className: `chip ${colorOf(number)}`, textContent: `#${number}` });
}

// The engine in numbers

function drawFigures(picture) {
  const { running, pool } = picture;
  const isIdle = !running.length && !picture.waiting.length;
  setState(isIdle ? "idle" : `running ${running.length}`, isIdle ? "" : "running");
  const rate = picture.tokens_per_second;
  const note = rate !== null && isIdle ? `${whole.format(rate)} when it last ran` : "";
  figure("rate", rate === null ? "–" : isIdle ? "0" : whole.format(rate), note);
  for (const name of ["ttft", "tpot"]) {
    const latency = picture[name];
    if (latency) figure(name, milliseconds(latency.last), `median of ${latency.count}: ${milliseconds(latency.median)}`);
  }
  const numUsed = pool.num_blocks - pool.num_free;
  figure("usage", `${((100 * numUsed) / pool.num_blocks).toFixed(1)} %`, `${whole.format(numUsed)} of ${whole.format(pool.num_blocks)} blocks`);
  figure("preemptions", whole.format(picture.num_preemptions), `${whole.format(picture.num_requests)} requests so far`);
}

function figure(id, value, note) {
  const element = find(id);
  if (!element.firstElementChild) element.replaceChildren(document.createTextNode(""), make("small"));
  element.firstChild.data = value;
  element.lastChild.textContent = note;
}

function setState(text, kind) {
  say("state", text);
  find("state").className = `state ${kind}`;
}

// The block pool: one path a colour, so a pool of many thousand blocks is a dozen elements

const pool = { key: "", size: 0, columns: 0, holders: new Map(), layers: {}, pointed: -1 };

function layOutPool(numBlocks) {
  const svg = find("pool");
  const width = svg.clientWidth;
  const key = `${numBlocks} ${width}`;
  if (!width || key === pool.key) return;
  pool.key = key;
  pool.size = Math.max(3, Math.min(26, Math.floor(Math.sqrt((width * 300) / numBlocks))));
  pool.columns = Math.floor(width / pool.size);
  pool.rows = Math.ceil(numBlocks / pool.columns);
  svg.setAttribute("viewBox", `0 0 ${width} ${pool.rows * pool.size}`);
  svg.style.height = `${pool.rows * pool.size}px`;
  const hatch = draw("pattern", { id: "hatch", width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  hatch.append(draw("path", { class: "hatch", d: "M0 0V4" }));
  svg.replaceChildren(draw("defs", {}));
  svg.firstChild.append(hatch);
  pool.layers = {};
  const layer = (name, className) => svg.append((pool.layers[name] = draw("path", { class: className })));
  layer("free", "free");
  layer("cached", "cached");
  for (let color = 0; color < NUM_COLORS; color += 1) {
    layer(`request-${color}`, `of request-${color}`);
    layer(`request-${color} reserved`, `of reserved request-${color}`);
  }
  layer("lost", "lost");
  layer("shared", "shared");
  layer("dot", "dot");
  layer("pointed", "pointed");
  pool.layers.free.setAttribute("d", Array.from({ length: numBlocks }, (_, block) => cell(block)).join(""));
}

function cell(block, inset = pool.size > 5 ? 1 : 0.5) {
  const side = pool.size - 2 * inset;
  const x = (block % pool.columns) * pool.size + inset;
  const y = Math.floor(block / pool.columns) * pool.size + inset;
  return `M${x} ${y}h${side}v${side}h${-side}z`;
}

function drawPool(picture) {
  const { num_blocks: numBlocks, block_size: blockSize, num_free: numFree, shared, cached, lost } = picture.pool;
  layOutPool(numBlocks);
  if (!pool.columns) return;
  const paths = Object.fromEntries(Object.keys(pool.layers).map((name) => [name, ""]));
  pool.holders = new Map();
  const isShared = new Set(shared);
  for (const request of picture.running) {
    const numFilled = filledBlocks(request, blockSize);
    const length = request.blocks.length / request.num_tables;
    request.blocks.forEach((block, index) => {
      if (block < 0) return; // it has left a sliding window
      const place = index % length;
      const holder = { request, place, isReserved: place >= numFilled };
      if (pool.holders.has(block)) pool.holders.get(block).push(holder);
      else pool.holders.set(block, [holder]);
      if (!isShared.has(block)) paths[colorOf(request.number) + (holder.isReserved ? " reserved" : "")] += cell(block);
    });
  }
  for (const block of shared) {
    paths.shared += cell(block);
    paths.dot += cell(block, pool.size * 0.35);
  }
  for (const block of cached) paths.cached += cell(block);
  for (const block of lost) paths.lost += cell(block);
  for (const [name, path] of Object.entries(paths)) {
    if (name !== "free" && name !== "pointed") pool.layers[name].setAttribute("d", path);
  }
  find("lost").hidden = !lost.length;
  const parts = [`${whole.format(numBlocks)} blocks of ${blockSize} tokens`, `${whole.format(numFree)} free`];
  if (shared.length) parts.push(`${shared.length} shared`);
  if (cached.length) parts.push(`${cached.length} free and cached`);
  if (lost.length) parts.push(`${lost.length} allocated, in no block table`);
  say("pool-said", parts.join(", "));
  readBlock(pool.pointed); // it may have another holder now
}

/** So many blocks hold a token once the step is over. The others are reserved. */
function filledBlocks(request, blockSize) {
  return Math.ceil((request.num_computed + request.num_new) / blockSize);
}

function readBlock(block) {
  if (!shown || block < 0 || block >= shown.pool.num_blocks) return;
  pool.pointed = block;
  pool.layers.pointed?.setAttribute("d", cell(block, 0));
  const size = shown.pool.block_size;
  const holders = (pool.holders.get(block) ?? []).map(({ request, place, isReserved }) => {
    const what = isReserved ? "reserved for positions" : "positions";
    return `#${request.number} (${what} ${place * size} to ${place * size + size - 1})`;
  });
  const state = shown.pool.lost.includes(block)
    ? "allocated, in no block table"
    : shown.pool.cached.includes(block) ? "free, in the prefix cache" : "free";
  say("pool-read", `Block ${block}: ${holders.join(", ") || state}`);
}

// Block tables

function drawTables(picture) {
  const { running } = picture;
  const { block_size: blockSize, shared } = picture.pool;
  const isShared = new Set(shared);
  const byNumber = new Map(running.map((request) => [request.number, request]));
  say("num-running", String(running.length));
  say("tables-said", running.length
    ? "Each row is a block table: the request's blocks in token order."
    : "Nothing is running. Send a prompt.");
  keep(find("tables"), [...byNumber.keys()], (number) => {
    const row = make("li", { className: colorOf(number) });
    row.append(make("span", { className: "chip", textContent: `#${number}`, title: `request ${byNumber.get(number).id}` }));
    row.append(make("span", { className: "tokens" }), make("span", { className: "cells" }));
    return row;
  });
  for (const row of find("tables").children) drawRow(row, byNumber.get(Number(row.dataset.key)), blockSize, isShared);
}

function drawRow(row, request, blockSize, isShared) {
  const [, tokens, cells] = row.children;
  const preempted = request.num_preemptions ? `, ↺ ${request.num_preemptions}` : "";
  const cached = request.num_cached ? `\n${request.num_cached} cached` : "";
  tokens.textContent = `${request.num_prompt} + ${request.num_output} of ${request.max_tokens}${preempted}${cached}`;
  tokens.title = `${request.num_prompt} prompt tokens, ${request.num_cached} of them from the prefix cache, ${request.num_output} generated; preempted ${request.num_preemptions} times`;
  const numTokens = request.num_computed + request.num_new;
  while (cells.children.length > request.blocks.length) cells.lastChild.remove();
  const length = request.blocks.length / request.num_tables;
  request.blocks.forEach((block, index) => {
    const place = index % length;
    const box = cells.children[index] ?? cells.appendChild(make("span"));
    const inIt = Math.min(blockSize, numTokens - place * blockSize);
    const kind = inIt <= 0 ? "reserved" : inIt < blockSize ? "part" : "";
    const className = `cell ${kind} ${isShared.has(block) ? "shared" : ""}`;
    if (box.className !== className) box.className = className;
    const name = block < 0 ? "" : String(block); // −1: it has left a sliding window
    if (box.textContent !== name) box.textContent = name;
    box.style.setProperty("--fill", `${(100 * Math.max(inIt, 0)) / blockSize}%`);
  });
}

function drawQueues(picture) {
  const lines = { waiting: [], swapped: [] };
  for (const request of picture.waiting) lines[request.status === "swapped" ? "swapped" : "waiting"].push(request);
  for (const [name, requests] of Object.entries(lines)) {
    const total = picture[`num_${name}`];
    say(`num-${name}`, whole.format(total));
    const list = find(name);
    keep(list, requests.map((request) => request.number), chip);
    for (const [place, request] of requests.entries()) {
      const host = request.num_host_blocks ? `, ${request.num_host_blocks} blocks swapped out` : "";
      list.children[place].title = `${request.num_prompt} + ${request.num_output} tokens, preempted ${request.num_preemptions} times${host}`;
    }
    if (total > requests.length) list.append(make("li", { textContent: `and ${whole.format(total - requests.length)} more` }));
  }
}

// Steps

const STEPS = { shown: 60, left: 34, tokens: { top: 14, room: 90 }, time: { top: 126, room: 50 }, height: 192, pointed: -1 };

/** The top of a scale. A few values far above the rest are cut off: they would press the rest flat. */
function topOf(values, least) {
  const sorted = values.toSorted((a, b) => a - b);
  const usual = sorted[Math.floor(0.9 * (sorted.length - 1))] ?? 0;
  const most = sorted.at(-1) ?? 0;
  return Math.max(least, most > 4 * usual && usual > 0 ? 2 * usual : most);
}

/** Bars over one line. A bar has pieces, [class, value], the lowest first; one that is cut off tells its total. */
function drawLane(name, { top, room }, width, bars, least) {
  const totals = bars.map(({ pieces }) => pieces.reduce((sum, [, value]) => sum + value, 0));
  const most = topOf(totals, least);
  const foot = top + room;
  const parts = [
    draw("path", { class: "line", d: `M${STEPS.left} ${top}H${width}M${STEPS.left} ${foot}H${width}` }),
    draw("text", { x: 0, y: top - 4 }, name),
    draw("text", { x: STEPS.left - 4, y: top + 10, class: "at-right" }, most < 10 ? String(Math.round(10 * most) / 10) : whole.format(most)),
  ];
  bars.forEach(({ x, wide, pieces }, place) => {
    let level = 0;
    for (const [className, value] of pieces) {
      const next = Math.min(level + value, most);
      const height = ((next - level) * room) / most;
      if (height > 0) parts.push(draw("rect", { class: className, x, y: foot - (next * room) / most, width: wide, height }));
      level = next;
    }
    if (totals[place] > most) parts.push(draw("text", { class: "at-right", x: x - 2, y: top + 10 }, whole.format(totals[place])));
  });
  return parts;
}

function drawSteps({ steps }) {
  const svg = find("steps");
  const width = svg.clientWidth;
  if (!width) return;
  svg.setAttribute("viewBox", `0 0 ${width} ${STEPS.height}`);
  svg.style.height = `${STEPS.height}px`;
  const pitch = (width - STEPS.left) / STEPS.shown;
  const bars = steps.map((step, place) => {
    const left = STEPS.left + (STEPS.shown - steps.length + place) * pitch;
    return { step, left, x: left + 0.1 * pitch, wide: 0.8 * pitch };
  });
  const tokens = bars.map((bar) => ({ ...bar, pieces: [["decode", bar.step.decode], ["prefill", bar.step.prefill]] }));
  const time = bars.map((bar) => ({ ...bar, pieces: [["time", bar.step.ms]] }));
  const parts = [...drawLane("tokens", STEPS.tokens, width, tokens, 4), ...drawLane("ms", STEPS.time, width, time, 0.1)];
  for (const { step, left } of bars) {
    if (step.preempted.length) parts.push(draw("text", { class: "preempted", x: left + pitch / 2, y: 11 }, "▼"));
    if (step.number === STEPS.pointed) {
      parts.push(draw("rect", { class: "pointed", x: left, y: STEPS.tokens.top, width: pitch, height: STEPS.time.top + STEPS.time.room - STEPS.tokens.top }));
    }
  }
  if (steps.length) {
    const first = Math.min(bars[0].left, width - 110);
    parts.push(draw("text", { x: first, y: STEPS.height - 2 }, `step ${whole.format(steps[0].number)}`));
    parts.push(draw("text", { x: width, y: STEPS.height - 2, class: "at-right" }, whole.format(steps.at(-1).number)));
  }
  svg.replaceChildren(...parts);
}

function readStep(place) {
  const step = shown?.steps[place];
  if (!step) return;
  STEPS.pointed = step.number;
  const victims = step.preempted.length ? `, preempted ${step.preempted.map((number) => `#${number}`).join(" ")}` : "";
  say("steps-read", `Step ${step.number}: ${step.prefill} prefill and ${step.decode} decode tokens, ${milliseconds(step.ms)}${victims}`);
  drawSteps(shown);
}

// A fleet: a table of its replicas in the place of one engine's blocks

function drawFleet({ replicas, num_unfinished: numUnfinished, num_failovers: numFailovers }) {
  find("fleet").hidden = false;
  find("engine").hidden = find("figures").hidden = true;
  setState(numUnfinished ? `running ${numUnfinished}` : "idle", numUnfinished ? "running" : "");
  say("num-replicas", whole.format(replicas.length));
  say("fleet-said", replicas.length
    ? `Replicas that have answered. Answers moved to another replica: ${whole.format(numFailovers)}.`
    : "No replica has answered yet. Send a prompt.");
  find("replicas").replaceChildren(...replicas.map((replica) => {
    const rate = replica.hit_rate === null ? "–" : `${(100 * replica.hit_rate).toFixed(1)} %`;
    const state = replica.has_died ? "dead" : "";
    const cells = [replica.name, state, whole.format(replica.num_answered), whole.format(replica.num_generated), rate];
    return make("tr", { className: replica.has_died ? "out" : "" }, ...cells.map((text) => make("td", { textContent: text })));
  }));
}

// The stream of pictures

let latest = null; // the last picture that came
let shown = null; // the one that is drawn
let isHeld = false;
let isPlanned = false;
let source = null;

function drawAll() {
  isPlanned = false;
  if (!latest || isHeld || document.hidden) return;
  if (latest.replicas) {
    say("served", served.model);
    drawFleet(latest);
    return;
  }
  shown = latest;
  say("served", [served.model, shown.scheduler].filter(Boolean).join(" · "));
  for (const part of [drawFigures, drawPool, drawTables, drawQueues, drawSteps]) part(shown);
}

function plan() {
  if (isPlanned) return;
  isPlanned = true;
  if (calm.matches) setTimeout(drawAll, 1000);
  else requestAnimationFrame(drawAll);
}

/** A hidden page looks away: the engine then makes no pictures for it. */
function look() {
  source?.close();
  source = null;
  if (document.hidden) return;
  source = new EventSource("live");
  source.onmessage = (event) => {
    latest = JSON.parse(event.data);
    plan();
  };
  source.onerror = () => setState("no connection", "gone");
  source.onopen = plan;
}

// Prompts and answers

const served = { model: "", key: "" };
const calls = new Set(); // the AbortControllers of what is under way

async function callApi(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (served.key) headers.Authorization = `Bearer ${served.key}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(`v1/${path}`, { ...options, headers, signal });
  if (response.ok) return response;
  if (response.status === 401) askForKey();
  const text = await response.text();
  let message = text.slice(0, 500);
  let code;
  try {
    ({ message, code } = JSON.parse(text).error);
  } catch {
    // not OpenAI's shape: shown as it came
  }
  const wait = response.headers.get("Retry-After");
  throw Object.assign(new Error(`${response.status}: ${message}${wait ? ` (retry in ${wait} s)` : ""}`), { code });
}

function askForKey() {
  find("try").open = true;
  find("key-label").hidden = false;
  find("key").focus();
}

async function learnModel() {
  try {
    const [model] = (await (await callApi("models")).json()).data;
    served.model = model.id;
    if (model.has_chat_template && find("chat").hidden) {
      find("chat").hidden = false;
      find("try").open = false;
    }
    plan();
  } catch (error) {
    tell(error.message, true);
  }
}

function tell(text, isProblem = false, id = "said") {
  say(id, text);
  find(id).classList.toggle("problem", isProblem);
}

/** Sends prompts in one call: a browser opens only six connections to a host. */
async function ask(prompts) {
  const numAnswers = find("n").valueAsNumber;
  const control = new AbortController();
  calls.add(control);
  find("stop").disabled = false;
  tell("");
  const cards = prompts.flatMap((prompt) => Array.from({ length: numAnswers }, () => new Card(prompt)));
  find("answers").prepend(...cards.map((card) => card.element));
  while (find("answers").children.length > Math.max(MAX_ANSWERS, cards.length)) find("answers").lastChild.remove();
  try {
    const response = await callApi("completions", {
      model: served.model || undefined,
      prompt: prompts.length === 1 ? prompts[0] : prompts,
      max_tokens: find("max-tokens").valueAsNumber,
      temperature: find("temperature").valueAsNumber,
      n: numAnswers,
      stream: true,
    }, control.signal);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) cards[choice.index].add(choice.text, choice.finish_reason);
    }
    const numEnded = cards.filter((card) => card.isEnded).length;
    tell(numEnded === 1 ? "The answer is complete." : `${numEnded} answers are complete.`);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    for (const card of cards) card.end(isStopped ? "stopped by you" : "failed");
    tell(isStopped ? "Stopped." : error.message, !isStopped);
  } finally {
    calls.delete(control);
    find("stop").disabled = !calls.size;
  }
}

/** The JSON of each server-sent event: lines are split at LF, and an event may come in several pieces. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // when the page stops reading, the server aborts the request
  }
}

class Card {
  constructor(prompt) {
    this.begun = performance.now();
    this.first = 0;
    this.isEnded = false;
    this.head = make("p", { className: "head", textContent: "waiting" });
    this.text = make("span", { className: "given" });
    this.body = make("p", {}, make("span", { className: "asked", textContent: prompt }), this.text);
    this.element = make("li", {}, this.head, this.body);
  }

  add(text, reason) {
    const now = performance.now() - this.begun;
    this.first ||= now;
    this.text.append(text);
    this.head.textContent = `first token after ${milliseconds(this.first)}`;
    if (reason) {
      this.end(reason);
      this.head.textContent += `, all after ${milliseconds(now)}`;
    }
  }

  end(reason) {
    if (this.isEnded) return;
    this.isEnded = true;
    if (!this.first) this.head.textContent = "no token";
    this.body.append(make("span", { className: "ended", textContent: reason }));
  }
}

// A conversation

const talk = { messages: [], control: null }; // the AbortController of the answer under way

async function converse(text) {
  const { messages } = talk;
  const control = (talk.control = new AbortController());
  const card = new Card(text);
  let numTokens = 0;
  find("turns").append(card.element);
  find("turns").scrollTop = find("turns").scrollHeight;
  find("message").value = "";
  setTalking(true);
  tell("", false, "chat-said");
  messages.push({ role: "user", content: text });
  try {
    const response = await callChat(messages, card, control.signal);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      numTokens = event.usage?.completion_tokens ?? numTokens;
      const [choice] = event.choices;
      if (choice?.delta.content || choice?.finish_reason) follow(() => card.add(choice.delta.content ?? "", choice.finish_reason));
    }
    follow(() => { card.head.textContent = `${whole.format(numTokens)} tokens, ${card.head.textContent}`; });
    tell("The answer is complete.", false, "chat-said");
  } catch (error) {
    const isStopped = error.name === "AbortError";
    follow(() => card.end(isStopped ? "stopped by you" : "failed"));
    tell(isStopped ? "Stopped." : error.message, !isStopped, "chat-said");
  } finally {
    if (card.text.textContent) messages.push({ role: "assistant", content: card.text.textContent });
    else messages.pop();
    if (talk.control === control) {
      talk.control = null;
      if (!card.text.textContent) find("message").value ||= text; // to be sent again
      setTalking(false);
    }
  }
}

function setTalking(isTalking) {
  const [before, after] = isTalking ? ["chat-send", "chat-stop"] : ["chat-stop", "chat-send"];
  find(after).disabled = false;
  if (document.activeElement === find(before)) find(after).focus(); // a disabled button would lose it
  find(before).disabled = true;
}

/** Has a conversation answered. Of one that is too long, the older half of the turns is dropped, as often as need be. */
async function callChat(messages, card, signal) {
  for (;;) {
    try {
      return await callApi("chat/completions", {
        model: served.model || undefined,
        messages,
        max_completion_tokens: find("chat-max-tokens").valueAsNumber,
        temperature: find("chat-temperature").valueAsNumber,
        stream: true,
        stream_options: { include_usage: true },
      }, signal);
    } catch (error) {
      if (error.code !== "context_length_exceeded" || messages.length < 3) throw error;
      messages.splice(0, 2 * Math.ceil((messages.length - 1) / 4));
      card.element.before(make("li", { className: "about", textContent: "The turns above no longer fit, and are left out." }));
    }
  }
}

/** Changes the last turn, and keeps its end in sight if it was. */
function follow(change) {
  const turns = find("turns");
  const isAtEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
  change();
  if (isAtEnd) turns.scrollTop = turns.scrollHeight;
}

function beginAnew() {
  talk.control?.abort();
  talk.control = null;
  talk.messages = [];
  find("turns").replaceChildren();
  setTalking(false);
  tell("A new conversation.", false, "chat-said");
  find("message").focus();
}

// What is pressed and pointed at

function walk(id, columns, count, current, read) {
  find(id).addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(), ArrowDown: columns() }[event.key];
    if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    read(Math.min(Math.max(current() + move, 0), count() - 1));
    say("spoken", find(`${id}-read`).textContent);
  });
}

function point(id, placeAt, read) {
  for (const kind of ["pointermove", "pointerdown"]) {
    find(id).addEventListener(kind, (event) => {
      const box = find(id).getBoundingClientRect();
      read(placeAt(event.clientX - box.left, event.clientY - box.top, box.width));
    });
  }
}

function begin() {
  for (const text of SUGGESTIONS) {
    const button = make("button", { type: "button", textContent: text });
    button.addEventListener("click", () => {
      find("prompt").value = text;
      find("prompt").focus();
    });
    find("suggestions").append(button);
  }
  find("form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask([find("prompt").value]);
  });
  find("send-many").addEventListener("click", () => {
    if (!find("form").reportValidity()) return;
    const prompt = find("prompt").value;
    ask([prompt, ...SUGGESTIONS.filter((text) => text !== prompt)].slice(0, 8));
  });
  find("stop").addEventListener("click", () => {
    for (const control of calls) control.abort();
  });
  find("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = find("message").value.trim();
    if (text && !talk.control) converse(text);
  });
  find("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    find("chat-form").requestSubmit();
  });
  find("chat-stop").addEventListener("click", () => talk.control?.abort());
  find("chat-new").addEventListener("click", beginAnew);
  find("key").addEventListener("change", () => {
    served.key = find("key").value;
    tell("");
    learnModel();
  });
  find("hold").addEventListener("click", () => {
    isHeld = !isHeld;
    find("hold").setAttribute("aria-pressed", String(isHeld));
    plan();
  });
  point("pool", (x, y) => {
    const column = Math.floor(x / pool.size);
    return column < pool.columns ? Math.floor(y / pool.size) * pool.columns + column : -1;
  }, readBlock);
  walk("pool", () => pool.columns, () => shown?.pool.num_blocks ?? 0, () => pool.pointed, readBlock);
  const placeOfStep = () => shown?.steps.findIndex((step) => step.number === STEPS.pointed) ?? -1;
  point("steps", (x, _, width) => {
    const column = Math.floor(((x - STEPS.left) * STEPS.shown) / (width - STEPS.left));
    return column - STEPS.shown + (shown?.steps.length ?? 0);
  }, readStep);
  walk("steps", () => 0, () => shown?.steps.length ?? 0, placeOfStep, readStep);
  new ResizeObserver(redraw).observe(find("pool"));
  document.addEventListener("visibilitychange", look);
  look();
  learnModel();
}

/** A new width needs a new drawing, of the same picture. */
function redraw() {
  if (!shown) return;
  drawPool(shown);
  drawSteps(shown);
}

begin();
