// The page's end of the worker: start Python, run a source, stop it.

import { LANGUAGE, say } from "./say.js";

const LOADING = { python: say("Loading Python…"), course: say("Loading the course…") };

/** What `run` rejects with once `stop` was called. */
export class Stopped extends Error {}

/**
 * Python in a worker of its own. It begins to load at once.
 *
 *   const python = new Python(["minicache.zip"], { onLoading: (words) => …, onOutput: (line) => … });
 *   await python.ready;                                    // rejects if it cannot be loaded
 *   await python.run("post(args['n'] + 1)", { n: 1 }, (value) => …);
 *   python.stop();                                         // ends whatever runs; then make another
 *
 * worker.js describes what a source sees. One source runs at a time; `run` queues behind the one before it.
 */
export class Python {
  #worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  #runs = new Map(); // id → {resolve, reject, onPosted}
  #nextId = 1;
  #settle;

  constructor(archives, { onLoading = () => {}, onOutput = () => {} } = {}) {
    this.onLoading = onLoading;
    this.onOutput = onOutput;
    this.ready = new Promise((resolve, reject) => (this.#settle = { resolve, reject }));
    this.ready.catch(() => {}); // anyone who waits for it hears of it
    this.#worker.addEventListener("message", ({ data }) => this.#hear(data));
    this.#worker.addEventListener("error", (event) => this.#end(new Error(event.message || say("the worker did not start"))));
    this.#worker.postMessage({ type: "init", archives, language: LANGUAGE });
  }

  /** Run Python; `onPosted` gets what it posts, while it runs. Rejects with a traceback, or with `Stopped`. */
  async run(source, args = null, onPosted = () => {}) {
    await this.ready;
    const id = this.#nextId++;
    return new Promise((resolve, reject) => {
      this.#runs.set(id, { resolve, reject, onPosted });
      this.#worker.postMessage({ type: "run", id, source, args });
    });
  }

  /** End the worker, whatever it does. */
  stop() {
    this.#end(new Stopped("stopped"));
  }

  #end(error) {
    this.#worker.terminate();
    this.#settle.reject(error);
    for (const { reject } of this.#runs.values()) reject(error);
    this.#runs.clear();
  }

  #hear({ type, id, what, value, text, seconds }) {
    if (type === "loading") this.onLoading(LOADING[what]);
    else if (type === "output") this.onOutput(text);
    else if (type === "ready") this.#settle.resolve(seconds);
    else if (type === "failed") this.#end(new Error(text));
    else if (type === "posted") this.#runs.get(id)?.onPosted(value);
    else {
      const run = this.#runs.get(id);
      this.#runs.delete(id);
      if (type === "done") run?.resolve();
      else run?.reject(new Error(text));
    }
  }
}
