// Runs schedulers in Python, in a worker that is started by the first run and ended by `stop`.

import { Python, Stopped } from "../browser/python.js";

const ARCHIVES = ["minicache.zip", "../playground/playground.zip"];
const PATH = "import sys; '/course' in sys.path or sys.path.append('/course')\n"; // where scripts/ lies
const PLAY = `${PATH}from scripts.browser.playground.run import play; play(args, post)`;
const SOURCE = `${PATH}from scripts.browser.playground.edited import source_of; post(source_of(args))`;

let python = null;

function started(onLoading) {
  python ??= new Python(ARCHIVES, { onLoading });
  python.ready.catch(() => (python = null));
  return python;
}

/** Whether Python has been started. */
export const isStarted = () => python !== null;

/**
 * Serve a workload by each of the schedulers, one after the other.
 *
 * @param {{workload: string, settings: object, actions: string, panes: {scheduler: string, sources: object}[]}} asked
 * @param {{onLoading: (words: string) => void, onReady: () => void, onOutput: (line: string) => void,
 *   onPosted: (posted: {pane: number, frames?: object[], result?: object}) => void}} listeners `onLoading`:
 *   words that say what is being loaded; `onReady`: Python is there, and the run begins; `onOutput`: what the code prints; `onPosted`: frames
 *   as they come, at the end of each pane its result (run.py)
 * @returns {Promise<boolean>} false if it was stopped
 */
export async function run(asked, { onLoading, onReady, onOutput, onPosted }) {
  try {
    const running = started(onLoading);
    await running.ready;
    onReady();
    running.onOutput = onOutput;
    await running.run(PLAY, asked, onPosted);
    return true;
  } catch (error) {
    if (error instanceof Stopped) return false;
    throw error;
  }
}

/** The code of a module of the package. */
export async function sourceOf(module, onLoading) {
  let source = "";
  await started(onLoading).run(SOURCE, module, (posted) => (source = posted));
  return source;
}

/** End what runs, an endless loop too. The next run starts Python again, from the browser's cache. */
export function stop() {
  python?.stop();
  python = null;
}
