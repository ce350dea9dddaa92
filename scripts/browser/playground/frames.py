"""What a picture needs of a step: which request is in which batch slot, what each block holds, who waits, what it cost.

A frame is a dict that JSON takes, and the page draws nothing but frames. Blocks are sent as changes since the frame
before, since most of a pool stays as it is.

| key | what |
|---|---|
| `time`, `seconds` | when the step began, and how long it took, on the workload's clock |
| `slots` | `[slot, request, role, tokens]` of each occupied batch slot; 0 tokens: in the batch, and not in this step |
| `lost` | slots whose request was preempted in this step |
| `queue`, `waiting` | the first requests of the waiting queue, and how many there are |
| `blocks` | `[block, role, request]` of each block that changed |
| `used` | blocks with a reference |
| `prompt`, `generated` | tokens that the step computed in prefills and in decodes |
| `prefill` | prompt tokens so far, those computed again after a preemption included |
| `swapped`, `preemptions`, `finished` | requests in CPU swap space now; preemptions and finished requests so far |
| `ttft`, `tpot` | means so far, of those with a first token and of those that have finished; null without any |
| `events` | `[kind, request]` or `[kind, request, reason]`, as in `minicache.trace` |

Roles are those of `minicache.palette`. In a slot: prompt (prefill), generated (decode), end (its last token), free (the
step computes nothing of it). In a block: prompt, generated, by the first token in it; wasted (reserved, and empty);
shared; free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from minicache.request import Request, RequestId
from minicache.scheduler.base import Scheduler
from minicache.scheduler.observe import Observer
from minicache.scheduler.output import SchedulerOutput
from minicache.trace import TraceStep

QUEUE_SHOWN: Final = 12
"""Requests of the waiting queue that a frame names."""

Frame = dict[str, Any]
Block = tuple[str, str]
"""What a block holds, a role, and for which request; "" if it is free or shared."""

FREE: Final[Block] = ("free", "")


class Frames(Observer):
    """Makes a frame of each step: as an observer it looks at the scheduler, and `frame` adds what the trace knows.

    The observer must be called before the recorder whose steps go to `frame`, as `ServingSimulation` does.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}  # all that are not free
        self._changes: list[tuple[int, str, str]] = []
        self._queue: list[str] = []
        self._slots: dict[RequestId, int] = {}
        self._arrival: dict[RequestId, float] = {}  # of unfinished requests
        self._first_token: dict[RequestId, float] = {}  # when they had it, of unfinished requests
        self._ttft, self._tpot = Mean(), Mean()
        self._num_prefill_tokens = self._num_preemptions = self._num_finished = 0

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        """Note when it arrived."""
        self._arrival[request.request_id] = request.arrival_time

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Look at the pool and the queue as the step was scheduled."""
        blocks = dict(held_blocks(scheduler, output))
        changed = blocks.items() ^ self._blocks.items()
        self._changes = [(block_id, *blocks.get(block_id, FREE)) for block_id in sorted({each for each, _ in changed})]
        self._blocks = blocks
        names = zip(range(QUEUE_SHOWN), scheduler.waiting, strict=False)
        self._queue = [str(request_id) for _, request_id in names]

    def frame(self, step: TraceStep) -> Frame:
        """The frame of a step that is over, the one that was observed last."""
        lost = self._move(step)
        roles = self._roles(step)
        slots = sorted((slot, str(each), *roles.get(each, ("free", 0))) for each, slot in self._slots.items())
        num_prompt = sum(entry.num_new_tokens for entry in step.batch if entry.is_prefill)
        self._num_prefill_tokens += num_prompt
        self._note_times(step)
        return {
            "time": step.time,
            "seconds": step.seconds,
            "slots": slots,
            "lost": lost,
            "queue": self._queue,
            "waiting": step.num_waiting,
            "blocks": self._changes,
            "used": step.num_used_blocks,
            "prompt": num_prompt,
            "generated": step.num_tokens - num_prompt,
            "prefill": self._num_prefill_tokens,
            "swapped": step.num_swapped,
            "preemptions": self._num_preemptions,
            "finished": self._num_finished,
            "ttft": self._ttft.value,
            "tpot": self._tpot.value,
            "events": [
                [event.kind, str(event.request_id), *filter(None, [event.reason])]
                for event in step.events
                if event.kind != "arrive"
            ],
        }

    def _move(self, step: TraceStep) -> list[int]:
        """Give each request of the batch a slot, the lowest that is free; the slots that preempted ones have lost."""
        lost = []
        for event in step.events:
            if event.kind == "preempt":
                self._num_preemptions += 1
                # One that was scheduled in the very step that preempts it never had a slot.
                if (slot := self._slots.pop(event.request_id, None)) is not None:
                    lost.append(slot)
            elif event.kind in ("admit", "resume"):
                taken = set(self._slots.values())
                self._slots[event.request_id] = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        return lost

    def _roles(self, step: TraceStep) -> dict[RequestId, tuple[str, int]]:
        """What the step did for each request of its batch, and with how many tokens."""
        last = {event.request_id for event in step.events if event.kind == "finish"}
        return {
            entry.request_id: (
                "end" if entry.request_id in last else "prompt" if entry.is_prefill else "generated",
                entry.num_new_tokens,
            )
            for entry in step.batch
        }

    def _note_times(self, step: TraceStep) -> None:
        """Which requests have a first token with this step, and which have finished: their slots are free then."""
        now = step.time + step.seconds
        outputs = {}
        for entry in step.batch:
            num_tokens = entry.num_computed_tokens + entry.num_new_tokens
            if num_tokens == entry.num_prompt_tokens + entry.num_output_tokens:
                outputs[entry.request_id] = entry.num_output_tokens + 1
                if entry.num_output_tokens == 0:
                    self._first_token[entry.request_id] = now
                    self._ttft.add(now - self._arrival[entry.request_id])
        for event in step.events:
            if event.kind == "finish":
                self._num_finished += 1
                self._slots.pop(event.request_id, None)
                first, num_outputs = self._first_token.pop(event.request_id, now), outputs.get(event.request_id, 0)
                if num_outputs > 1:
                    self._tpot.add((now - first) / (num_outputs - 1))


class Mean:
    """The mean of what was added so far."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        """One value more."""
        self._sum += value
        self._count += 1

    @property
    def value(self) -> float | None:
        """The mean; None without a value."""
        return self._sum / self._count if self._count else None


def held_blocks(scheduler: Scheduler, output: SchedulerOutput) -> Iterator[tuple[int, Block]]:
    """Each block that a request of the batch holds, and what will be in it once the step is computed."""
    block_size = scheduler.pool.block_size
    for request in scheduler.running:
        num_stored = request.num_computed_tokens + output.num_scheduled_tokens.get(request.request_id, 0)
        for index, block_id in enumerate(request.block_ids):
            start = index * block_size
            if scheduler.pool.ref_count(block_id) > 1:
                yield block_id, ("shared", "")
            else:
                held = "prompt" if start < request.num_prompt_tokens else "generated"
                yield block_id, ("wasted" if start >= num_stored else held, str(request.request_id))
