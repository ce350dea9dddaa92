// Python in a thread of its own: Pyodide, and the archives of assets/browser/ unpacked.
//
// It is a module worker. `python.js` starts it and is the only one that talks to it. The protocol:
//
//   to the worker                                  from the worker
//   {type: "init", archives: ["minicache.zip"],    {type: "loading", what: "python"}    …or "course": what is being fetched
//    language: "es"}                               {type: "ready", seconds: 2.6}
//                                                  {type: "failed", text}               …it cannot be used
//   {type: "run", id: 1, source, args}             {type: "posted", id: 1, value}       …post(value), any number
//                                                  {type: "done", id: 1}
//                                                  {type: "error", id: 1, text}         …a traceback
//   (to stop: Worker.terminate())                  {type: "output", text}               …what Python prints, a line; a
//                                                                                        run's first thousand, then "…"
//
// `source` is Python, run in a namespace of its own with two names in it: `args`, what the page sent, and
// `post(value)`, which sends a value to the page at once, while the source goes on running. Both are what JSON can hold.
// Python has the page's language in the environment variable LANGUAGE.
// Modules that are imported stay imported between runs; anyone who needs them fresh starts another worker.
//
// The archives are unpacked into /course, as they lie in the repository: src/minicache/…, scripts/…, labs/…, tests/…, and
// packages/… for wheels. /course, /course/src and /course/packages are on Python's path.

import { loadPyodide } from "./pyodide.mjs";

const HOME = "/course";
const MOST_LINES = 1000; // of what a run prints: a page that is sent more answers no one
let pyodide;
let printed = 0; // lines of this run

async function init({ archives, language }) {
  const began = performance.now();
  postMessage({ type: "loading", what: "python" });
  const fetched = archives.map(async (name) => {
    const answer = await fetch(new URL(name, import.meta.url));
    if (!answer.ok) throw new Error(`${name}: ${answer.status} ${answer.statusText}`);
    return answer.arrayBuffer();
  });
  pyodide = await loadPyodide({
    indexURL: new URL(".", import.meta.url).href,
    env: { LANGUAGE: language },
    stdout: print,
    stderr: print,
  });
  postMessage({ type: "loading", what: "course" });
  for (const archive of fetched) pyodide.unpackArchive(await archive, "zip", { extractDir: HOME });
  pyodide.runPython(`import sys; sys.path[:0] = ["${HOME}/src", "${HOME}/packages", "${HOME}"]`);
  postMessage({ type: "ready", seconds: (performance.now() - began) / 1000 });
}

function print(text) {
  if (++printed <= MOST_LINES) postMessage({ type: "output", text: printed < MOST_LINES ? text : "…" });
}

function run({ id, source, args }) {
  printed = 0;
  const send = (text) => postMessage({ type: "posted", id, value: JSON.parse(text) });
  const names = pyodide.toPy({ __name__: "__main__" });
  names.set("_send", send);
  names.set("_args", JSON.stringify(args ?? null));
  try {
    pyodide.runPython("import json\nargs = json.loads(_args)\ndef post(value): _send(json.dumps(value))", { globals: names });
    pyodide.runPython(source, { globals: names });
    postMessage({ type: "done", id });
  } catch (error) {
    postMessage({ type: "error", id, text: String(error.message ?? error) });
  } finally {
    names.destroy();
  }
}

addEventListener("message", async ({ data }) => {
  if (data.type === "run") return run(data);
  try {
    await init(data);
  } catch (error) {
    postMessage({ type: "failed", text: String(error.message ?? error) });
  }
});
