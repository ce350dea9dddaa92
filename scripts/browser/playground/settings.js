// What is being looked at, and the link that says it: #workload=six&a=static&b=continuous&slots=3&step=7.
// What a workload has by itself is left out of the link, so a link stays short.

import { tokens } from "./words.js";

/** The second scheduler's name where there is none. */
export const NONE = "none";

/** The workload that is in the link itself. */
const REPLAY = "replay";

export const SLIDERS = {
  blocks: { values: [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512] },
  block_size: { told: tokens, values: [1, 2, 4, 8, 16, 32, 64, 128] },
  slots: { values: Array.from({ length: 32 }, (_, index) => index + 1) },
  budget: { told: tokens, values: [1, 2, 3, 4, 6, 8, 10, 12, ...Array.from({ length: 10 }, (_, index) => 2 ** (index + 4))] },
};

/**
 * What a link says, completed by its workload's own settings. What it cannot mean is left out.
 *
 * @param {string} hash of the address, with or without "#"
 * @param catalogue catalogue.json: workloads and schedulers by name
 * @returns {{workload: string, schedulers: string[], settings: object, step: number | null, actions: string}}
 */
export function fromLink(hash, catalogue) {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  const workload = Object.hasOwn(catalogue.workloads, said.get("workload")) ? said.get("workload") : catalogue.first;
  const usual = catalogue.workloads[workload];
  const chosen = ["a", "b"].map((pane, index) => {
    const name = said.get(pane)?.replaceAll(" ", "+"); // what "+" means in a query
    return Object.hasOwn(catalogue.schedulers, name) || (index && name === NONE) ? name : usual.schedulers[index];
  });
  const settings = { ...usual.settings };
  for (const name of Object.keys(SLIDERS)) {
    const value = Number(said.get(name));
    if (Number.isInteger(value) && value > 0) settings[name] = nearest(SLIDERS[name].values, value);
  }
  const step = Number(said.get("step"));
  const actions = (workload === REPLAY && said.get("do")) || ""; // what happens, as minicache.verifier.link has it
  return { workload, schedulers: chosen, settings, actions, step: said.has("step") && step >= 0 ? Math.floor(step) : null };
}

/** The link's hash, "" for what the page shows by itself. */
export function toLink({ workload, schedulers, settings, step, actions }, catalogue) {
  const usual = catalogue.workloads[workload];
  const said = [["workload", workload]];
  ["a", "b"].forEach((pane, index) => said.push([pane, schedulers[index]]));
  for (const name of Object.keys(SLIDERS)) if (settings[name] !== usual.settings[name]) said.push([name, settings[name]]);
  if (workload === REPLAY && actions) said.push(["do", actions]);
  if (step !== null) said.push(["step", step]);
  return `#${said.map((pair) => pair.join("=")).join("&")}`;
}

/** Whether two states ask for the same run. */
export const sameRun = (one, other) =>
  one.workload === other.workload &&
  (one.actions ?? "") === (other.actions ?? "") &&
  one.schedulers.join() === other.schedulers.join() &&
  Object.keys(SLIDERS).every((name) => one.settings[name] === other.settings[name]);

const nearest = (values, value) =>
  values.reduce((best, each) => (Math.abs(each - value) < Math.abs(best - value) ? each : best));
