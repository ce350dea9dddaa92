// What a frame says in words and numbers: next to the picture, and to a screen reader.

import { say, whole } from "../browser/say.js";

const NAMED = 6; // requests that a summary names

/** A time on the workload's clock. */
export function time(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "steps") return value === 1 ? say("1 step") : say("{count} steps", { count: Number(value.toFixed(1)) });
  return value < 0.9995 ? `${Number((value * 1000).toFixed(1))} ms` : `${value.toFixed(2)} s`;
}

/** So many tokens. */
export const tokens = (count) => (count === 1 ? say("1 token") : say("{count} tokens", { count }));

/** [name, value, what it is] of each number that is shown. */
export function numbers({ frames, settings }, at, unit) {
  const frame = frames[at];
  return [
    [say("step"), frame ? say("{at} of 0–{last}", { at, last: frames.length - 1 }) : "–", say("The scheduler's own steps, from 0")],
    [say("time"), time(frame?.time, unit), say("When the step began")],
    [say("waiting"), frame?.waiting ?? 0, say("Requests in the waiting queue")],
    [say("running"), frame?.slots.length ?? 0, say("Requests in the batch")],
    [say("blocks"), say("{used} of {blocks}", { used: frame?.used ?? 0, blocks: settings.blocks }), say("Blocks in use")],
    [say("finished"), frame?.finished ?? 0, say("Requests that have finished")],
    ["TTFT", time(frame?.ttft, unit), say("Time to first token, mean so far")],
    ["TPOT", time(frame?.tpot, unit), say("Time per output token after the first, mean of finished requests")],
    [say("preemptions"), frame?.preemptions ?? 0, say("How often a request has lost its batch slot")],
    [say("prefill tokens"), whole(frame?.prefill ?? 0), say("Tokens computed in prefills, those computed again included")],
  ];
}

const ROLES = {
  prompt: say("prefill"), generated: say("decode"), end: say("its last token"), free: say("waits in its slot"),
};
const EVENTS = {
  admit: say("admitted"), resume: say("resumed"), preempt: say("preempted"), swap_out: say("swapped out"),
  swap_in: say("swapped in"), finish: say("finished"), refuse: say("refused"),
};

/** A step of one scheduler, as one would tell it. */
export function summary(name, recording, at, unit) {
  const frame = recording.frames[at];
  if (!frame) return say("{name}: no step yet.", { name });
  const batch = frame.slots.map(([, request, role, count]) => `${request} ${ROLES[role]}${count > 1 ? `, ${tokens(count)}` : ""}`);
  const events = Object.entries(EVENTS).map(([kind, words]) => {
    const named = frame.events.filter(([each]) => each === kind).map(([, request]) => request);
    return named.length ? `${words}: ${some(named)}` : "";
  });
  const told = [
    say("{name}, step {at} of 0 to {last}", { name, at, last: recording.frames.length - 1 }) +
      (unit === "steps" ? "" : say(", at {time}", { time: time(frame.time, unit) })),
    batch.length ? say("computes {requests}", { requests: some(batch, "; ") }) : say("computes nothing"),
    say("{waiting} waiting, {used} of {blocks} blocks in use", {
      waiting: frame.waiting, used: frame.used, blocks: recording.settings.blocks,
    }),
    ...events,
  ];
  return `${told.filter(Boolean).join(". ")}.`;
}

function some(names, comma = ", ") {
  const shown = names.slice(0, NAMED).join(comma);
  return names.length > NAMED ? say("{names} and {count} more", { names: shown, count: names.length - NAMED }) : shown;
}

/** The legend: role → what it means here. */
export const LEGEND = [
  ["prompt", say("prefill")], ["generated", say("decode")], ["end", say("last token")],
  ["wasted", say("idle slot, reserved block")], ["shared", say("shared block")], ["free", say("waiting, free block")],
];
