"""What one call of `schedule()` decided: the work of one step, for whatever runs the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minicache.request import Request, RequestId


@dataclass(slots=True)
class SchedulerOutput:
    """The work of one step. Carry it out in this order: store, swap out, swap in, copy, load, run the model.

    Attributes:
        num_scheduled_tokens: id → how many of its next tokens are computed, ≥ 1, in batch order. For a request in
            decode that is 1; for one that has just been admitted, its whole prompt (and, after a preemption by
            recompute, what it had generated). Draft tokens count: once they are accepted or rejected, only those that
            stay do (`minicache.scheduler.speculative`).
        scheduled: the same requests, in the same order.
        preempted: ids of requests that lost their batch slot, in the order in which they lost it.
        swapped_out: of those, the ones whose blocks move to CPU swap space: id → pairs (block, CPU block) to copy.
        swapped_in: id → pairs (CPU block, block) to copy back.
        blocks_to_copy: pairs (source block, target block) to copy on the device (phase 8).
        finished: ids of requests that this call finished without a token: FINISHED_CAPACITY.
        draft_token_ids: id → the draft tokens that the step computes behind the request's newest token, ≥ 1 of them, in
            batch order; requests without any are not in it.
        blocks_to_store: pairs (block, hash) to store in the tiers (`minicache.scheduler.tiered`).
        blocks_to_load: (block, hash, contents) of blocks that have come from there.
    """

    num_scheduled_tokens: dict[RequestId, int] = field(default_factory=dict)
    scheduled: list[Request] = field(default_factory=list, repr=False)
    preempted: list[RequestId] = field(default_factory=list)
    swapped_out: dict[RequestId, list[tuple[int, int]]] = field(default_factory=dict)
    swapped_in: dict[RequestId, list[tuple[int, int]]] = field(default_factory=dict)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    finished: list[RequestId] = field(default_factory=list)
    draft_token_ids: dict[RequestId, list[int]] = field(default_factory=dict)
    blocks_to_store: Sequence[tuple[int, bytes]] = ()
    blocks_to_load: Sequence[tuple[int, bytes, bytes]] = ()

    @property
    def has_work(self) -> bool:
        """Whether there is anything to carry out: tokens to compute, or blocks to copy."""
        return bool(self.scheduled or self.swapped_out)  # the other copies are made for requests that compute

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens that the model computes in this step."""
        return sum(self.num_scheduled_tokens.values())
