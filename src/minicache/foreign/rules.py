"""The rules, on another engine's scheduler: one workload, step by step.

| rule | holds |
|---|---|
| raises | none of the scheduler's methods raises an error |
| places | every unfinished request is in the batch or waits, once |
| blocks | no block is lost or free twice; none that a request lists is free; references = entries of block tables |
| work | each scheduled request computes at least one of its tokens, within the limits on requests and tokens |
| holdings | a scheduled request has the blocks for what it computes |
| contents | what a request reads from a slot is what was computed for these tokens at that position |
| tokens | each request gets the tokens that it would get alone, and as many as it asked for |
| progress | steps compute something, and after a bounded number of them there is a new token |

They are those of `minicache.scheduler.audit`, as far as another engine's state shows them. "contents" takes a model of
the cache: a slot holds which tokens, up to which position, were written there, and who wrote them. A step writes the
slots of everything it computes, then each request reads its slots from the first position on.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NoReturn, TypeVar

from minicache.foreign.adapter import Adapter, RequestState, State, Work
from minicache.foreign.workload import VOCABULARY, Workload

T = TypeVar("T")

MAX_IDLE_STEPS = 2
"""So many steps in a row may compute nothing while there are requests."""


@dataclass(frozen=True, slots=True)
class Step:
    """What was seen of a step.

    Attributes:
        added: ids of the requests that were added before it.
        aborted: ids of the requests that were aborted before it.
        work: what it computed.
        block_ids: id → block table, of the requests that it scheduled.
        preempted: ids of requests that were in the batch before it, and wait.
        finished: ids of the requests that finished.
    """

    added: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    block_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that a workload has broken.

    Attributes:
        rule: of the table above.
        message: what was seen.
        kind: what makes two findings the same: the rule, and for "raises" the error and where it was raised.
        workload: the requests that break it.
        steps: what happened until then; the last one is the step that broke it, as far as it came.
    """

    rule: str
    message: str
    kind: str
    workload: Workload
    steps: list[Step]


def replay(adapter: Adapter, workload: Workload) -> tuple[list[Step], Finding | None]:
    """Run one workload to its end, or to the first rule that is broken.

    Returns:
        The steps, and what was found; None: nothing.
    """
    run = _Run(adapter, workload)
    try:
        run.to_the_end()
    except _BrokenError as broken:
        return run.steps, Finding(broken.rule, broken.message, broken.kind, workload, run.steps)
    return run.steps, None


class _BrokenError(Exception):
    """A rule is broken: ends a run."""

    def __init__(self, rule: str, message: str, kind: str) -> None:
        super().__init__(message)
        self.rule, self.message, self.kind = rule, message, kind


@dataclass(frozen=True, slots=True)
class _Written:
    """What a slot holds: a key of all tokens up to the one that was written, its position, and who wrote it."""

    key: int
    position: int
    request_id: int


class _Run:
    """One workload on one engine."""

    def __init__(self, adapter: Adapter, workload: Workload) -> None:
        self.adapter, self.workload, self.limits = adapter, workload, workload.limits
        self.steps: list[Step] = []
        self.alone = [_alone(each.prompt, each.max_tokens) for each in workload.arrivals]
        self.coming = list(range(len(workload.arrivals)))
        self.unfinished: dict[int, int] = {}
        """Id → the time of its arrival. Time is counted in steps, and leaps over those without a request."""
        self.running: set[int] = set()
        self.slots: dict[int, _Written] = {}
        self.time = self.num_idle = self.num_without_token = self.num_output = 0

    def to_the_end(self) -> None:
        """Run all steps.

        Raises:
            _BrokenError: a rule is broken.
        """
        self.call(self.adapter.start, self.limits)
        while self.coming or self.unfinished:
            step = Step()
            self.steps.append(step)
            self.arrivals(step)
            if self.unfinished:
                self.check_progress(step, self.step(step))
            self.time += 1

    def arrivals(self, step: Step) -> None:
        """What happens before a step: requests arrive, and are aborted."""
        while self.coming and (self.workload.arrivals[self.coming[0]].step <= self.time or not self.unfinished):
            request_id = self.coming.pop(0)
            arrival = self.workload.arrivals[request_id]
            self.time = max(self.time, arrival.step)  # an idle server waits for the next request
            step.added.append(request_id)
            self.unfinished[request_id] = self.time
            self.call(self.adapter.add, request_id, arrival.prompt, arrival.max_tokens)
        for request_id, since in list(self.unfinished.items()):
            after = self.workload.arrivals[request_id].aborted_after
            if after is not None and self.time - since >= after:
                step.aborted.append(request_id)
                del self.unfinished[request_id]
                self.call(self.adapter.abort, request_id)
        self.running -= set(step.aborted)
        self.check_state()

    def step(self, step: Step) -> Iterable[RequestState]:
        """Schedule, compute and commit a step. What is unfinished after it."""
        work = self.call(self.adapter.schedule)
        step.work.extend(work)
        requests = self.check_state()
        scheduled = {each.request_id: requests[each.request_id] for each in work if each.request_id in requests}
        step.block_ids.update({request_id: tuple(each.block_ids) for request_id, each in scheduled.items()})
        step.preempted.extend(sorted(each for each in self.running if not requests[each].running))
        self.check_work(work, requests)
        keys = {request_id: _keys(each.token_ids) for request_id, each in scheduled.items()}
        self.check_contents(work, scheduled, keys)
        tokens = [_next(keys[each.request_id][each.start + each.num_tokens - 1]) for each in work]
        finished = self.call(self.adapter.commit, tokens)
        self.check_finished(finished)
        step.finished.extend(sorted(finished))
        requests = self.check_state()
        self.check_tokens(requests.values())
        self.running = {each.request_id for each in requests.values() if each.running}
        return requests.values()

    # The rules.

    def fail(self, rule: str, message: str, kind: str = "") -> NoReturn:
        """Report that a rule is broken."""
        raise _BrokenError(rule, message, kind or rule)

    def call(self, method: Callable[..., T], *arguments: object) -> T:
        """Rule "raises"."""
        try:
            return method(*arguments)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} in {frame.name}"
            text = re.sub(r" at 0x\w+", "", f": {error}") if str(error) else ""  # the same in every run
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            self.fail("raises", f"{method.__name__}() raises {kind}, {where}{text}", f"raises {kind}")

    def check_state(self) -> dict[int, RequestState]:
        """Rules "places" and "blocks". The requests by id."""
        state = self.call(self.adapter.state)
        times = Counter(each.request_id for each in state.requests)
        for request_id, count in times.items():
            if request_id not in self.unfinished:
                self.fail("places", f"request {request_id} has ended, and is still in the batch or waits")
            if count > 1:
                self.fail("places", f"request {request_id} is {count} times in the batch and among those that wait")
        if lost := self.unfinished.keys() - times.keys():
            self.fail("places", f"{self._names(lost)}: neither in the batch, nor waiting, nor finished")
        self.check_blocks(state)
        return {each.request_id: each for each in state.requests}

    def check_blocks(self, state: State) -> None:
        """Rule "blocks"."""
        listed = Counter(block_id for each in state.requests for block_id in each.block_ids)
        free, cached = Counter(state.free_block_ids), set(state.cached_block_ids)
        for each in state.requests:
            if len(set(each.block_ids)) < len(each.block_ids):
                self.fail("blocks", f"request {each.request_id} lists a block twice: {list(each.block_ids)}")
        for block_id in sorted({*listed, *free, *cached}):
            if not 0 <= block_id < self.limits.num_blocks:
                self.fail("blocks", f"block {block_id} is not one of the cache's {self.limits.num_blocks}")
            if free[block_id] > 1:
                self.fail("blocks", f"block {block_id} is {free[block_id]} times in the free list")
            if free[block_id] and listed[block_id]:
                holders = [each.request_id for each in state.requests if block_id in each.block_ids]
                self.fail("blocks", f"block {block_id} is free, and {self._names(holders)} lists it")
            if free[block_id] and block_id in cached:
                self.fail("blocks", f"block {block_id} is free, and the prefix cache has it")
        if lost := set(range(self.limits.num_blocks)) - listed.keys() - free.keys() - cached:
            self.fail("blocks", f"blocks {sorted(lost)} are lost: not free, and no request or cache has them")
        if state.references is not None:
            for block_id in sorted({*listed, *state.references}):
                count = state.references.get(block_id, 0)
                if count != listed[block_id]:
                    self.fail("blocks", f"block {block_id} has {count} references, and {listed[block_id]} list it")

    def check_work(self, work: Sequence[Work], requests: dict[int, RequestState]) -> None:
        """Rules "work" and "holdings"."""
        limits = self.limits
        for each in work:
            if each.request_id not in requests:
                self.fail("work", f"request {each.request_id} is scheduled, and is not unfinished")
            request = requests[each.request_id]
            end, num_tokens = each.start + each.num_tokens, len(request.token_ids)
            who = f"request {each.request_id}"
            if each.num_tokens < 1:
                self.fail(
                    "work", f"{who} is scheduled and computes nothing: {each.start} of {num_tokens} tokens are cached"
                )
            if not each.start >= 0 or end > num_tokens:
                self.fail("work", f"{who} computes {_positions(each)}, and has {num_tokens} tokens")
            if len(request.block_ids) * limits.block_size < end:
                blocks = f"{len(request.block_ids)} of the {-(-end // limits.block_size)} blocks that this needs"
                self.fail("holdings", f"{who} computes {_positions(each)} with {blocks}")
        times = Counter(each.request_id for each in work)
        if twice := [request_id for request_id, count in times.items() if count > 1]:
            self.fail("work", f"{self._names(twice)}: twice in one step")
        if len(work) > limits.max_num_seqs:
            self.fail("work", f"{len(work)} requests in a step of at most {limits.max_num_seqs}")
        if (total := sum(each.num_tokens for each in work)) > limits.max_num_batched_tokens:
            self.fail("work", f"{total} tokens in a step of at most {limits.max_num_batched_tokens}")

    def check_contents(
        self, work: Sequence[Work], requests: dict[int, RequestState], keys: dict[int, list[int]]
    ) -> None:
        """Rule "contents": write what the step computes, then read what it attends to."""
        for each in work:
            for position in range(each.start, each.start + each.num_tokens):
                slot = self._slot(requests[each.request_id], position)
                self.slots[slot] = _Written(keys[each.request_id][position], position, each.request_id)
        for each in work:
            for position in range(each.start + each.num_tokens):
                slot = self._slot(requests[each.request_id], position)
                written = self.slots.get(slot)
                if written is None or written.key != keys[each.request_id][position]:
                    block, offset = divmod(slot, self.limits.block_size)
                    reads = f"request {each.request_id} reads position {position} from block {block}, slot {offset}"
                    self.fail("contents", f"{reads}: {self._told(written, each.request_id, position)}")

    def check_finished(self, finished: dict[int, list[int]]) -> None:
        """Rule "tokens", of requests that have finished."""
        for request_id, output in finished.items():
            if request_id not in self.unfinished:
                self.fail("places", f"request {request_id} has finished a second time, or was never added")
            if list(output) != (alone := self.alone[request_id]):
                self.fail("tokens", f"request {request_id} ends with {list(output)}; alone it gets {alone}")
            del self.unfinished[request_id]

    def check_tokens(self, requests: Iterable[RequestState]) -> None:
        """Rule "tokens", of requests that go on."""
        for each in requests:
            prompt, alone = self.workload.arrivals[each.request_id].prompt, self.alone[each.request_id]
            output = list(each.token_ids[len(prompt) :])
            if tuple(each.token_ids[: len(prompt)]) != prompt or output != alone[: len(output)]:
                self.fail("tokens", f"request {each.request_id} has got {output}; alone it gets {alone}")
            if len(output) >= len(alone):
                self.fail("tokens", f"request {each.request_id} has its {len(alone)} tokens, and does not finish")

    def check_progress(self, step: Step, requests: Iterable[RequestState]) -> None:
        """Rule "progress": within the step, and over as many steps as all tokens together would take, twice."""
        self.num_idle = 0 if step.work or step.finished else self.num_idle + 1
        if self.num_idle > MAX_IDLE_STEPS and self.unfinished:
            waiting = self._names(self.unfinished)
            self.fail("progress", f"{self.num_idle} steps in a row compute nothing, and {waiting} wait")
        before, self.num_output = self.num_output, self.output_so_far(requests)
        self.num_without_token = 0 if self.num_output > before else self.num_without_token + 1
        if self.num_without_token > 2 * self.workload.num_tokens + 10:
            self.fail("progress", f"no request has got a token in {self.num_without_token} steps")

    def output_so_far(self, requests: Iterable[RequestState]) -> int:
        """Tokens that all requests have got; those that have ended count as if they had got all."""
        unfinished = {each.request_id: len(each.token_ids) for each in requests}
        lengths = {each: len(arrival.prompt) for each, arrival in enumerate(self.workload.arrivals)}
        added = [each for each in lengths if each not in self.coming]
        return sum(unfinished.get(each, lengths[each] + len(self.alone[each])) - lengths[each] for each in added)

    def _slot(self, request: RequestState, position: int) -> int:
        block, offset = divmod(position, self.limits.block_size)
        return request.block_ids[block] * self.limits.block_size + offset

    @staticmethod
    def _told(written: _Written | None, request_id: int, position: int) -> str:
        """What lies in a slot instead of what is read."""
        if written is None:
            return "nothing was written there"
        who = "it" if written.request_id == request_id else f"request {written.request_id}"
        after = ", after other tokens" if written.position == position else ""
        return f"{who} wrote its position {written.position} there{after}"

    @staticmethod
    def _names(request_ids: Iterable[int]) -> str:
        ids = sorted(request_ids)
        return f"request{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"


def _positions(work: Work) -> str:
    last = work.start + work.num_tokens - 1
    return f"position {last}" if last == work.start else f"positions {work.start} to {last}"


# The model: what it generates depends on all tokens before, and on nothing else.

_MODULUS = 2**61 - 1


def _keys(token_ids: Iterable[int]) -> list[int]:
    """For each position, a number for all tokens up to it; as good as unique."""
    return list(accumulate(token_ids, lambda key, token: (key * 1_000_003 + token + 1) % _MODULUS, initial=7))[1:]


def _next(key: int) -> int:
    """The token that the model generates after tokens with this key."""
    return (key * 0x9E3779B97F4A7C15 >> 31) % VOCABULARY


def _alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request gets that is served alone."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(_next(_keys(tokens)[-1]))
    return tokens[len(prompt) :]
