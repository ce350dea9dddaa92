"""All eight incidents in one table: name, classes, the smallest workload, and what a run of it counts.

Phase 7's pages, figures and tests read it. It imports the learners' fixes, so no module that they use may import it.
Pure standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from minicache.errors import MinicacheError
from minicache.request import Request, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Observer, observe
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedScheduler
from minicache_course.incidents import broken
from minicache_course.incidents.bases import EngineScheduler, ForkingScheduler, PhasedScheduler
from minicache_course.incidents.case_1_cap import FixedCapScheduler
from minicache_course.incidents.case_2_order import FixedOrderScheduler
from minicache_course.incidents.case_3_thrash import FixedThrashScheduler
from minicache_course.incidents.case_4_victim import FixedVictimScheduler
from minicache_course.incidents.case_5_ignore import FixedIgnoreScheduler
from minicache_course.incidents.case_6_livelock import FixedLivelockScheduler
from minicache_course.incidents.case_7_feasible import FixedFeasibleScheduler
from minicache_course.incidents.case_8_copy import FixedCopyScheduler


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload as data.

    Attributes:
        options: arguments of the scheduler.
        requests: of each, in the order of arrival: id, prompt tokens, max_tokens, group. All arrive before step 0.
        fork: (id, child's id): forked when it has its first token. None: no fork.
        max_steps: where a run is given up.
    """

    options: dict[str, Any]
    requests: tuple[tuple[str, int, int, str], ...]
    fork: tuple[str, str] | None = None
    max_steps: int = 1000

    def make_requests(self) -> list[Request]:
        """The requests, new."""
        return [Request(name, [1] * prompt, tokens, group=group) for name, prompt, tokens, group in self.requests]


@dataclass(frozen=True, slots=True)
class Incident:
    """One bug of a real scheduler.

    Attributes:
        number: 1 … 8; the task that exposes and fixes it has the same.
        name: a few words.
        slug: as in its module's name, `case_1_cap`.
        what: what went wrong, in a sentence.
        broken: the scheduler with the bug.
        fixed: the same without it.
        base: the engine that both extend.
        workload: the smallest that shows it.
        counter: the field of `Counters` that proves it.
        source: where it was reported, or can be read.
    """

    number: int
    name: str
    slug: str
    what: str
    broken: type[PagedScheduler]
    fixed: type[PagedScheduler]
    base: type[PagedScheduler]
    workload: Workload
    counter: str
    source: str

    @property
    def module(self) -> str:
        """The lab's module."""
        return f"minicache_course.incidents.case_{self.number}_{self.slug}"


@dataclass(slots=True)
class Counters:
    """The counts of one run of a workload.

    Attributes:
        num_steps: steps in which a token was computed or a request finished.
        max_batch_size: the most requests that computed in one step.
        num_generated_tokens: tokens that requests have generated.
        num_prefill_tokens: tokens computed for requests of which nothing was in the cache.
        num_preemptions: how often a request lost its batch slot.
        first_preempted: the request that lost its batch slot first, "" if none did.
        num_unbacked_tokens: tokens that were computed, at most in one step, without a block to put them in.
        num_idle_blocks: blocks that waiting requests held, at most.
        num_capacity: requests that finished as FINISHED_CAPACITY and would have fitted into the empty pool.
        num_unfinished: requests that did not finish within max_steps, or before the error.
        finished: the finished requests, in this order.
        error: the type of the error that a step ended in, "" if none did.
    """

    num_steps: int = 0
    max_batch_size: int = 0
    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    first_preempted: str = ""
    num_unbacked_tokens: int = 0
    num_idle_blocks: int = 0
    num_capacity: int = 0
    num_unfinished: int = 0
    finished: list[str] = field(default_factory=list)
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The counters by name, for JSON."""
        return asdict(self)


def measure(workload: Workload, create: Callable[..., Scheduler]) -> Counters:
    """Run a workload and count.

    Args:
        workload: what to run.
        create: makes the scheduler: a class, or what `functools.partial` makes of one.

    Returns:
        The counters. An error of the scheduler's own is one of them, and ends the run.
    """
    requests = workload.make_requests()
    scheduler = create(**workload.options)
    counting = _Counting(workload.fork, requests)
    counters = counting.counters
    try:
        drive(observe(scheduler, counting), requests, max_steps=workload.max_steps)
    except MinicacheError as error:
        counters.error = type(error).__name__
    for request in requests:
        counters.num_generated_tokens += len(request.output_token_ids)
        counters.num_unfinished += not request.status.is_finished
        feasible = -(-request.num_prompt_tokens // scheduler.pool.block_size) <= scheduler.pool.num_blocks
        counters.num_capacity += feasible and request.status is RequestStatus.FINISHED_CAPACITY
    return counters


class _Counting(Observer):
    """Counts what happens, step by step, and forks a request when it has its first token."""

    def __init__(self, fork: tuple[str, str] | None, requests: list[Request]) -> None:
        self.counters = Counters()
        self.fork = fork
        self.requests = requests

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        counters = self.counters
        counters.num_steps += bool(output.scheduled or output.finished)
        counters.max_batch_size = max(counters.max_batch_size, len(output.scheduled))
        counters.num_preemptions += len(output.preempted)
        if output.preempted and not counters.first_preempted:
            counters.first_preempted = str(output.preempted[0])
        counters.finished += map(str, output.finished)
        num_unbacked = 0
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            counters.num_prefill_tokens += 0 if request.num_computed_tokens else num_new
            room = len(request.block_ids) * scheduler.pool.block_size
            num_unbacked += min(num_new, max(0, request.num_computed_tokens + num_new - room))
        counters.num_unbacked_tokens = max(counters.num_unbacked_tokens, num_unbacked)
        num_idle = sum(len(request.block_ids) for request in scheduler.waiting.values())
        counters.num_idle_blocks = max(counters.num_idle_blocks, num_idle)

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        self.counters.finished += [str(request.request_id) for request in finished]
        if self.fork is not None and isinstance(scheduler, ForkingScheduler):
            self.requests.append(scheduler.fork_request(*self.fork))
            self.fork = None


INCIDENTS: Final[tuple[Incident, ...]] = (
    Incident(
        number=1,
        name="The cap",
        slug="cap",
        what="A batch holds at most N − 1 requests; with one batch slot, no request is ever served.",
        broken=broken.CapScheduler,
        fixed=FixedCapScheduler,
        base=EngineScheduler,
        workload=Workload({"num_blocks": 8, "max_num_seqs": 1}, (("0", 10, 5, "text"),), max_steps=100),
        counter="max_batch_size",
        source="mistral.rs, paged_attention/scheduler.rs, the test of max_num_seqs",
    ),
    Incident(
        number=2,
        name="First come, last served",
        slug="order",
        what="The batch is sorted by arrival and then reversed: the oldest request is preempted for the newest.",
        broken=broken.ReversedScheduler,
        fixed=FixedOrderScheduler,
        base=PagedScheduler,
        workload=Workload({"num_blocks": 10}, (("0", 80, 20, "text"), ("1", 80, 20, "text"))),
        counter="first_preempted",
        source="mistral.rs issue 2033, pull request 2034",
    ),
    Incident(
        number=3,
        name="Bucket thrash",
        slug="thrash",
        what="Only the shortest length bucket runs; all others are preempted, and computed from their first token on.",
        broken=broken.ThrashScheduler,
        fixed=FixedThrashScheduler,
        base=PhasedScheduler,
        workload=Workload({"num_blocks": 64}, (("long", 120, 100, "text"), ("short", 50, 100, "text"))),
        counter="num_prefill_tokens",
        source="mistral.rs issue 2024",
    ),
    Incident(
        number=4,
        name="The victim in the head's slot",
        slug="victim",
        what="The request preempted for the head of the queue becomes the head, and gets the slot without blocks.",
        broken=broken.VictimHeadScheduler,
        fixed=FixedVictimScheduler,
        base=EngineScheduler,
        workload=Workload({"num_blocks": 7}, (("newest", 10, 100, "text"), ("head", 112, 1, "text"))),
        counter="num_unbacked_tokens",
        source="mistral.rs, paged_attention/scheduler.rs, the eviction for a request that has waited too long",
    ),
    Incident(
        number=5,
        name="One ignored, all ignored",
        slug="ignore",
        what="A flag that marks one request as impossible is never reset: those behind it get no blocks.",
        broken=broken.StickyIgnoreScheduler,
        fixed=FixedIgnoreScheduler,
        base=EngineScheduler,
        workload=Workload({"num_blocks": 4}, (("impossible", 100, 5, "text"), ("small", 10, 5, "text"))),
        counter="num_unbacked_tokens",
        source="mistral.rs, paged_attention/scheduler.rs, did_ignore",
    ),
    Incident(
        number=6,
        name="The livelock",
        slug="livelock",
        what="A request that cannot join the batch is put back onto the queue that is being drained.",
        broken=broken.LivelockScheduler,
        fixed=FixedLivelockScheduler,
        base=PagedScheduler,
        workload=Workload({"num_blocks": 64}, (("text", 10, 5, "text"), ("image", 10, 5, "image"))),
        counter="error",
        source="mistral.rs pull request 2034",
    ),
    Incident(
        number=7,
        name="Given up after one victim",
        slug="feasible",
        what="One request is evicted for the head of the queue; if that is not enough, the head is given up.",
        broken=broken.OneVictimScheduler,
        fixed=FixedFeasibleScheduler,
        base=EngineScheduler,
        workload=Workload(
            {"num_blocks": 10}, (("first", 10, 70, "text"), ("second", 10, 70, "text"), ("large", 150, 1, "text"))
        ),
        counter="num_capacity",
        source="mistral.rs, paged_attention/scheduler.rs; pull request 2034",
    ),
    Incident(
        number=8,
        name="The unbudgeted copy",
        slug="copy",
        what="A shared block must be copied before it is written; the copy's block was not counted, and there is none.",
        broken=broken.UnbudgetedCopyScheduler,
        fixed=FixedCopyScheduler,
        base=ForkingScheduler,
        workload=Workload({"num_blocks": 2}, (("parent", 20, 5, "text"),), fork=("parent", "child")),
        counter="error",
        source="mistral.rs, paged_attention/block_engine.rs, can_append_token_to_seq",
    ),
)
"""The eight, in the order of the tasks."""
