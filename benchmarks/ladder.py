"""The ladder: paged decode attention from the naive kernel to the one that ships, one lesson a rung.

Two kernels of this module are the first rungs, written to be read: plain bodies, contiguous tensors, powers of two.
From the third rung on it is `minicache.kernels.decode.decode_kernel`, with other constants. Every rung says how many
bytes its programs ask the memory for. That is the prediction: a rung that does nothing but move them takes bytes /
bandwidth. `benchmarks/kernels.py` measures how far each is from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicache.kernels import decode, split_kv


@dataclass(frozen=True, slots=True)
class Workload:
    """One decode step: a query token for each sequence, and the sequences' rows in blocks that lie in any order.

    Attributes:
        q: `[B, H, d]`.
        k_cache: `[num_blocks, block_size, H_kv, d]`.
        v_cache: the same shape.
        block_tables: `[B, max_blocks]` int32.
        context_lens: `[B]` int32.
        num_tokens: the sum of the lengths, known without asking the GPU.
        num_processors: the GPU's multiprocessors.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    num_tokens: int
    num_processors: int

    @property
    def paged(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the attention functions take."""
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.context_lens

    @property
    def scale(self) -> float:
        """What the scores are multiplied by, 1 / √d."""
        return float(self.q.shape[2] ** -0.5)

    @property
    def group(self) -> int:
        """Query heads to a key/value head."""
        return self.q.shape[1] // self.k_cache.shape[2]

    @property
    def num_splits(self) -> int:
        """What `minicache.kernels` would choose."""
        longest = self.block_tables.shape[1] * self.k_cache.shape[1]
        return split_kv.choose_num_splits(self.q.shape[0], self.k_cache.shape[2], longest, self.num_processors)

    def nbytes(self, times_read: int = 1) -> int:
        """Bytes that a kernel asks for: q and the output once, every row and its table entry `times_read` times."""
        num_kv_heads, head_dim = self.k_cache.shape[2:]
        per_row = 2 * head_dim * self.k_cache.element_size() + self.block_tables.element_size()
        return 2 * self.q.nbytes + times_read * self.num_tokens * num_kv_heads * per_row

    def nbytes_of_splits(self) -> int:
        """Bytes of split-KV's partial results, written once and read once."""
        batch_size, num_heads, head_dim = self.q.shape
        return 2 * batch_size * num_heads * self.num_splits * (head_dim + 2) * 4


def make_workload(
    lengths: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int = 128,
    block_size: int = 16,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    num_processors: int = 1,
    in_order: bool = False,
) -> Workload:
    """Random rows in blocks of a random order; with `in_order`, in blocks that follow each other in memory."""
    used = [-(-length // block_size) for length in lengths]
    num_blocks = sum(used)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    ids = torch.arange(num_blocks) if in_order else torch.randperm(num_blocks)
    tables = torch.zeros(len(lengths), max(used), dtype=torch.int32)
    for table, own in zip(tables, ids.to(torch.int32).split(used), strict=True):
        table[: len(own)] = own
    return Workload(
        torch.randn(len(lengths), num_heads, head_dim, dtype=dtype, device=device),
        torch.randn(shape, dtype=dtype, device=device),
        torch.randn(shape, dtype=dtype, device=device),
        tables.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        sum(lengths),
        num_processors,
    )


@triton.jit
def token_by_token_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
    scale,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Grid (H, B): one program a query head, and in it one token after the other."""
    head, seq = tl.program_id(0), tl.program_id(1)
    row = (seq * tl.num_programs(0) + head) * HEAD_DIM
    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + row + dims).to(tl.float32)
    largest, total = float("-inf"), 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for token in range(0, tl.load(context_lens_ptr + seq)):
        block = tl.load(block_tables_ptr + seq * stride_table + token // BLOCK_SIZE).to(tl.int64)
        key_row = block * stride_block + token % BLOCK_SIZE * stride_slot + head // GROUP * stride_head + dims
        score = tl.sum(q * tl.load(k_cache_ptr + key_row).to(tl.float32), 0) * scale
        new_largest = tl.maximum(largest, score)
        p, rescale = tl.exp(score - new_largest), tl.exp(largest - new_largest)
        acc = acc * rescale + p * tl.load(v_cache_ptr + key_row).to(tl.float32)
        total = total * rescale + p
        largest = new_largest
    tl.store(out_ptr + row + dims, acc / total)


@triton.jit
def block_by_block_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
    scale,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Grid (H, B): one program a query head, and in it one block after the other, a tile `[BLOCK_SIZE, HEAD_DIM]`."""
    head, seq = tl.program_id(0), tl.program_id(1)
    row = (seq * tl.num_programs(0) + head) * HEAD_DIM
    dims, slots = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE)
    q = tl.load(q_ptr + row + dims).to(tl.float32)
    largest, total = float("-inf"), 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    context_len = tl.load(context_lens_ptr + seq)
    for number in range(0, tl.cdiv(context_len, BLOCK_SIZE)):
        block = tl.load(block_tables_ptr + seq * stride_table + number).to(tl.int64)
        present = number * BLOCK_SIZE + slots < context_len
        rows = (block * stride_block + slots * stride_slot + head // GROUP * stride_head)[:, None] + dims[None, :]
        k = tl.load(k_cache_ptr + rows, mask=present[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_cache_ptr + rows, mask=present[:, None], other=0.0).to(tl.float32)
        scores = tl.where(present, tl.sum(q[None, :] * k, 1) * scale, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        p, rescale = tl.exp(scores - new_largest), tl.exp(largest - new_largest)
        acc = acc * rescale + tl.sum(p[:, None] * v, 0)
        total = total * rescale + tl.sum(p, 0)
        largest = new_largest
    tl.store(out_ptr + row + dims, acc / total)


def launch_naive(kernel: Any, work: Workload) -> Tensor:
    """One of the two kernels above: a program a query head of each sequence."""
    out = decode.new_output(work.q)
    kernel[(work.q.shape[1], work.q.shape[0])](
        *work.paged,
        out,
        work.scale,
        *work.k_cache.stride()[:3],
        work.block_tables.stride(0),
        GROUP=work.group,
        HEAD_DIM=work.q.shape[2],
        BLOCK_SIZE=work.k_cache.shape[1],
        num_warps=4 if kernel is block_by_block_kernel else 1,
    )
    return out.to(work.q.dtype)


def launch_packed(work: Workload, **constants: Any) -> Tensor:
    """`decode_kernel`, with `constants` in place of those that `launch_options` chooses."""
    out = decode.new_output(work.q)
    decode.decode_kernel[(work.k_cache.shape[2], work.q.shape[0])](
        *work.paged,
        out,
        None,
        None,
        None,
        None,
        None,
        work.scale,
        None,
        None,
        work.q.stride(),
        work.k_cache.stride(),
        work.v_cache.stride(),
        work.block_tables.stride(0),
        out.stride(),
        **(decode.launch_options(work.q, work.k_cache) | constants),
    )
    return out.to(work.q.dtype)


@dataclass(frozen=True, slots=True)
class Rung:
    """One kernel of the ladder.

    Attributes:
        name: what it is called in tables.
        lesson: what it adds to the rung before, and why that helps.
        nbytes: bytes that its programs ask for.
        run: attention over a workload, `[B, H, d]`.
    """

    name: str
    lesson: str
    nbytes: Callable[[Workload], int]
    run: Callable[[Workload], Tensor]


FP32_DOT = {"DOT_DTYPE": tl.float32, "num_stages": 1}
"""The first packed rungs: products in fp32, outside the matrix unit, and no tile loaded ahead."""

RUNGS = (
    Rung(
        "token by token",
        "One program per query head, one token at a time: each load has to arrive before the next is issued.",
        lambda work: work.nbytes(work.group),
        lambda work: launch_naive(token_by_token_kernel, work),
    ),
    Rung(
        "block by block",
        "A block's KV entries are one tile: as many bytes as before, but block_size entries of them in flight at once.",
        lambda work: work.nbytes(work.group),
        lambda work: launch_naive(block_by_block_kernel, work),
    ),
    Rung(
        "a group shares its rows",
        "One program per key/value head: its query heads are rows of one product, so each key and value is read once.",
        lambda work: work.nbytes(),
        lambda work: launch_packed(work, TILE=16, **FP32_DOT),
    ),
    Rung(
        "tiles of several blocks",
        "A tile larger than a block: fewer iterations of the loop, more entries in flight in each.",
        lambda work: work.nbytes(),
        lambda work: launch_packed(work, **FP32_DOT),
    ),
    Rung(
        "the matrix unit, tiles ahead",
        "Products in half precision on the tensor cores, and the next tile is loaded while this one is computed on.",
        lambda work: work.nbytes(),
        launch_packed,
    ),
    Rung(
        "split-KV",
        "Contexts cut into splits, to give every multiprocessor a program; partial results cost a few bytes.",
        lambda work: work.nbytes() + (work.nbytes_of_splits() if work.num_splits > 1 else 0),
        lambda work: split_kv.paged_decode_attention(*work.paged, scale=work.scale, num_splits=work.num_splits),
    ),
)
