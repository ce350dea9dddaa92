"""What a trace alone shows of a run: `Auditor`'s rules for a file that any server may have written.

A trace has no single blocks, so it cannot show that one was lost; but where each request was, and which tokens it
computed, can be followed from step to step. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from minicache.errors import InvariantError
from minicache.request import RequestId
from minicache.trace import TraceEntry, TraceEvent, TraceStep


def audit_trace(
    steps: Iterable[TraceStep],
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    first_come: bool = False,
) -> int:
    """Follow every request through a trace, from the first step on, and raise at the first that cannot be.

    - steps: they are numbered 0, 1, 2, …; time does not run backwards; used and free blocks have the same sum in all.
    - events: a request arrives, is admitted, may be preempted and resumed any number of times, and finishes; nothing
      else happens to it, and nothing before or after. Swapping out goes with a preemption, swapping in with a
      resumption from it. No step that preempts admits or resumes a request. After a step that failed (preemptions
      with a reason), requests that were swapped out are preempted too, and those preempted may be resumed at once.
    - batch: it holds the requests that were admitted or resumed and have not been preempted since, each once.
    - tokens: a request goes on where it was. Swapped out it keeps its computed tokens, else it starts at 0. One
      token is generated in each step that computes its last one. Draft tokens come behind that; what is accepted of
      them is computed, and generated too.
    - counts: num_running, num_waiting and num_swapped are those that follow from the events.
    - limits: those that are given, and every step computes a token or finishes a request.

    Args:
        steps: of one server, from its start, as `minicache.trace.read_trace` gives them.
        max_num_seqs: the most requests in the batch; None: unknown.
        max_num_batched_tokens: the most tokens of a step; None: unknown. A request that has outgrown it may exceed it.
        first_come: whether no request may be in the batch while one waits that arrived earlier.

    Returns:
        How many steps there were.

    Raises:
        InvariantError: "step 3, tokens: …", with the request.
    """
    audit = _Audit(max_num_seqs, max_num_batched_tokens, first_come)
    for step in steps:
        audit.follow(step)
    return audit.num_steps


@dataclass(slots=True)
class _Life:
    """What the trace has shown of a request so far."""

    arrival: int
    place: str = "new"  # then "in" the batch, "out" of it or "swapped" out
    num_computed: int = 0
    num_output: int = 0
    num_prompt: int | None = None
    was_preempted: bool = False
    kept: int | None = None  # computed tokens that it loses unless it is swapped out in this step
    comes_back: bool = False  # resumed from the host in this step; swap_in has to say so


class _Audit:
    def __init__(self, max_num_seqs: int | None, max_num_batched_tokens: int | None, first_come: bool) -> None:
        self.max_num_seqs, self.budget, self.first_come = max_num_seqs, max_num_batched_tokens, first_come
        self.num_steps = 0
        self.num_arrived = 0
        self.lives: dict[RequestId, _Life] = {}  # of the unfinished
        self.finished: dict[RequestId, _Life] = {}  # of those that finished in this step
        self.before: TraceStep | None = None

    def fail(self, rule: str, message: str) -> NoReturn:
        raise InvariantError(f"step {self.num_steps}, {rule}: {message}")

    def follow(self, step: TraceStep) -> None:
        self.check_step(step)
        self.finished = {}
        for event in step.events:
            self.take(event)
        kinds = {event.kind for event in step.events if event.kind != "preempt" or event.reason is None}
        if "preempt" in kinds and kinds & {"admit", "resume"}:
            self.fail("events", "a request is admitted in a step that preempts")
        for request_id, life in self.lives.items():
            if life.comes_back:
                self.fail("events", f"request {request_id!r} was swapped out, and resumes without being swapped in")
            life.kept = None
        self.check_batch(step)
        self.check_counts(step)
        self.check_limits(step)
        self.before = step
        self.num_steps += 1

    def check_step(self, step: TraceStep) -> None:
        before = self.before
        if step.step != self.num_steps:
            self.fail("steps", f"it is numbered {step.step}")
        if step.seconds < 0 or (before is not None and step.time < before.time):
            self.fail("steps", f"it begins at {step.time} and takes {step.seconds} seconds")
        num_blocks = step.num_used_blocks + step.num_free_blocks
        if before is not None and num_blocks != before.num_used_blocks + before.num_free_blocks:
            self.fail("steps", f"{step.num_used_blocks} blocks used and {step.num_free_blocks} free are not all")

    def take(self, event: TraceEvent) -> None:
        """What an event makes of a request, if it can happen to it where it is."""
        request_id, life = event.request_id, self.lives.get(event.request_id)
        where = "is not here" if life is None else f"is {life.place!r}"
        match event.kind, life:
            case "arrive", None:
                self.lives[request_id] = _Life(self.num_arrived)
                self.num_arrived += 1
            case "refuse", None:
                pass
            case "admit", _Life(place="new"):
                life.place = "in"
            case "resume", _Life(place="out" | "swapped"):
                life.comes_back = life.place == "swapped"
                life.place = "in"
            case "swap_in", _Life(place="in", comes_back=True):
                life.comes_back = False
            case "preempt", _Life(place="in" | "swapped") if event.reason is not None:  # the step failed
                life.place, life.was_preempted, life.num_computed = "out", True, 0
            case "preempt", _Life(place="in"):
                life.place, life.was_preempted = "out", True
                life.kept, life.num_computed = life.num_computed, 0
            case "swap_out", _Life(place="out", kept=int(kept)):
                life.place, life.num_computed = "swapped", kept
            case "finish", _Life():
                self.finished[request_id] = self.lives.pop(request_id)
            case _:
                self.fail("events", f"{event.kind} of request {request_id!r}, which {where}")

    def check_batch(self, step: TraceStep) -> None:
        ids = [entry.request_id for entry in step.batch]
        if len(set(ids)) < len(ids):
            self.fail("batch", f"a request is in it twice: {ids}")
        for entry in step.batch:
            life = self.in_batch(entry.request_id)
            if life is None:
                self.fail("batch", f"request {entry.request_id!r} is in it, and was not admitted")
            self.check_entry(entry, life)
        idle = [each for each, life in self.lives.items() if life.place == "in" and each not in ids]
        if idle and (self.budget is None or step.num_tokens < self.budget):
            self.fail("batch", f"requests {idle} have a slot in it, and compute nothing")

    def in_batch(self, request_id: RequestId) -> _Life | None:
        """The life of a request that has a batch slot, or had one until the end of this step."""
        for lives in (self.lives, self.finished):
            if (life := lives.get(request_id)) is not None and life.place == "in":
                return life
        return None

    def check_entry(self, entry: TraceEntry, life: _Life) -> None:
        if life.num_prompt is None:
            life.num_prompt = entry.num_prompt_tokens
        seen = entry.num_prompt_tokens, entry.num_computed_tokens, entry.num_output_tokens
        expected = life.num_prompt, life.num_computed, life.num_output
        num_tokens = life.num_prompt + life.num_output
        if seen != expected:
            self.fail("tokens", f"request {entry.request_id!r}: prompt, computed, output are {seen}, were {expected}")
        num_drafts, num_accepted, num_left = (
            entry.num_draft_tokens,
            entry.num_accepted_tokens,
            num_tokens - life.num_computed,
        )
        num_own = entry.num_new_tokens - num_drafts
        if not 1 <= num_own <= num_left:
            self.fail("tokens", f"request {entry.request_id!r} computes {num_own} after {seen}")
        if not 0 <= num_accepted <= num_drafts or (num_drafts and num_left > 1):
            self.fail("tokens", f"request {entry.request_id!r}: {num_accepted} of {num_drafts} draft tokens, {seen}")
        is_computed = num_own == num_left
        life.num_computed += num_own + num_accepted
        life.num_output += num_accepted + is_computed

    def check_counts(self, step: TraceStep) -> None:
        """The counts are of the moment after the schedule; a request that came or left since then may be in or out."""
        places = [life.place for life in self.lives.values()]
        running = {each for each, life in self.lives.items() if life.place == "in"}
        running |= {entry.request_id for entry in step.batch}
        arrived = {event.request_id for event in step.events if event.kind == "arrive"}
        since = sum(self.lives[each].place == "new" for each in arrived if each in self.lives)
        most_running = running | {each for each, life in self.finished.items() if life.place == "in"}
        left = [life.place for life in self.finished.values()]
        waiting = len(places) - places.count("in")
        bounds = (
            ("num_running", step.num_running, len(running), len(most_running)),
            ("num_waiting", step.num_waiting, waiting - since, waiting + len(left) - left.count("in")),
            ("num_swapped", step.num_swapped, places.count("swapped"), places.count("swapped") + left.count("swapped")),
        )
        for name, count, least, most in bounds:
            if not least <= count <= most:
                self.fail("counts", f"{name} is {count}, and the events make it {least}")

    def check_limits(self, step: TraceStep) -> None:
        if self.max_num_seqs is not None and step.num_running > self.max_num_seqs:
            self.fail("limits", f"{step.num_running} requests in the batch, at most {self.max_num_seqs} may be")
        if self.budget is not None and step.num_tokens > self.budget:
            large = [entry for entry in step.batch if entry.num_new_tokens > self.budget]
            grown = [each for each in large if (life := self.in_batch(each.request_id)) and life.was_preempted]
            if len(grown) != 1 or step.num_tokens - grown[0].num_new_tokens >= self.budget:
                self.fail("limits", f"{step.num_tokens} tokens, at most {self.budget} may be computed")
        if self.lives and not step.batch and not self.finished:
            self.fail("limits", f"no progress: nothing is computed, and {len(self.lives)} requests are unfinished")
        running = [(life.arrival, each) for each, life in self.lives.items() if life.place == "in"]
        waiting = [(life.arrival, each) for each, life in self.lives.items() if life.place != "in"]
        if self.first_come and running and waiting and max(running) > min(waiting):
            newer, older = max(running)[1], min(waiting)[1]
            self.fail("limits", f"request {newer!r} is in the batch, and {older!r} waits, which arrived before it")
