// Grades files with the course's own tests, each time in a Python in which nothing has run yet.
//
// grade.py tells, event by event, what it does. A run that gives no sign of life, or breaks Python, is ended with its
// worker; the next worker gets what the runs before it reported, and goes on with the other tests.

import { Python, Stopped } from "./python.js";
import { LANGUAGE, say } from "./say.js";

const ARCHIVES = ["minicache.zip", "grading.zip", "packages.zip", ...(LANGUAGE === "es" ? ["spanish.zip"] : [])];
const PREPARE = "from scripts.browser.grade import prepare\nprepare()";
const GRADE = "from scripts.browser.grade import grade\ngrade(args, post)";
const TICK = 0.25; // seconds between two looks at a run
const GRACE = 2; // seconds more than a run has: it finds most endless loops itself, and says where
const SPARES = 2; // a rerun follows a run at once, and a Python takes seconds to load
const CULPRITS = ["import", "file", "test", "result"];

export class Grader {
  #spares = []; // the last may still be loading
  #isLoading = false;
  #running = null;
  #isClosed = false;

  /** `onLoading` is called with words that say what is being loaded. */
  constructor(onLoading = () => {}) {
    this.onLoading = onLoading;
  }

  /** Load Pythons for the next gradings, one after the other, and none while one runs. */
  prepare() {
    if (this.#isLoading || this.#isClosed || this.#spares.length === SPARES) return;
    this.#isLoading = true;
    const python = new Python(ARCHIVES, { onLoading: (words) => this.onLoading(words) });
    const prepared = python.run(PREPARE).finally(() => (this.#isLoading = false));
    prepared.then(() => this.#running || this.prepare()).catch(() => {}); // anyone who grades with it hears of it
    this.#spares.push({ python, prepared });
  }

  /**
   * Grade. Rejects with `Stopped` when `stop` is called.
   *
   * @param {{phase: number, task: number | null, files: Object<string, string>}} asked
   * @param {(event: object) => void} onEvent `minicache_course.journal.Event`s
   * @returns {Promise<{account: object, passed: string[]}>} `minicache_course.account.Account`, ids of tasks
   */
  async grade(asked, onEvent = () => {}) {
    const told = [];
    for (;;) {
      const result = await this.#run({ ...asked, told }, (event) => {
        told.push(event);
        onEvent(event);
      });
      if (result) return result;
    }
  }

  /** End the grading that runs. */
  stop() {
    this.#running?.stop();
  }

  /** End everything. */
  close() {
    this.#isClosed = true;
    this.stop();
    for (const { python } of this.#spares) python.stop();
  }

  /** One worker's part of a grading; null if it was lost. */
  async #run(asked, tell) {
    if (!this.#spares.length) this.prepare();
    const { python, prepared } = this.#spares.shift();
    this.#running = python;
    let result = null;
    let last = null;
    let patience = Infinity;
    let silence = 0;
    const lose = (outcome, message) => tell({ ...last, kind: "lost", outcome, message });
    const hear = (posted) => {
      silence = 0;
      if (posted.patience) patience = posted.patience;
      else if (posted.account) result = posted;
      else {
        last = posted.event;
        tell(last);
        if (last.kind === "lost") python.stop();
      }
    };
    const ticking = setInterval(() => {
      silence += TICK; // and not by a clock: a computer that sleeps is no endless loop
      if (!last || silence < patience + GRACE) return;
      lose("endless loop?", say("endless loop? No answer within {patience} s", { patience }));
      last = { kind: "lost" };
      python.stop();
    }, 1000 * TICK);
    try {
      await prepared;
      await python.run(GRADE, asked, hear);
    } catch (error) {
      if (error instanceof Stopped && last?.kind !== "lost") throw error;
      if (!last || (last.kind !== "lost" && !CULPRITS.includes(last.kind))) throw error;
      if (last.kind !== "lost") lose("crashed", say("the process crashed ({error})", { error: lastLine(error.message) }));
    } finally {
      clearInterval(ticking);
      python.stop();
      this.#running = null;
      this.prepare();
    }
    return result;
  }
}

const lastLine = (text) => text.trim().split("\n").at(-1);
