// The moving picture of the home page: the recording of the playground's first run, played while it can be seen.

import { Canvas } from "./canvas.js";
import { Clock, Player } from "./clock.js";
import { colours, onSchemeChange } from "./colours.js";
import { Recording } from "./recording.js";

const STEPS_A_SECOND = 1.5;
const PAUSE = 4000; // milliseconds for which the end is shown

const figure = document.getElementById("moving");
const first = await (await fetch(new URL("first.json", import.meta.url))).json();
const lessMotion = matchMedia("(prefers-reduced-motion: reduce)");
const canvases = [...figure.querySelectorAll("canvas")].map((element) => new Canvas(element));
const recordings = first.panes.map(({ frames }) => {
  const recording = new Recording(first.settings);
  recording.add(frames);
  return recording;
});
const clock = new Clock();
clock.update(recordings);
let tick = clock.last;
let isSeen = false;
let again = 0;

const player = new Player(clock, {
  speed: () => STEPS_A_SECOND,
  onTick: show,
  onEnd: () => (again = setTimeout(() => play(0), PAUSE)),
  isGrowing: () => false,
});

function show(at) {
  tick = at;
  canvases.forEach((canvas, pane) => canvas.show(recordings[pane].frameAt(clock.ticks[at])));
}

function drawAnew() {
  canvases.forEach((canvas, pane) => canvas.reset(recordings[pane], colours(), recordings[pane].frameAt(clock.ticks[tick])));
}

function play(from) {
  clearTimeout(again);
  if (isSeen && !lessMotion.matches && !player.playing) player.play(from);
}

function pause() {
  clearTimeout(again);
  player.pause();
}

new ResizeObserver(drawAnew).observe(figure);
onSchemeChange(drawAnew);
new IntersectionObserver(([{ isIntersecting }]) => {
  isSeen = isIntersecting;
  if (isSeen) play(tick === clock.last ? 0 : tick);
  else pause();
}).observe(figure);
lessMotion.addEventListener("change", () => {
  pause();
  if (lessMotion.matches) show(clock.last);
  else play(0);
});
