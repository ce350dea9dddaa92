"""What the kernels must know of one step: which tokens attend to which. No phase builds this module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from torch import Tensor


class AttentionMetadata:
    """Which tokens attend to which in one step of a model, shared by all its layers.

    A backend caches in it what it derives from it (which sequences attend together, how a prompt is cut into tiles),
    once per step instead of once per layer. The tensors must not change afterwards.

    On a GPU pass `lengths` and `num_new_tokens` too. The host knows them when it builds a step; without them the first
    layer of any step but a decode step waits for the device to read them.

    Args:
        block_tables: `[B, max_blocks]` int32 or int64, as in `paged_decode_attention`.
        context_lens: `[B]` int32 or int64, likewise.
        query_start_loc: `[B + 1]` int32 or int64, as in `paged_prefill_attention`. None: a decode step, in which each
            sequence has one query.
        lengths: the values of `context_lens`. None: read them from it when needed.
        num_new_tokens: the number of queries of each sequence. None: read it from `query_start_loc`.

    Attributes:
        block_tables: as given.
        context_lens: as given.
        query_start_loc: as given.
        known_lengths: `lengths` as given.
        plans: what backends have derived, keyed by what else it depends on.
    """

    def __init__(
        self,
        block_tables: Tensor,
        context_lens: Tensor,
        query_start_loc: Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
        num_new_tokens: Sequence[int] | None = None,
    ) -> None:
        self.block_tables = block_tables
        self.context_lens = context_lens
        self.query_start_loc = query_start_loc
        self.known_lengths = lengths
        self.plans: dict[object, Any] = {}
        self._num_new_tokens = num_new_tokens

    @cached_property
    def lengths(self) -> list[int]:
        """`context_lens` as a list. On a GPU this waits for the device, unless the lengths were given."""
        return self.context_lens.tolist() if self.known_lengths is None else list(self.known_lengths)

    @cached_property
    def starts(self) -> list[int]:
        """`query_start_loc` as a list. On a GPU this waits for the device, unless `num_new_tokens` was given."""
        if self.query_start_loc is None:
            return list(range(self.context_lens.shape[0] + 1))
        if self._num_new_tokens is None:
            return self.query_start_loc.tolist()
        return [0, *accumulate(self._num_new_tokens)]

    @cached_property
    def max_context_len(self) -> int | None:
        """The longest of the lengths if they were given, else None: never waits for the device."""
        return None if self.known_lengths is None else max(self.known_lengths)
