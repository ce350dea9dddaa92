// The playground's page: its controls, two panes on one clock, and what happens when they are used.

import { say } from "../browser/say.js";
import * as store from "../browser/store.js";
import { Canvas } from "./canvas.js";
import { Clock, Player } from "./clock.js";
import { Code, OWN } from "./code.js";
import { colours, onSchemeChange } from "./colours.js";
import { addOwn, openOwn, ownFor, ownModules } from "./own.js";
import { problem, tellProblems } from "./problems.js";
import { Recording } from "./recording.js";
import { isStarted, run, stop } from "./runs.js";
import { NONE, SLIDERS, fromLink, sameRun, toLink } from "./settings.js";
import { save, toSvg } from "./svg.js";
import { LEGEND, numbers, summary, time } from "./words.js";

const SPEEDS = [1, 2, 4, 8, 15, 30, 60, 120];
const LONGEST = 12; // seconds that a run plays for, if the reader has chosen no speed and there is one so fast
const PATIENCE = 3000; // milliseconds after which a run is said to be still running
const root = document.getElementById("playground");
const get = (name) => root.querySelector(`[data-pg="${name}"]`);
const lessMotion = matchMedia("(prefers-reduced-motion: reduce)");
const read = async (name) => (await fetch(new URL(name, import.meta.url))).json();

const [catalogue, first] = await Promise.all([read("catalogue.json"), read("first.json")]);
const choices = [catalogue.workloads, catalogue.schedulers].flatMap(Object.values);
for (const choice of choices) choice.title = say(choice.title);
addOwn(catalogue);
const panes = ["a", "b"].map((name) => ({
  name,
  element: get(`pane-${name}`),
  select: get(`scheduler-${name}`),
  own: Object.assign(document.createElement("optgroup"), { label: say("Your scheduler") }),
  canvas: new Canvas(get(`canvas-${name}`)),
  numbers: get(`numbers-${name}`),
  told: get(`told-${name}`),
  recording: null,
  result: null,
  drawn: null, // the recording that the canvas shows
  looked: null, // the module of the learner's that the reader asked for
}));
const clock = new Clock();
const player = new Player(clock, {
  speed: () => SPEEDS[get("speed").value],
  onTick: (at) => show(at),
  onEnd: () => settle(),
  isGrowing: () => running,
});
const code = new Code(get("editor"), catalogue.files, { onChange: () => markChanged(), onRun: () => start({ play: true }) });

let state = fromLink(location.hash, catalogue);
let tick = -1; // where the clock stands
let running = false;
let wanted = null; // what `start` is to do as soon as this run is over
let isChanging = false; // a run is about to start, once the reader's hand rests
let isSpeedChosen = false;
let palette = colours();

// --- the controls ---------------------------------------------------------------------------------------------------

function fillIn() {
  for (const { numbers: list } of panes) {
    for (const [name, , title] of numbers(new Recording(state.settings), -1, "steps")) {
      const [entry, term, value] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
      term.textContent = name;
      entry.title = title;
      entry.append(term, value);
      list.append(entry);
    }
  }
  for (const [name, { title }] of Object.entries(catalogue.workloads)) get("workload").add(new Option(title, name));
  for (const { select, name } of panes) {
    for (const [value, { title, stage }] of Object.entries(catalogue.schedulers)) if (!stage) select.add(new Option(title, value));
    if (name === "b") select.add(new Option(say("no second scheduler"), NONE));
  }
  for (const [name, { values }] of Object.entries(SLIDERS)) get(name).max = values.length - 1;
  get("speed").max = SPEEDS.length - 1;
}

/** Offer the schedulers of the learner's files: none where there are no files, unless a link asks for one. */
function offerOwn() {
  for (const [index, { select, own }] of panes.entries()) {
    const offered = Object.entries(catalogue.schedulers).filter(
      ([name, scheduler]) => ownModules(scheduler, catalogue).length || (scheduler.stage && name === state.schedulers[index]),
    );
    own.replaceChildren(...offered.map(([name, { title }]) => new Option(title, name)));
    if (offered.length) select.insertBefore(own, select.querySelector(`[value="${NONE}"]`));
    else own.remove();
  }
}

/** Set every control to what `state` says. */
function setControls() {
  get("workload").value = state.workload;
  offerOwn();
  panes.forEach(({ select }, index) => (select.value = state.schedulers[index]));
  for (const [name, { values, told = String }] of Object.entries(SLIDERS)) {
    get(name).value = values.indexOf(state.settings[name]);
    setValue(name, told(state.settings[name]));
  }
  panes[1].element.hidden = state.schedulers[1] === NONE;
  for (const option of get("code-of").options) option.disabled = option.value === "b" && state.schedulers[1] === NONE;
  if (state.schedulers[1] === NONE) get("code-of").value = "a";
}

function setValue(name, words) {
  get(name).setAttribute("aria-valuetext", words);
  get(`${name}-value`).textContent = words;
}

/** A speed at which the run is neither over at once nor endless, unless the reader has set one. */
function chooseSpeed() {
  if (isSpeedChosen) return;
  const enough = SPEEDS.findIndex((speed) => clock.last / speed <= LONGEST);
  get("speed").value = enough < 0 ? SPEEDS.length - 1 : enough;
  setSpeed();
}

function setSpeed() {
  const count = SPEEDS[get("speed").value];
  setValue("speed", count === 1 ? say("1 step a second") : say("{count} steps a second", { count }));
  if (player.playing) player.restart(tick);
}

const scheduler = (pane) => catalogue.schedulers[state.schedulers[panes.indexOf(pane)]];
/** The learner's modules that a pane's scheduler has; none: it is the reference. */
const own = (pane) => ownModules(scheduler(pane), catalogue);
const whose = (pane) => (own(pane).length ? OWN : pane.name);
/** The module of a pane that the editor shows. */
const module = (pane) => {
  const modules = own(pane);
  return modules.includes(pane.looked) ? pane.looked : (modules[0] ?? scheduler(pane).module);
};
const sources = (pane) => code.sources(whose(pane), own(pane).length ? own(pane) : [scheduler(pane).module]);
const paneOf = (name) => panes.find((pane) => pane.name === name);
const title = (pane) => {
  const { stage, title: words } = scheduler(pane);
  if (stage && !own(pane).length) return catalogue.schedulers[stage].title;
  return code.isChanged(whose(pane), module(pane)) ? say("{scheduler}, changed", { scheduler: words }) : words;
};
const shownPanes = () => panes.filter((pane) => pane.recording);
const unit = () => catalogue.workloads[state.workload].unit;

// --- pictures -------------------------------------------------------------------------------------------------------

/** Have the clock stand at a tick, and draw it. */
function show(at) {
  tick = clock.ticks.length ? clock.clamp(at) : -1;
  const now = tick < 0 ? -Infinity : clock.ticks[tick];
  for (const pane of shownPanes()) {
    const frame = pane.recording.frameAt(now);
    if (pane.drawn === pane.recording && !pane.canvas.isOutgrown) pane.canvas.show(frame);
    else pane.canvas.reset(pane.recording, palette, frame);
    pane.drawn = pane.recording;
    setNumbers(pane, frame);
  }
  get("position").max = Math.max(0, clock.last);
  get("position").value = Math.max(0, tick);
  setValue("position", time(clock.ticks[tick], unit()));
}

function setNumbers(pane, at) {
  const told = numbers(pane.recording, at, unit());
  told.forEach(([, value], index) => {
    const cell = pane.numbers.children[index].lastElementChild;
    if (cell.textContent !== String(value)) cell.textContent = value;
  });
}

function drawAnew() {
  for (const pane of panes) pane.drawn = null;
  show(tick);
}

/** Once the picture stands still: its summary, its link, and the buttons. */
function settle() {
  root.dataset.state = running || wanted || isChanging ? "running" : "ready";
  const at = tick < 0 ? -Infinity : clock.ticks[tick];
  const told = shownPanes().filter(scheduler).map((pane) => summary(title(pane), pane.recording, pane.recording.frameAt(at), unit()));
  get("summary").textContent = told.join(" ");
  state.step = tick < 0 ? null : tick;
  clearTimeout(settle.timer);
  settle.timer = setTimeout(setLink, 200); // browsers let a page change its address only so often
  setButtons();
}

const setLink = () => history.replaceState(null, "", toLink(state, catalogue));

function setButtons() {
  get("run").textContent = running ? say("Stop") : say("Run");
  get("play").textContent = player.playing ? say("Pause") : say("Play");
  for (const name of ["start", "back", "play", "forward", "end", "position", "save"]) get(name).disabled = !clock.ticks.length;
}

function go(at) {
  player.pause();
  show(at);
  settle();
}

function togglePlaying() {
  if (player.playing) {
    player.pause();
    settle();
    return;
  }
  chooseSpeed();
  player.play(tick >= clock.last ? 0 : tick);
  setButtons();
}

// --- runs -----------------------------------------------------------------------------------------------------------

/** Run both schedulers; then play from the start, or go to tick `at`; without one, stay where the reader was. */
async function start({ play, at = null }) {
  if (running) {
    wanted = { play, at };
    return;
  }
  const share = clock.ticks.length ? tick / Math.max(1, clock.last) : 1;
  running = true;
  root.dataset.state = "running";
  player.pause();
  for (const pane of panes) prepare(pane);
  get("output").replaceChildren();
  get("output").hidden = true;
  clock.update([]);
  tick = -1;
  setButtons();
  if (!isStarted()) setStatus(say("Loading Python…"));
  const asked = shownPanes().map((pane) => ({
    scheduler: scheduler(pane).stage ?? state.schedulers[panes.indexOf(pane)],
    sources: sources(pane),
  }));
  let isDone = false;
  let patience = 0;
  const onReady = () => (patience = setTimeout(() => setStatus(say("Still running. Stop ends it.")), PATIENCE));
  const onPosted = (posted) => receive(posted, play);
  try {
    const { workload, settings, actions } = state;
    isDone = await run({ workload, settings, actions, panes: asked }, { onLoading: setStatus, onReady, onOutput: print, onPosted });
    setStatus(isDone ? "" : say("Stopped. The next run starts Python again."));
  } catch (error) {
    setStatus(say("Python could not run this: {message}", error), true);
  }
  clearTimeout(patience);
  running = false;
  for (const pane of shownPanes()) pane.drawn = null;
  if (!player.playing) show(play || !isDone ? clock.last : (at ?? Math.round(share * clock.last)));
  settle();
  if (wanted) {
    const next = wanted;
    wanted = null;
    start(next);
  }
}

function prepare(pane) {
  pane.recording = state.schedulers[panes.indexOf(pane)] === NONE ? null : new Recording(state.settings);
  pane.result = null;
  tell(pane);
}

/** What changed code prints. */
function print(line) {
  get("output").hidden = false;
  get("output").append(`${line}\n`);
}

function receive({ pane: number, frames, result }, play) {
  const pane = shownPanes()[number];
  setStatus("");
  if (frames) pane.recording.add(frames);
  if (result) {
    pane.result = result;
    tell(pane);
    if (get("code-of").value === pane.name) code.mark(whose(pane), result.error);
  }
  clock.update(shownPanes().map((each) => each.recording));
  const isLast = number === shownPanes().length - 1;
  if (play && isLast && !player.playing && !lessMotion.matches && clock.last > 0) {
    chooseSpeed();
    player.play(0);
    setButtons();
  }
}

function tell(pane) {
  tellProblems(pane.told, pane.result, ({ module: at, line }) => openCode(pane.name, line, at));
  if (scheduler(pane)?.stage && !own(pane).length) {
    pane.told.prepend(problem(say("This browser has no scheduler file of yours: this is the reference.")));
  }
}

function setStatus(words, isProblem = false) {
  const kept = store.isKept ? "" : say("This browser does not keep your code: copy it before you leave.");
  get("status").textContent = [words, kept].filter(Boolean).join(" ");
  get("status").classList.toggle("problem", isProblem);
}

// --- code -----------------------------------------------------------------------------------------------------------

async function openCode(name = get("code-of").value, line = null, at = null) {
  get("code").open = true;
  get("code-of").value = name;
  const pane = paneOf(name);
  pane.looked = at ?? pane.looked;
  try {
    await code.show(whose(pane), module(pane), setStatus);
    if (!running) setStatus("");
  } catch (error) {
    return setStatus(say("The code could not be loaded: {message}", error), true);
  }
  code.mark(whose(pane), pane.result?.error);
  markChanged();
  if (line) code.goTo(line);
}

function markChanged() {
  const pane = paneOf(get("code-of").value);
  const inPackage = `src/${module(pane).replaceAll(".", "/")}.py`;
  get("file").textContent = whose(pane) === OWN ? catalogue.files[module(pane)] : inPackage;
  get("undo").disabled = !code.isChanged(whose(pane), module(pane));
  for (const each of panes) {
    const isChanged = scheduler(each) && code.isChanged(whose(each), module(each));
    each.element.querySelector(".pg-changed").hidden = !isChanged;
  }
}

// --- what the reader does -------------------------------------------------------------------------------------------

/** Set all to what `state` says, and to the code that this browser keeps. */
function refresh() {
  setControls();
  markChanged();
  if (get("code").open) openCode();
}

function change(next, at = null) {
  root.dataset.state = "running";
  state = { ...state, ...next };
  refresh();
  isChanging = true;
  clearTimeout(change.timer);
  change.timer = setTimeout(() => {
    isChanging = false;
    start({ play: false, at });
  }, 200); // a slider on its way says a lot
}

/** Take files from the reader's disk, and run them in the first pane. */
async function openFiles() {
  const chosen = [...get("upload").files];
  get("upload").value = "";
  try {
    const opened = await openOwn(chosen, catalogue);
    if (!opened) return;
    panes[0].looked = opened;
    change({ schedulers: [ownFor(opened, state.schedulers, catalogue), state.schedulers[1]] });
  } catch (error) {
    setStatus(error.message, true);
  }
}

function listen() {
  get("workload").addEventListener("change", ({ target }) => {
    const { settings, schedulers } = catalogue.workloads[target.value];
    change({ workload: target.value, settings: { ...settings }, schedulers: [...schedulers] }, Infinity);
  });
  panes.forEach(({ select }, index) => select.addEventListener("change", () => {
    change({ schedulers: state.schedulers.map((name, each) => (each === index ? select.value : name)) });
  }));
  for (const [name, { values }] of Object.entries(SLIDERS)) {
    get(name).addEventListener("input", ({ target }) => change({ settings: { ...state.settings, [name]: values[target.value] } }));
  }
  get("run").addEventListener("click", () => (running ? stop() : start({ play: true })));
  get("start").addEventListener("click", () => go(0));
  get("back").addEventListener("click", () => go(tick - 1));
  get("play").addEventListener("click", togglePlaying);
  get("forward").addEventListener("click", () => go(tick + 1));
  get("end").addEventListener("click", () => go(clock.last));
  get("position").addEventListener("input", ({ target }) => go(Number(target.value)));
  get("speed").addEventListener("input", () => {
    isSpeedChosen = true;
    setSpeed();
  });
  get("save").addEventListener("click", savePicture);
  get("open").addEventListener("click", () => get("upload").click());
  get("upload").addEventListener("change", openFiles);
  get("copy").addEventListener("click", copyLink);
  get("code").addEventListener("toggle", () => get("code").open && openCode());
  get("code-of").addEventListener("change", () => openCode());
  get("run-code").addEventListener("click", () => start({ play: true }));
  get("undo").addEventListener("click", () => {
    const pane = paneOf(get("code-of").value);
    code.reset(whose(pane), module(pane));
    markChanged();
  });
  root.addEventListener("keydown", press);
  store.onElsewhere(refresh);
  addEventListener("hashchange", () => {
    const next = fromLink(location.hash, catalogue);
    root.scrollIntoView({ behavior: lessMotion.matches ? "auto" : "smooth" }); // the link may be far below
    if (sameRun(next, state)) go(next.step ?? clock.last);
    else change(next, next.step ?? Infinity);
  });
  onSchemeChange(() => {
    palette = colours();
    drawAnew();
  });
  new ResizeObserver(drawAnew).observe(panes[0].element);
}

/** Arrow keys step wherever they have no other meaning. */
function press(event) {
  if (event.target.closest("input, select, textarea, [contenteditable], pre") || event.altKey || event.ctrlKey || event.metaKey) return;
  const actions = {
    ArrowLeft: () => go(tick - 1), ArrowRight: () => go(tick + 1), Home: () => go(0), End: () => go(clock.last),
  };
  if (!event.target.closest("button, summary, a")) actions[" "] = togglePlaying;
  if (!(event.key in actions) || !clock.ticks.length) return;
  event.preventDefault();
  actions[event.key]();
}

async function copyLink() {
  setLink();
  try {
    await navigator.clipboard.writeText(location.href);
    setStatus(say("The link is copied."));
  } catch {
    setStatus(say("The link is in the address bar."));
  }
}

function savePicture() {
  const at = clock.ticks[tick];
  const shown = shownPanes().map((pane) => {
    const frame = pane.recording.frameAt(at);
    const told = numbers(pane.recording, frame, unit()).map(([name, value]) => `${name} ${value}`);
    pane.recording.moveTo(frame);
    return {
      title: title(pane),
      numbers: [told.slice(0, 5).join(" · "), told.slice(5).join(" · ")],
      recording: pane.recording,
      at: frame,
    };
  });
  const name = `minicache-${state.workload}-${state.schedulers.filter((each) => each !== NONE).join("-")}-${tick}.svg`;
  const svg = toSvg({
    title: say("{workload}, on minicache's schedulers", { workload: catalogue.workloads[state.workload].title }),
    summary: get("summary").textContent,
    panes: shown,
    legend: LEGEND,
    palettes: catalogue.palettes,
  });
  save(name.replaceAll("+", "-"), svg);
}

// --- the beginning --------------------------------------------------------------------------------------------------

fillIn();
setControls();
setSpeed();
listen();
markChanged();
const recorded = { workload: first.workload, schedulers: first.panes.map((pane) => pane.scheduler), settings: first.settings };
const isReference = panes.every((pane) => !scheduler(pane) || !Object.keys(sources(pane)).length);
if (isReference && sameRun(state, recorded)) {
  panes.forEach((pane, index) => {
    prepare(pane);
    pane.recording.add(first.panes[index].frames);
  });
  clock.update(shownPanes().map((pane) => pane.recording));
  go(state.step ?? clock.last);
} else {
  await start({ play: false, at: state.step ?? Infinity }); // a link to a picture: draw it
}
