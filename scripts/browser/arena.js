// The arena in the page: an editor with a policy, "Score it", and a table of what came of it.
//
// docs/*/arena.md has the empty element; arena.json, made by build.py, has the policies to begin with.

import { make } from "./account.js";
import { createEditor } from "./editor.js";
import { Python, Stopped } from "./python.js";
import { LANGUAGE, say } from "./say.js";
import * as store from "./store.js";

const ARCHIVES = ["minicache.zip", ...(LANGUAGE === "es" ? ["spanish.zip"] : [])];

const SCORE = `
from dataclasses import asdict
from minicache import __version__
from minicache_course.arena import fleet, score
from minicache_course.arena.loop import PolicyRefusedError
from minicache_course.arena.record import as_record
from minicache_course.language import translated
try:
    run, total = (fleet.score, len(fleet.WAVES)) if args["league"] == "fleet" else (score.score, score.NUM_LOADS)
    found = run(args["text"], seed=args["seed"], tell=lambda done: post({"done": done, "total": total}))
    post({"record": as_record(found, __version__, "", args["league"])})
except PolicyRefusedError as error:
    post({"refused": translated(str(error)), "line": error.line})
`;

const root = document.getElementById("arena");
const policies = await (await fetch(new URL("arena.json", import.meta.url))).json(); // name → text
let python = null;
let editor = null;
let record = null;

const button = (text, onclick, more = {}) => make("button", { type: "button", onclick, ...more }, text);
const name = make("select", { "aria-label": say("Policy"), onchange: open }, ...Object.keys(policies).map(option));
const seed = make("input", { type: "number", min: "0", value: "0", "aria-label": say("Seed") });
const run = button(say("Score it"), score, { class: "mc-run" });
const stop = button(say("Stop"), () => python?.stop(), { disabled: true });
const save = button(say("Download the score file"), download, { disabled: true });
const frame = make("div", { class: "mc-editor" });
const status = make("p", { class: "mc-status", role: "status" });
const results = make("div", { class: "mc-results", tabindex: "0", role: "region", "aria-label": say("Results") });
const reset = button(say("Reset"), () => {
  store.write(key(), null);
  open();
});

root.append(
  make("div", { class: "mc-bar" }, name, make("label", {}, `${say("Seed")} `, seed), run, stop),
  frame,
  make("div", { class: "mc-bar" }, reset, save, make("span", { class: "mc-keys" }, say("Esc, then Tab leaves the editor"))),
  status,
  results,
);
editor = createEditor(frame, { text: "", label: say("Your policy"), onChange: keep });
open();

function option(each) {
  return make("option", { value: each }, each);
}

function key() {
  return `arena/${name.value}`;
}

function open() {
  editor.text = store.read(key()) ?? policies[name.value];
  editor.mark([]);
}

function keep(text) {
  if (text !== (store.read(key()) ?? policies[name.value])) store.write(key(), text === policies[name.value] ? null : text);
}

async function score() {
  run.disabled = true;
  stop.disabled = save.disabled = false;
  save.disabled = true;
  results.replaceChildren();
  editor.mark([]);
  python ??= new Python(ARCHIVES, { onLoading: (words) => (status.textContent = words) });
  const league = name.value.startsWith("fleet") ? "fleet" : "scheduler";
  try {
    await python.ready;
    status.textContent = say("Serving…");
    await python.run(SCORE, { text: editor.text, seed: Number(seed.value), league }, hear);
  } catch (error) {
    python = null;
    status.textContent = error instanceof Stopped ? say("Stopped.") : error.message;
  }
  run.disabled = false;
  stop.disabled = true;
}

function hear(told) {
  if (told.done) status.textContent = say("{done} of {total} runs", told);
  if (told.refused) {
    status.textContent = told.refused;
    if (told.line) editor.mark([{ line: told.line, message: told.refused }]);
  }
  if (told.record) show(told.record);
}

function show(found) {
  record = found;
  save.disabled = false;
  status.textContent = say("Score: {percent} % of the bound", { percent: found.score.toFixed(2) });
  const heads = [say("workload"), say("rate"), say("requests"), say("good"), say("bound"), say("share")];
  const rows = found.cells.map((cell) =>
    [
      cell.workload,
      cell.rate,
      cell.num_requests,
      cell.cost ? `${cell.num_good} − ${cell.cost.toFixed(0)}` : cell.num_good,
      cell.bound.toFixed(0),
      `${(100 * cell.share).toFixed(1)} %`,
    ].map((text) => make("td", {}, String(text))),
  );
  results.append(
    make(
      "table",
      {},
      make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)))),
      make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells))),
    ),
  );
}

function download() {
  const file = new Blob([`${JSON.stringify(record, null, 2)}\n`], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(file), download: "score.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}
