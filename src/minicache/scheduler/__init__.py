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
| `speculative` | "chunked" | – | with `num_speculative_tokens`: how many draft tokens it computes too |

`queue` is the waiting queue of all of them, `base` what they have in common.

Pure standard library.
"""

from __future__ import annotations

from minicache.errors import require_count
from minicache.scheduler.base import Scheduler, SchedulerOptions
from minicache.scheduler.chunked import ChunkedOptions, ChunkedPrefillScheduler
from minicache.scheduler.continuous import ContinuousBatchScheduler
from minicache.scheduler.fair import FairScheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus, PagedOptions, PagedScheduler, Preemption, require_paged_options
from minicache.scheduler.prefix_caching import PrefixCachingScheduler
from minicache.scheduler.queue import RequestQueue
from minicache.scheduler.sharing import FairSharingScheduler, SharingScheduler
from minicache.scheduler.speculative import SpeculativeScheduler
from minicache.scheduler.static import StaticBatchScheduler

__all__ = [
    "SCHEDULERS",
    "AllocStatus",
    "ChunkedPrefillScheduler",
    "ContinuousBatchScheduler",
    "FairScheduler",
    "FairSharingScheduler",
    "PagedScheduler",
    "PrefixCachingScheduler",
    "RequestQueue",
    "Scheduler",
    "SchedulerOutput",
    "SharingScheduler",
    "SpeculativeScheduler",
    "StaticBatchScheduler",
    "create_scheduler",
]

SCHEDULERS = ("static", "continuous", "paged", "fair", "chunked")
"""The names of the stages, in the order in which the course builds them."""


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
) -> Scheduler:
    """A scheduler by the name of its stage.

    Args:
        name: "static", "continuous", "paged", "fair" or "chunked".
        num_blocks: blocks of the cache, ≥ 1.
        block_size: tokens of a block, ≥ 1.
        max_num_seqs: batch slots, ≥ 1: the most requests in the batch.
        max_num_batched_tokens: the most tokens of one step, ≥ 1.
        max_model_len: the most tokens of one request, ≥ 2. None: as many as fit.
        preemption: "recompute" or "swap". "static" and "continuous" never preempt: there these three are
            checked, and otherwise ignored.
        num_host_blocks: blocks of the CPU swap space, ≥ 0; ≥ 1 for "swap".
        watermark: the part of the pool that an admission must leave free, 0 ≤ watermark < 1.
        prefix_caching: find beginnings of prompts that are computed already. Not with "static" and "continuous", which
            reserve blocks for a whole answer.
        long_prefill_threshold: the most tokens of one request in one step; 0: no such limit. For "chunked" only.
        reserve_full_prompt: admit a request only if the blocks of its whole prompt are free; False: those of its first
            chunk are enough. False is for "chunked" only: the others compute a prompt in one step.
        num_speculative_tokens: the most draft tokens of a request in one step; 0: no speculation. For "chunked" only.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: there is no such stage or option yet, or a number is out of its bounds.
    """
    require_count("long_prefill_threshold", long_prefill_threshold, at_least=0)
    if long_prefill_threshold and name != "chunked":
        raise ValueError(f'long_prefill_threshold: "{name}" computes a prompt in one step; take "chunked"')
    if not isinstance(reserve_full_prompt, bool):
        raise TypeError(f"reserve_full_prompt must be True or False; got {reserve_full_prompt!r}")
    if not reserve_full_prompt and name != "chunked":
        raise ValueError(f'reserve_full_prompt=False: "{name}" computes a prompt in one step; take "chunked"')
    require_count("num_speculative_tokens", num_speculative_tokens, at_least=0)
    if num_speculative_tokens and name != "chunked":
        raise ValueError(f'num_speculative_tokens: "{name}" computes one token of a request in decode; take "chunked"')
    if not isinstance(prefix_caching, bool):
        raise TypeError(f"prefix_caching must be True or False; got {prefix_caching!r}")
    if prefix_caching and name in ("static", "continuous"):
        raise ValueError(f'prefix_caching: "{name}" reserves blocks for whole answers and shares none; take "fair"')
    require_paged_options(preemption, num_host_blocks, watermark)
    common: SchedulerOptions = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
    }
    paged: PagedOptions = {
        **common,
        "preemption": preemption,
        "num_host_blocks": num_host_blocks,
        "watermark": watermark,
    }
    match name:
        case "static":
            return StaticBatchScheduler(**common)
        case "continuous":
            return ContinuousBatchScheduler(**common)
        case "paged":
            return SharingScheduler(**paged, prefix_caching=True) if prefix_caching else PagedScheduler(**paged)
        case "fair":
            return FairSharingScheduler(**paged, prefix_caching=True) if prefix_caching else FairScheduler(**paged)
        case "chunked":
            chunked: ChunkedOptions = {
                **paged,
                "prefix_caching": prefix_caching,
                "long_prefill_threshold": long_prefill_threshold,
                "reserve_full_prompt": reserve_full_prompt,
            }
            if num_speculative_tokens:
                return SpeculativeScheduler(**chunked, num_speculative_tokens=num_speculative_tokens)
            return ChunkedPrefillScheduler(**chunked)
    raise ValueError(f"no scheduler {name!r}: there are {', '.join(SCHEDULERS)}")
