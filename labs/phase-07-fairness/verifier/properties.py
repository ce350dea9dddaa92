# Phase 7, fairness: your file. It stands in for minicache.verifier.properties.
# Write what raises NotImplementedError. `minicache grade 7` grades it, `minicache hint 7.K` helps with task K.
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
    raise NotImplementedError(
        "phase 7, task 12: Three properties; read docs/en/phase-07-fairness/lab/02-three-properties.md"
    )


def work_is_done(moment: Moment) -> str | None:
    """A step that is scheduled while requests are unfinished computes a token, or finishes a request.

    Args:
        moment: an action of any kind; those that schedule a step are "schedule" and "retry".

    Returns:
        None if that holds, or no step was scheduled; else how many requests there are to compute.
    """
    raise NotImplementedError(
        "phase 7, task 12: Three properties; read docs/en/phase-07-fairness/lab/02-three-properties.md"
    )


def victims_are_last(moment: Moment) -> str | None:
    """A step preempts from the end of the batch: no request that was preempted is ahead of one that was not.

    What is ahead is decided by the scheduler's `priority_key`, the lowest first. The requests that were preempted are
    named in `moment.output.preempted`; those that were not are in the scheduler's batch.

    Args:
        moment: an action of any kind; those that schedule a step are "schedule" and "retry".

    Returns:
        None if that holds, or no step was scheduled; else which request was preempted, and which was not.
    """
    raise NotImplementedError(
        "phase 7, task 12: Three properties; read docs/en/phase-07-fairness/lab/02-three-properties.md"
    )
