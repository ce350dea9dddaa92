// The learner's own scheduler files: those of the labs in the browser, where they are kept, and the schedulers from them.

import { say } from "../browser/say.js";
import * as store from "../browser/store.js";

/** Add the learner's schedulers to those of the catalogue: "my-fair" is "fair" from the files that are there. */
export function addOwn({ schedulers }) {
  for (const [stage, scheduler] of Object.entries(schedulers)) {
    if (!scheduler.built_from.length) continue;
    schedulers[`my-${stage}`] = { ...scheduler, stage, title: say("{scheduler}, yours", { scheduler: scheduler.title }) };
  }
}

/** Of the modules that a scheduler of the learner's is built from, those that there is a file for. */
export const ownModules = ({ stage, built_from: modules }, { files }) =>
  stage ? modules.filter((module) => store.read(files[module]) !== null) : [];

/** The learner's scheduler that shows a module: its own stage or one that is built from it, best of those in `chosen`. */
export function ownFor(module, chosen, { schedulers }) {
  const own = Object.keys(schedulers).filter((name) => schedulers[name].stage);
  const isChosen = (name) => chosen.includes(name) || chosen.includes(schedulers[name].stage);
  const names = [...own.filter(isChosen), ...own];
  return names.find((name) => schedulers[name].module === module) ?? names.find((name) => schedulers[name].built_from.includes(module));
}

/**
 * Keep files of the reader's disk as the learner's.
 *
 * @param {Iterable<File>} chosen
 * @param {{files: object}} catalogue module → path of the learner's file
 * @returns {Promise<string | null>} the module of the last one in the order of the course; null: the reader keeps the old
 * @throws {Error} one of them is none of the course's files
 */
export async function openOwn(chosen, { files }) {
  const found = await Promise.all([...chosen].map(async (file) => {
    const module = Object.keys(files).find((each) => files[each].endsWith(`/${file.name}`));
    const names = Object.values(files).map((path) => path.split("/").at(-1)).join(", ");
    if (!module) throw new Error(say("{name} is none of the course's scheduler files: {names}", { name: file.name, names }));
    return { module, path: files[module], text: await file.text() };
  }));
  const lost = found.filter(({ path, text }) => ![null, text].includes(store.read(path))).map(({ path }) => path);
  if (lost.length && !confirm(say("Replace {paths}, which this browser keeps?", { paths: lost.join(", ") }))) return null;
  for (const { path, text } of found) store.write(path, text);
  return Object.keys(files).findLast((each) => found.some(({ module }) => module === each));
}
