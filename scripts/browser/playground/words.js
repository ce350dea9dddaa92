// What a frame says in words and numbers: next to the picture, and to a screen reader.

const NAMED = 6; // requests that a summary names

/** A time on the workload's clock. */
export function time(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "steps") return value === 1 ? "1 step" : `${Number(value.toFixed(1))} steps`;
  return value < 0.9995 ? `${Number((value * 1000).toFixed(1))} ms` : `${value.toFixed(2)} s`;
}

/** [name, value, what it is] of each number that is shown. */
export function numbers({ frames, settings }, at, unit) {
  const frame = frames[at];
  return [
    ["step", frame ? `${at} of 0–${frames.length - 1}` : "–", "The scheduler's own steps, from 0"],
    ["time", time(frame?.time, unit), "When the step began"],
    ["waiting", frame?.waiting ?? 0, "Requests in the waiting queue"],
    ["running", frame?.slots.length ?? 0, "Requests in the batch"],
    ["blocks", `${frame?.used ?? 0} of ${settings.blocks}`, "Blocks in use"],
    ["finished", frame?.finished ?? 0, "Requests that have finished"],
    ["TTFT", time(frame?.ttft, unit), "Time to first token, mean so far"],
    ["TPOT", time(frame?.tpot, unit), "Time per output token after the first, mean of finished requests"],
    ["preemptions", frame?.preemptions ?? 0, "How often a request has lost its batch slot"],
    ["prefill tokens", (frame?.prefill ?? 0).toLocaleString("en"), "Tokens computed in prefills, those computed again included"],
  ];
}

const ROLES = { prompt: "prefill", generated: "decode", end: "its last token", free: "waits in its slot" };
const EVENTS = {
  admit: "admitted", resume: "resumed", preempt: "preempted", swap_out: "swapped out", swap_in: "swapped in",
  finish: "finished", refuse: "refused",
};

/** A step of one scheduler, as one would tell it. */
export function summary(name, recording, at, unit) {
  const frame = recording.frames[at];
  if (!frame) return `${name}: no step yet.`;
  const batch = frame.slots.map(([, request, role, tokens]) => `${request} ${ROLES[role]}${tokens > 1 ? `, ${tokens} tokens` : ""}`);
  const events = Object.entries(EVENTS).map(([kind, words]) => {
    const named = frame.events.filter(([each]) => each === kind).map(([, request]) => request);
    return named.length ? `${words}: ${some(named)}` : "";
  });
  const told = [
    `${name}, step ${at} of 0 to ${recording.frames.length - 1}${unit === "steps" ? "" : `, at ${time(frame.time, unit)}`}`,
    batch.length ? `computes ${some(batch, "; ")}` : "computes nothing",
    `${frame.waiting} waiting, ${frame.used} of ${recording.settings.blocks} blocks in use`,
    ...events,
  ];
  return `${told.filter(Boolean).join(". ")}.`;
}

function some(names, comma = ", ") {
  const shown = names.slice(0, NAMED).join(comma);
  return names.length > NAMED ? `${shown} and ${names.length - NAMED} more` : shown;
}

/** The legend: role → what it means here. */
export const LEGEND = [
  ["prompt", "prefill"], ["generated", "decode"], ["end", "last token"], ["wasted", "idle slot, reserved block"],
  ["shared", "shared block"], ["free", "waiting, free block"],
];
