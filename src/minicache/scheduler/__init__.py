"""Which requests compute in the next step, and in which blocks: one module a stage.

| stage | name | built in | decides anew |
|---|---|---|---|
| `static` | "static" | phase 5 | nothing until the batch has drained |
| `continuous` | "continuous" | phase 5 | at every step, which requests join the batch |
| `paged` | "paged" | phase 6 | memory by the block; which request is preempted when it runs out |
| `fair` | "fair" | phase 7 | the order: priority, arrival, compatibility; no request waits forever |
| `prefix_caching` | "paged", "fair" | phase 8 | with `prefix_caching`: which requests share the blocks of a prefix |
| `sharing` | – | phase 8 | forks, and copy-on-write |
| `chunked` | "chunked" | phase 9 | how many of its tokens a request computes in a step |
| `async_chunked` | "async" | phase 12 | when: a step is scheduled while the one before runs |
| `speculative` | "chunked" | – | with `num_speculative_tokens`: how many draft tokens it computes too |
| `vllm_options` | "chunked" | – | with `long_prefill_threshold` or `watermark`: these two, as vLLM has them |
| `vllm_priority` | "chunked" | – | with `policy="priority"`: the order and the victims, as vLLM has them |
| `grouped` | "chunked" | phase 12 | with `windows`: blocks for several groups of layers |
| `tiered` | any with `prefix_caching` | phase 12 | with `tiers`: which blocks come from there, and go there |

`queue` is the waiting queue of all of them, `base` what they have in common.

Pure standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from minicache.scheduler.async_chunked import AsyncChunkedScheduler
from minicache.scheduler.base import Scheduler
from minicache.scheduler.chunked import ChunkedPrefillScheduler
from minicache.scheduler.continuous import ContinuousBatchScheduler
from minicache.scheduler.fair import FairScheduler
from minicache.scheduler.grouped import GroupedScheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus, PagedScheduler, Preemption, require_paged_options
from minicache.scheduler.prefix_caching import PrefixCachingScheduler
from minicache.scheduler.queue import RequestQueue
from minicache.scheduler.sharing import SharingScheduler
from minicache.scheduler.speculative import SpeculativeScheduler
from minicache.scheduler.static import StaticBatchScheduler
from minicache.scheduler.tiered import TierPolicy, Tiers, with_tiers
from minicache.scheduler.vllm_options import VllmOptionsScheduler
from minicache.scheduler.vllm_priority import Policy, VllmPriorityScheduler

__all__ = [
    "SCHEDULERS",
    "AllocStatus",
    "AsyncChunkedScheduler",
    "ChunkedPrefillScheduler",
    "ContinuousBatchScheduler",
    "FairScheduler",
    "GroupedScheduler",
    "PagedScheduler",
    "PrefixCachingScheduler",
    "RequestQueue",
    "Scheduler",
    "SchedulerOutput",
    "SharingScheduler",
    "SpeculativeScheduler",
    "StaticBatchScheduler",
    "VllmOptionsScheduler",
    "VllmPriorityScheduler",
    "create_scheduler",
    "has_option",
    "require_scheduler",
]

SCHEDULERS: Final[dict[str, tuple[type[Scheduler], ...]]] = {
    "static": (StaticBatchScheduler,),
    "continuous": (ContinuousBatchScheduler,),
    "paged": (PagedScheduler, SharingScheduler),
    "fair": (FairScheduler, SharingScheduler),
    "chunked": (ChunkedPrefillScheduler, SpeculativeScheduler, VllmPriorityScheduler, GroupedScheduler),
    "async": (AsyncChunkedScheduler,),
}
"""Stages by name, in the order in which the course builds them: of a name's classes, `create_scheduler` makes the first
whose `Options` have all that it is given."""

_UNUSED: Final = {  # options that not every stage has: what they are if unused, and what a stage without them does
    "prefix_caching": (False, 'shares no blocks between requests; take "fair"'),
    "long_prefill_threshold": (0, 'computes a prompt in one step; take "chunked"'),
    "reserve_full_prompt": (True, 'computes a prompt in one step; take "chunked"'),
    "num_speculative_tokens": (0, 'computes one token of a request in decode; take "chunked"'),
    "policy": ("fair", 'has an order of its own; take "chunked"'),
    "windows": (None, 'has one kind of cache; take "chunked"'),
}


def require_scheduler(name: str) -> None:
    """Raise ValueError unless there is a stage of this name."""
    if name not in SCHEDULERS:
        raise ValueError(f"no scheduler {name!r}: there are {', '.join(SCHEDULERS)}")


def has_option(name: str, option: str) -> bool:
    """Whether the stage of this name, if there is one, has this option of `create_scheduler`."""
    return any(option in cls.Options.__annotations__ for cls in SCHEDULERS.get(name, ()))


def create_scheduler(
    name: str,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    max_model_len: int | None = None,
    preemption: Preemption = "recompute",
    num_host_blocks: int = 0,
    watermark: float = 0.0,
    prefix_caching: bool = False,
    long_prefill_threshold: int = 0,
    reserve_full_prompt: bool = True,
    num_speculative_tokens: int = 0,
    policy: Policy = "fair",
    windows: Sequence[int | None] | None = None,
    prefix_cache_retention: int | None = 0,
    tiers: Tiers | None = None,
    tier_policy: TierPolicy = "write_through",
) -> Scheduler:
    """A scheduler by the name of its stage.

    Args:
        name: one of `SCHEDULERS`. "async" is as "chunked" if each step is committed before the next is scheduled.
        num_blocks: blocks of the cache, ≥ 1.
        block_size: tokens of a block, ≥ 1.
        max_num_seqs: batch slots, ≥ 1: the most requests in the batch.
        max_num_batched_tokens: the most tokens of one step, ≥ 1.
        max_model_len: the most tokens of one request, ≥ 2. None: as many as fit.
        preemption: "recompute" or "swap". "static" and "continuous" never preempt: there these three are
            checked, and otherwise ignored.
        num_host_blocks: blocks of the CPU swap space, ≥ 0; ≥ 1 for "swap".
        watermark: the part of the pool that an admission must leave free, 0 ≤ watermark < 1. Of "chunked" and "async",
            the part of num_blocks + 1 blocks, as in vLLM.
        prefix_caching: find beginnings of prompts that are computed already. Not with "static" and "continuous", which
            reserve blocks for a whole answer. "paged" is then as "fair": first come, first served, as long as all
            requests have one priority and one group.
        long_prefill_threshold: the most tokens of one request in one step, while there is another one; 0: no such
            limit. For "chunked" and "async".
        reserve_full_prompt: admit a request only if the blocks of its whole prompt are free; False: those of its first
            chunk are enough. False is for "chunked" only: the others compute a prompt in one step.
        num_speculative_tokens: the most draft tokens of a request in one step; 0: no speculation. For "chunked" only.
        policy: "fair": phase 7's, with its bound on how long a request waits; or "priority": vLLM's, which has none.
            "priority" is for "chunked" only, without speculation and windows.
        windows: of a model with several groups of layers, one entry a group: the tokens that its layers see, the newest
            included, or None for all. None: one kind of cache, which sees all. For "chunked" only, with recompute and
            without speculation.
        prefix_cache_retention: with windows, how much of the groups that have one the prefix cache keeps, as
            `GroupedScheduler` says: a multiple of block_size, or None for all of it.
        tiers: what is below the prefix cache, which there is then; None: nothing. Not with "static", "continuous" or
            windows.
        tier_policy: when a block goes down: "write_through", once it is full, or "write_back", once it is evicted.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: there is no such stage or option yet, two options exclude each other, or a number is out of its
            bounds.
    """
    options: dict[str, Any] = locals()
    require_scheduler(name)
    require_paged_options(preemption, num_host_blocks, watermark)
    if tiers is not None:
        options["prefix_caching"] = True
        if windows is not None:
            raise ValueError("tiers: they have blocks of one group of layers; leave out windows, or the tiers")
    used = set()
    for option, (unused, otherwise) in _UNUSED.items():
        if unused is not None and type(options[option]) is not type(unused):
            raise TypeError(f"{option} must be of type {type(unused).__name__}; got {options[option]!r}")
        if options[option] != unused:
            used.add(option)
            if not has_option(name, option):
                raise ValueError(f'{option}: "{name}" {otherwise}')
    if windows is None and prefix_cache_retention != 0:
        raise ValueError("prefix_cache_retention: it is of groups with a window; give windows too")
    cls = next((cls for cls in SCHEDULERS[name] if cls.Options.__annotations__.keys() >= used), None)
    if cls is None:
        raise ValueError(f'no stage of "{name}" has {" and ".join(sorted(used))} together: leave one of them out')
    if cls is ChunkedPrefillScheduler and (long_prefill_threshold or watermark):
        cls = VllmOptionsScheduler
    given = {option: options[option] for option in cls.Options.__annotations__}
    if tiers is None:
        return cls(**given)
    return with_tiers(cast("type[PrefixCachingScheduler]", cls))(tiers=tiers, tier_policy=tier_policy, **given)  # type: ignore[call-arg]
