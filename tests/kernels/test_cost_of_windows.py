"""What attention through a sliding window costs: memory and work follow the window, not the square of the context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minicache import kernels
from minicache.cache.attention import causal_attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 8, 16


class Made(TorchDispatchMode):
    """Notes the sizes of all tensors that operations make, in numbers: the largest, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, Tensor)}
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:  # no view
                self.largest, self.total = max(self.largest, each.numel()), self.total + each.numel()
        return out


def made_by(attend: Callable[[], Tensor]) -> Made:
    with torch.inference_mode(), Made() as made:
        attend()
    return made


def a_prompt(num_tokens: int, num_new: int) -> dict[str, Tensor]:
    num_blocks = num_tokens // BLOCK
    k_cache, v_cache = (torch.randn(num_blocks, BLOCK, KV_HEADS, HEAD_DIM) for _ in range(2))
    return {
        "q": torch.randn(num_new, HEADS, HEAD_DIM),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": torch.randperm(num_blocks)[None],
        "context_lens": torch.tensor([num_tokens]),
        "query_start_loc": torch.tensor([0, num_new]),
    }


@pytest.mark.parametrize("window", [64, 1500, None], ids="window {}".format)
@pytest.mark.parametrize(("num_tokens", "num_new"), [(2048, 2048), (2048, 1800)], ids="{}".format)
def test_no_square_of_scores_or_masks(num_tokens: int, num_new: int, window: int | None) -> None:
    """The largest tensor of a prompt is a tile's: its queries, in all heads of a group, times what they see."""
    tile, reach = 256, num_tokens if window is None else min(num_tokens, window + 256)
    most = max(num_tokens * HEADS * HEAD_DIM, tile * reach * HEADS // KV_HEADS)
    prompt = a_prompt(num_tokens, num_new)
    assert (
        made_by(lambda: kernels.paged_prefill_attention(**prompt, sliding_window=window, backend="torch")).largest
        <= most
    )
    q = torch.randn(1, HEADS, num_new, HEAD_DIM)
    k, v = torch.randn(2, 1, KV_HEADS, num_tokens, HEAD_DIM)
    assert made_by(lambda: causal_attention(q, k, v, window=window)).largest <= most


@pytest.mark.parametrize("num_tokens", [2048, 8192])
def test_a_windows_work_does_not_grow_with_the_square(num_tokens: int) -> None:
    """Twice the prompt is at most about twice the numbers."""
    once, twice = (
        made_by(
            lambda n=n: kernels.paged_prefill_attention(**a_prompt(n, n), sliding_window=128, backend="torch")
        ).total  # type: ignore[misc]
        for n in (num_tokens, 2 * num_tokens)
    )
    assert twice <= 2.2 * once


@pytest.mark.parametrize("longest", [512, 513, 600, 4000])
def test_decode_has_no_cliff_where_a_context_passes_the_window(longest: int) -> None:
    """A step with a window makes no more tensors than one without, plan included; past it, fewer."""
    lengths = torch.tensor([*torch.randint(64, 512, (31,)).tolist(), longest])
    counts = [-(-length // BLOCK) for length in lengths.tolist()]
    free, tables = torch.randperm(sum(counts)).tolist(), torch.zeros(32, max(counts), dtype=torch.int64)
    for i, count in enumerate(counts):
        tables[i, :count] = torch.tensor([free.pop() for _ in range(count)])
    k_cache, v_cache = (torch.randn(sum(counts), BLOCK, KV_HEADS, HEAD_DIM) for _ in range(2))
    paged = (torch.randn(32, HEADS, HEAD_DIM), k_cache, v_cache, tables, lengths)
    without, through = (
        made_by(lambda window=window: kernels.paged_decode_attention(*paged, sliding_window=window, backend="torch"))  # type: ignore[misc]
        for window in (None, 512)
    )
    assert through.total <= 1.05 * without.total
    assert through.largest <= without.largest
