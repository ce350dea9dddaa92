"""What must hold while a scheduler is explored: properties of every action, and invariants of every state.

Each is a function of a `Moment`: None, or what is wrong. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from minicache.errors import InvariantError
from minicache.memory.blocks import blocks_for
from minicache.request import Request, RequestStatus
from minicache.scheduler import fair
from minicache.scheduler.audit import Auditor
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.chunked import ChunkedPrefillScheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedScheduler
from minicache.scheduler.queue import arrival_key
from minicache.verifier.properties import nothing_is_lost, victims_are_last, work_is_done
from minicache.verifier.world import Moment, Property

STEPS: Final = ("schedule", "retry")
"""The actions that schedule a step."""
NO_STEP: Final = SchedulerOutput()


def of_steps(rule: Property) -> Property:
    """Have a property asked of `STEPS` only."""
    rule.kinds = STEPS  # type: ignore[attr-defined]
    return rule


def step_is_right(moment: Moment) -> str | None:
    """What phase 6's auditor says of a step, of its commit, and of a recovery."""
    auditor: Any = moment.auditor
    scheduler, output, kind = moment.scheduler, moment.output, moment.action.kind
    try:
        if kind == "schedule":
            before = {each.request_id for each in auditor.batch}
            shares = isinstance(auditor, SharingAuditor)
            if shares:
                auditor.check_found(scheduler)
                auditor.check_copies(scheduler, output)
            for request in moment.finished:
                if request.status is not RequestStatus.FINISHED_CAPACITY:
                    return f"{request!r} was finished by a step that is not computed yet"
                auditor.on_finish(scheduler, request)
            auditor.check_work(scheduler, output)
            auditor.check_victims(scheduler, output)
            auditor.check_swaps(scheduler, output)
            if shares:
                auditor.fresh = {request.request_id for request in scheduler.running} - before
                auditor.check_writes(scheduler, output)
            return None
        if kind == "commit":
            auditor.check_tokens(scheduler, output, moment.finished)
        elif kind == "fail":
            auditor.check_recovery(scheduler)
        for request in moment.finished:
            auditor.check_end(scheduler, request)
    except Exception as error:  # a rule may stumble over books that are wrong enough
        return _words(error)
    return None


@of_steps
def tokens_are_where_they_should_be(moment: Moment) -> str | None:
    """What a request has computed lies in its blocks, on the device or in CPU swap space, and nothing else does."""
    assert moment.output is not None
    memory, num_new = moment.memory, moment.output.num_scheduled_tokens
    for request in moment.after:
        if request.block_ids:
            end = request.num_computed_tokens + num_new.get(request.request_id, 0)
            if not memory.holds(request, request.token_ids(0, end), request.block_ids, memory.blocks):
                return f"{request!r} would read what was not computed for its tokens"
        elif request.host_block_ids:
            tokens = request.token_ids(0, request.num_computed_tokens)
            if not memory.holds(request, tokens, request.host_block_ids, memory.host_blocks):
                return f"{request!r} was swapped out, and other tokens than its own are in CPU swap space"
    return None


@of_steps
def first_is_not_forgotten(moment: Moment) -> str | None:
    """Of any STARVATION_BOUND + 1 admissions in a row, one is of the request that arrived first of all that wait."""
    if moment.num_bypasses > fair.STARVATION_BOUND and isinstance(moment.scheduler, fair.FairScheduler):
        return f"{moment.num_bypasses} admissions in a row went ahead of the request that arrived first"
    return None


@of_steps
def classes_stay_apart(moment: Moment) -> str | None:
    """All requests of a batch are of one compatibility class."""
    scheduler = moment.scheduler
    if isinstance(scheduler, fair.FairScheduler) and len({request.group for request in scheduler.running}) > 1:
        return f"{scheduler.running} are in one batch, and of two compatibility classes"
    return None


@of_steps
def admits_in_order(moment: Moment) -> str | None:
    """Each request that is admitted is `next_of` those that wait."""
    scheduler = moment.scheduler
    if not isinstance(scheduler, fair.FairScheduler):
        return None
    for request, waiting, batch, num_bypasses in moment.admissions:
        best = next_of(scheduler, waiting, batch, num_bypasses)
        if request is not best:
            return f"{request!r} is admitted, and {best!r} should have been, after {num_bypasses} bypasses in a row"
    return None


def next_of(
    scheduler: fair.FairScheduler, waiting: Sequence[Request], batch: Sequence[Request], num_bypasses: int
) -> Request | None:
    """Who is admitted next of those that wait; None if none may.

    At the bound the one that arrived first; below it the one that is protected (phase 9), or else the most urgent of
    those that may share the batch. A step that admits does not change who is protected.
    """
    protected = getattr(scheduler, "protected", None)
    if num_bypasses >= fair.STARVATION_BOUND:
        best = min(waiting, key=arrival_key, default=None)
    elif protected is not None:
        best = protected if protected in waiting else None
    else:
        return min((each for each in waiting if _fits(each, batch)), key=_urgency, default=None)
    return best if best is not None and _fits(best, batch) else None


def _fits(request: Request, batch: Sequence[Request]) -> bool:
    return not batch or batch[0].group == request.group


@of_steps
def first_is_protected(moment: Moment) -> str | None:
    """`protected` is the request that phase 9 protects.

    A request that is preempted before it has gained a token, while one that arrived later stays in the batch and none
    that arrived earlier waits, is protected until it has gained one, or another request is.
    """
    scheduler, output, before = moment.scheduler, moment.output, moment.before
    if not isinstance(scheduler, ChunkedPrefillScheduler):
        return None
    assert output is not None
    requests = {each.request_id: each for each in (*moment.after, *moment.finished)}
    batch = [each for each, was in before.items() if was.status is RequestStatus.RUNNING]
    if moment.action.kind == "retry":
        batch = []
    gained = {each for each in batch if len(before[each].output_token_ids) > requests[each].num_outputs_at_admission}
    waiting = [each for each in before if each not in batch]
    expected = moment.protected
    if expected in gained or expected not in before:
        expected = None
    for victim in output.preempted:
        arrived = arrival_key(requests[victim])
        batch.remove(victim)
        waiting.append(victim)
        is_passed = any(arrival_key(requests[each]) > arrived for each in batch if each not in output.finished)
        if victim not in gained and is_passed and all(arrival_key(requests[each]) >= arrived for each in waiting):
            expected = victim
    protected = None if scheduler.protected is None else scheduler.protected.request_id
    if protected != expected:
        return f"protected is request {protected!r}, and should be {expected!r}"
    return None


def _urgency(request: Request) -> tuple[float, ...]:
    return request.priority, request.arrival_time, request.arrival_index, request.fork_index


@of_steps
def waits_with_reason(moment: Moment) -> str | None:
    """The next waiting request is admitted if there are a batch slot, blocks and budget, and no request was preempted.

    A rule of the course's stages: a scheduler of one's own may have other reasons to let a request wait.
    """
    scheduler, output = moment.scheduler, moment.output
    assert output is not None
    if output.preempted or len(scheduler.running) >= scheduler.max_num_seqs:
        return None
    if not isinstance(scheduler, PagedScheduler):
        return None
    waiting = moment.after[len(scheduler.running) :]
    if isinstance(scheduler, fair.FairScheduler):
        head = next_of(scheduler, waiting, scheduler.running, moment.num_bypasses)
    else:
        head = waiting[0] if waiting else None
    if head is None:
        return None
    budget = scheduler.max_num_batched_tokens - output.total_num_scheduled_tokens
    spared = scheduler._num_watermark_blocks if scheduler.running else 0
    needed = blocks_for(head.num_tokens, scheduler.pool.block_size)
    left = 1 if scheduler.chunks_prompts else head.num_tokens - head.num_computed_tokens
    if left <= budget and needed + spared <= scheduler.pool.num_free:
        return f"{head!r} waits, with {scheduler.pool.num_free} blocks free and {budget} tokens left in the step"
    return None


@of_steps
def watermark_stays_free(moment: Moment) -> str | None:
    """A request that joins a batch leaves the blocks of the watermark free."""
    scheduler = moment.scheduler
    if not isinstance(scheduler, PagedScheduler) or not moment.admissions or not moment.admissions[-1].batch:
        return None
    if scheduler.pool.num_free < scheduler._num_watermark_blocks:
        return f"{moment.admissions[-1].request!r} is admitted into blocks that the watermark spares"
    return None


@of_steps
def swaps_what_fits(moment: Moment) -> str | None:
    """A victim is recomputed only if CPU swap space has no room for what it has computed."""
    host_pool, output = moment.scheduler.host_pool, moment.output
    if host_pool is None or output is None:
        return None
    for request in moment.after:
        if request.request_id in output.preempted and request.status is RequestStatus.WAITING:
            needed = blocks_for(moment.before[request.request_id].num_computed_tokens, host_pool.block_size)
            if 0 < needed <= host_pool.num_free:
                return f"{request!r} is to be computed again, and {host_pool.num_free} CPU blocks are free"
    return None


def books_agree(moment: Moment) -> str | None:
    """The auditor's rules of a state, and the scheduler's own `check()`."""
    scheduler = moment.scheduler
    output = scheduler.outstanding or NO_STEP
    auditor = SharingAuditor() if isinstance(moment.auditor, SharingAuditor) else Auditor()
    auditor.begin(scheduler)
    try:
        scheduler.check()
        auditor.check_places(scheduler)
        auditor.check_blocks(scheduler)
        auditor.check_holdings(scheduler, output)
        auditor.check_order(scheduler)
    except Exception as error:  # a rule may stumble over books that are wrong enough
        return _words(error)
    return None


def _words(error: Exception) -> str:
    if isinstance(error, InvariantError):
        return str(error).removeprefix("step 0, ")  # an auditor that has seen one step only
    return f"{type(error).__name__}: {error}"


PROPERTIES: Final[tuple[Property, ...]] = (
    nothing_is_lost,
    work_is_done,
    victims_are_last,
    step_is_right,
    tokens_are_where_they_should_be,
    first_is_not_forgotten,
    classes_stay_apart,
)
"""What holds of every action, with any scheduler."""

STAGE_PROPERTIES: Final[tuple[Property, ...]] = (
    *PROPERTIES,
    admits_in_order,
    first_is_protected,
    waits_with_reason,
    watermark_stays_free,
    swaps_what_fits,
)
"""What holds of every action, with the course's own stages."""

INVARIANTS: Final[tuple[Property, ...]] = (books_agree,)
"""What holds in every state."""
