"""Three properties of any scheduler: what must hold of every action, whatever came before.

Phase 7 builds them. A property is a function of a `Moment`: it looks at what one action has changed, and returns None,
or what is wrong, in words. The search for a moment that breaks it is `minicache.verifier.explore`'s. Pure standard
library.
"""

from __future__ import annotations

from minicache.verifier.world import Moment


def nothing_is_lost(moment: Moment) -> str | None:
    """No action loses a request, or a token that one has generated.

    Every request of `moment.before` is in `moment.after`, unless it is in `moment.finished`; and if it is, its
    output_token_ids begin with those that it had. After actions that add no request ("arrive", "fork" and "branch" do),
    `moment.after` has no other requests.

    Args:
        moment: an action of any kind.

    Returns:
        None if that holds; else what was lost or is too many, with the request's id.
    """
    finished = {request.request_id for request in moment.finished}
    there = {request.request_id: request for request in moment.after}
    for request_id, was in moment.before.items():
        request = there.get(request_id)
        if request is None and request_id not in finished:
            return f"request {request_id!r} has not finished, and is neither in the batch nor in the queue"
        if request is not None and request_id not in finished:
            kept = tuple(request.output_token_ids[: len(was.output_token_ids)])
            if kept != was.output_token_ids:
                return f"{request!r} had generated {was.output_token_ids}, and has {kept} of it"
    if moment.action.kind not in ("arrive", "fork", "branch"):
        for request_id in there:
            if request_id not in moment.before or request_id in finished:
                return f"request {request_id!r} is in the batch or in the queue, and should not be"
    return None


def work_is_done(moment: Moment) -> str | None:
    """A step that is scheduled while requests are unfinished computes a token, or finishes a request.

    Args:
        moment: an action of any kind; those that schedule a step are "schedule" and "retry".

    Returns:
        None if that holds, or no step was scheduled; else how many requests there are to compute.
    """
    output = moment.output
    if moment.action.kind not in ("schedule", "retry") or output is None or not moment.before:
        return None
    if sum(output.num_scheduled_tokens.values()) > 0 or output.finished:
        return None
    return f"{len(moment.before)} requests are unfinished, and the step computes nothing"


def victims_are_last(moment: Moment) -> str | None:
    """A step preempts from the end of the batch: no request that was preempted is ahead of one that was not.

    What is ahead is decided by the scheduler's `priority_key`, the lowest first. The requests that were preempted are
    named in `moment.output.preempted`; those that were not are in the scheduler's batch.

    Args:
        moment: an action of any kind; those that schedule a step are "schedule" and "retry".

    Returns:
        None if that holds, or no step was scheduled; else which request was preempted, and which was not.
    """
    if moment.action.kind not in ("schedule", "retry") or moment.output is None:
        return None
    scheduler = moment.scheduler
    for victim in moment.after:
        if victim.request_id in moment.output.preempted:
            for other in scheduler.running:
                if scheduler.priority_key(victim) < scheduler.priority_key(other):
                    return f"{victim!r} was preempted, and {other!r}, which is behind it, was not"
    return None
