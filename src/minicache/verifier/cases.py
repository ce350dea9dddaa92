"""What is explored of each stage: small servers on which much goes wrong early.

Requests together need more blocks than there are, so they are preempted; one begins as the other does, so blocks are
found; they differ in length and, where there are priorities, in these. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from minicache.errors import UnsupportedSchedulerError
from minicache.scheduler import SCHEDULERS, create_scheduler, require_scheduler
from minicache.scheduler.base import Scheduler
from minicache.scheduler.fair import FairScheduler
from minicache.verifier.explore import Case
from minicache.verifier.world import TOKEN, Shape

BLOCK_SIZE: Final = 2
RECOMPUTE: Final[dict[str, Any]] = {"preemption": "recompute"}
LIMITS: Final[dict[str, Any]] = {"max_num_seqs": 2, "max_model_len": 4, "watermark": 0.5}
SWAP: Final[dict[str, Any]] = {"preemption": "swap", "num_host_blocks": 3}


def cases(
    scheduler: str | type[Scheduler] | Callable[..., Scheduler], num_requests: int = 3, num_blocks: int = 4
) -> list[Case]:
    """The cases of a scheduler: of its options, those that change what may happen.

    Args:
        scheduler: a name in `SCHEDULERS`; or a class, or any other function that makes a scheduler from the keyword
            arguments in its `Options`. Options that such a function sets itself stay as it sets them.
        num_requests: requests that arrive at most.
        num_blocks: blocks of the pool, of two tokens each, ≥ 3.

    Raises:
        ValueError: there is no such stage.
        UnsupportedSchedulerError: its steps overlap.
    """
    usual: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": num_requests,
        "max_num_batched_tokens": num_blocks * BLOCK_SIZE,
    }
    if isinstance(scheduler, str):
        require_scheduler(scheduler)
        classes, name = SCHEDULERS[scheduler], scheduler
        make: Callable[..., Scheduler] = partial(create_scheduler, scheduler)
    else:
        made = scheduler(**usual)
        classes, name, make = (type(made),), type(made).__name__, scheduler
    if classes[0].overlaps:
        raise UnsupportedSchedulerError(
            f"{name}: here every step is committed before the next one is scheduled, and its steps overlap. Explore "
            "what it is then: --scheduler chunked, or a policy without overlap"
        )
    has = {option for each in classes for option in each.Options.__annotations__}
    if classes[0].chunks_prompts:
        usual["max_num_batched_tokens"] = 3
    shapes = _shapes(has_order=issubclass(classes[0], FairScheduler))
    variants: list[tuple[str, dict[str, Any], Sequence[Shape]]] = []
    for preemption in (RECOMPUTE, SWAP) if "preemption" in has else ({},):
        for caching in ({}, {"prefix_caching": True}) if "prefix_caching" in has else ({},):
            words = f"{preemption.get('preemption', '')} {'prefix cache' if caching else ''}"
            variants.append((words, preemption | caching, shapes))
        if preemption:
            tight = {"num_host_blocks": 2} if preemption is SWAP else {}  # as much as one victim needs
            variants.append((f"{preemption['preemption']} long", preemption | tight, _longer(shapes)))
    if "preemption" in has and not classes[0].chunks_prompts:
        variants.append(("small step", {"max_num_batched_tokens": 4}, _longer(shapes)))
    if "preemption" in has:
        variants.append(("small pool", {"num_blocks": 2, "max_num_batched_tokens": 4}, _outgrowing(shapes)))
    if "watermark" in has:
        variants.append(
            ("limits", LIMITS | ({} if classes[0].chunks_prompts else {"max_num_batched_tokens": 4}), shapes)
        )
    if issubclass(classes[0], FairScheduler):
        variants.append(("classes", {"max_num_seqs": 2}, _of_two_classes(shapes)))
        variants.append(("two keys", {}, _of_two_keys(shapes)))
        variants.append(("equal classes", {"max_num_seqs": 2}, _of_equal_classes(shapes)))
    if "prefix_caching" in has:
        variants.append(("two prefixes", {"prefix_caching": True, "num_blocks": 2}, _of_two_prefixes(shapes)))
        variants.append(("two salts", {"prefix_caching": True}, _of_two_salts(shapes)))
        variants.append(("chat", {"prefix_caching": True}, _of_a_chat(shapes)))
    if "reserve_full_prompt" in has:
        variants.append(("first chunks", {"reserve_full_prompt": False}, shapes))
    one_more = ("two keys", "equal classes")  # for two to pass while one runs and one waits
    return [
        Case(
            " ".join(f"{name} {words}".split()),
            partial(make, **usual | options),
            its_shapes,
            num_requests + (words in one_more),
        )
        for words, options, its_shapes in variants
        if isinstance(scheduler, str) or _takes(make, usual | options)
    ]


def _takes(make: Callable[..., Scheduler], options: dict[str, Any]) -> bool:
    """Whether a scheduler can be made with these options: it may set one of them itself."""
    try:
        make(**options)
    except TypeError:
        return False
    return True


def _shapes(*, has_order: bool) -> Sequence[Shape]:
    """Two requests that need two blocks each in the end; the second begins as the first, and is more urgent."""
    return Shape([0, 0], 3, priority=int(has_order)), Shape([0, 0, 3], 2)


def _longer(shapes: Sequence[Shape]) -> Sequence[Shape]:
    """The same, but each needs a block more."""
    one, other = shapes
    return one._replace(prompt_token_ids=[0] * 3), other._replace(prompt_token_ids=[0, 0, 3, 3])


def _outgrowing(shapes: Sequence[Shape]) -> Sequence[Shape]:
    """Two requests of which the first needs more than two blocks in the end."""
    one, _ = shapes
    return one._replace(prompt_token_ids=[0] * 3, max_tokens=4), one._replace(prompt_token_ids=[0, 3], max_tokens=1)


def _of_two_classes(shapes: Sequence[Shape]) -> Sequence[Shape]:
    """The same, but the second is of another class, less urgent, and says that it arrived long ago."""
    one, other = shapes
    return one, other._replace(group="image", priority=2, arrival_time=-1.0)


def _of_two_prefixes(shapes: Sequence[Shape]) -> Sequence[Shape]:
    """The same, but the second begins otherwise than the first: only requests of one shape share blocks."""
    one, other = shapes
    return one, other._replace(prompt_token_ids=[3, 3, 3])


def _of_two_keys(shapes: Sequence[Shape]) -> Sequence[Shape]:
    """A long answer, and short ones of another client: several of these may pass while the long one runs."""
    one, _ = shapes
    return one._replace(prompt_token_ids=[0], max_tokens=3), one._replace(
        prompt_token_ids=[3], max_tokens=1, cache_salt="b"
    )


def _of_equal_classes(shapes: Sequence[Shape]) -> Sequence[Shape]:
    """A long answer, and a short one of another class and the same priority: only their class lets requests pass."""
    one, _ = shapes
    return one._replace(prompt_token_ids=[0], priority=0), Shape([3], 1, group="image")


def _of_two_salts(shapes: Sequence[Shape]) -> Sequence[Shape]:
    """The same, but the second has a salt: it begins as the first, and must not find its blocks."""
    one, other = shapes
    return one, other._replace(cache_salt="b")


def _of_a_chat(shapes: Sequence[Shape]) -> Sequence[Shape]:
    """The same, but the second is the next turn of a chat: its prompt begins with the first's, and its answer."""
    one, other = shapes
    return one, other._replace(prompt_token_ids=[*one.prompt_token_ids, TOKEN, TOKEN, 3])
