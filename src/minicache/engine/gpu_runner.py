"""A model's steps on a GPU: one copy of integers a step, decode as CUDA graphs, and nothing that waits for the device.

A GPU computes what it was asked for some time ago, and the host asks for more meanwhile. So a step must read nothing
back until its tokens are picked, and should ask with few calls. `pack` puts all integers of a step into one buffer,
which is copied at once; `PackedStep` is the step's cache over views of it. A decode step makes the same calls every
time, hundreds of them: they are captured once for each size as a CUDA graph, and replayed by one call, over the same
buffer with new numbers. No phase builds this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minicache import kernels
from minicache.cache.paged import PagedStorage
from minicache.engine.gpu_sampling import GPUSampler
from minicache.engine.runner import Model, PagedMemory, logits_at, require_blocks
from minicache.engine.sampling import TokenSampler
from minicache.model.minigpt import Transformer
from minicache.request import Request
from minicache.scheduler import SchedulerOutput

logger = logging.getLogger("minicache")

ALIGNED: Final = 16
"""Every view of a buffer begins at a multiple of so many numbers, and block tables are a multiple of it wide: Triton
compiles a kernel again where a pointer or a number stops being divisible by 16."""

LEAST_WIDTH: Final = 64
"""Columns of the block tables of a graph: so many, or 4 times that, or 16 times … Few graphs, and short copies."""

Run = Callable[[], Tensor]
"""A function that reads the same memory whenever it is called, and returns what it has computed."""

Capture = Callable[[Run], Run]
"""Makes of a `Run` one that is cheaper to call, and returns the same tensor every time, with new values."""


# The integers of a step


class StepTensors(NamedTuple):
    """All integers of a step, int64: views of one buffer.

    Attributes:
        token_ids: `[N]`, of all sequences, one after the other.
        positions: `[N]`, where each token stands in its sequence.
        slot_mapping: `[N]`, the slot of each token; −1: padding.
        last: `[B]`, the last token of each sequence among the N.
        context_lens: `[B]`, tokens of each sequence, the new ones too; 0: padding.
        query_start_loc: `[B + 1]`, where each sequence's tokens begin among the N.
        block_tables: `[B, width]`, −1 after each sequence's last block.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    last: Tensor
    context_lens: Tensor
    query_start_loc: Tensor
    block_tables: Tensor


PADDING: Final = (0, 0, -1, 0, 0, 0, -1)
"""What each of `StepTensors` has where there is no request."""


class StepSize(NamedTuple):
    """How large the tensors of a step are.

    Attributes:
        num_tokens: N.
        num_seqs: B.
        width: columns of the block tables.
    """

    num_tokens: int
    num_seqs: int
    width: int

    @property
    def counts(self) -> tuple[int, ...]:
        """How many numbers each of `StepTensors` has."""
        num_tokens, num_seqs, width = self
        return num_tokens, num_tokens, num_tokens, num_seqs, num_seqs, num_seqs + 1, num_seqs * width

    @property
    def buffer_size(self) -> int:
        """How many numbers the buffer has."""
        return sum(map(_aligned, self.counts))

    def views(self, buffer: Tensor) -> StepTensors:
        """The tensors of a step in its buffer `[buffer_size]`."""
        parts = torch.split(buffer, [_aligned(count) for count in self.counts])
        *vectors, tables = (part[:count] for part, count in zip(parts, self.counts, strict=True))
        return StepTensors._make([*vectors, tables.view(self.num_seqs, self.width)])


def pack(requests: Sequence[Request], counts: Sequence[int], block_size: int, size: StepSize) -> Tensor:
    """The integers of a step, in a buffer on the host.

    Args:
        requests: in batch order; their blocks have room for the new tokens.
        counts: how many tokens each computes, ≥ 1.
        block_size: tokens of a block.
        size: of the step, at least that of the requests. What is left is padding.

    Returns:
        `[size.buffer_size]` int64; in pinned memory where there is a GPU, so that copying it need not wait.
    """
    tables = np.full((len(requests), size.width), -1)
    token_ids: list[int] = []
    for table, request, count in zip(tables, requests, counts, strict=True):
        table[: len(request.block_ids)] = request.block_ids
        token_ids += request.token_ids(request.num_computed_tokens, request.num_computed_tokens + count)
    ends = np.array([*accumulate(counts)])
    owner = np.repeat(np.arange(len(requests)), counts)
    context_lens = np.array([request.num_computed_tokens for request in requests]) + counts
    positions = np.arange(len(token_ids)) + (context_lens - ends)[owner]
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    parts = (token_ids, positions, slots, ends - 1, context_lens, [0, *ends], tables)

    buffer = torch.empty(size.buffer_size, dtype=torch.int64, pin_memory=torch.cuda.is_available())
    for view, values, padding in zip(size.views(buffer), parts, PADDING, strict=True):
        array = view.numpy()
        array[: len(values)] = values
        array[len(values) :] = padding
    return buffer


def _aligned(count: int) -> int:
    """The next multiple of ALIGNED."""
    return -(-count // ALIGNED) * ALIGNED


# The cache of a step


class PackedStep:
    """The cache of one step, over tensors that are on the device already; otherwise as `minicache.cache.RaggedStep`.

    It checks nothing but what the kernels check: the tensors come from `pack`.

    Args:
        storage: where keys and values are.
        tensors: of the step.
        is_decode: each sequence brings one token.
    """

    def __init__(self, storage: PagedStorage, tensors: StepTensors, *, is_decode: bool) -> None:
        self.storage = storage
        self.tensors = tensors
        starts = None if is_decode else tensors.query_start_loc
        self._metadata = kernels.AttentionMetadata(tensors.block_tables, tensors.context_lens, starts)

    def positions(self, num_new_tokens: int) -> Tensor:
        """The positions of the step's N tokens: `[N]` int64."""
        return self.tensors.positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values `[1, H_kv, N, d]` of the step's tokens in `layer`."""
        k, v = (rows[0].transpose(0, 1) for rows in (k, v))
        kernels.store_kv(k, v, self.storage.k(layer), self.storage.v(layer), self.tensors.slot_mapping)

    def attend(self, layer: int, q: Tensor, *, window: int | None = None) -> Tensor:
        """Causal attention of the step's tokens, `[1, H, N, d]`, each over its own sequence."""
        rows, k_cache, v_cache = q[0].transpose(0, 1), self.storage.k(layer), self.storage.v(layer)
        out = kernels.paged_attention(rows, k_cache, v_cache, self._metadata, sliding_window=window)
        return out.transpose(0, 1)[None]


# Graphs


class CUDACapture:
    """Captures functions as CUDA graphs, whose memory is one pool: a replay may overwrite what another has returned.

    Capturing records kernels without running them. They must be compiled by then, and nothing may wait for the device;
    so the function is run twice before, on the stream that is captured.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """As `Capture`.

        Raises:
            RuntimeError: the function does what cannot be captured.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        # Around both, because torch.cuda.graph does not restore the stream if capturing fails.
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
            # "thread_local": threads that are not capturing, a server's for instance, may do what they like.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                out = run()
        current.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class DecodeGraph:
    """The decode step of one size: a buffer on the device that stays where it is, and what is computed from it.

    Args:
        model: gives hidden states.
        storage: where keys and values are.
        size: of the step.
        capture: as `Capture`.
    """

    def __init__(self, model: Transformer, storage: PagedStorage, size: StepSize, capture: Capture) -> None:
        self._buffer = torch.zeros(size.buffer_size, dtype=torch.int64, device=storage.device)
        tensors = size.views(self._buffer)
        for view, padding in zip(tensors, PADDING, strict=True):
            view.fill_(padding)  # so that what runs before the first step writes to no slot

        def run() -> Tensor:
            return model.hidden_states(tensors.token_ids[None], PackedStep(storage, tensors, is_decode=True))[0]

        self._run = capture(run)

    def __call__(self, packed: Tensor) -> Tensor:
        """The hidden states `[B, hidden_size]` of a step that `pack` has packed for this size."""
        self._buffer.copy_(packed, non_blocking=True)
        return self._run()


# The runner


class GPUModelRunner:
    """Runs an engine's steps on a GPU: `LLM.run_model` and `LLM.pick` in a form that waits for the device once a step.

    A decode step runs as a CUDA graph, padded to the next size: 1, 2, 4, 8, then every multiple of 8, then
    max_num_seqs. Padding computes and is thrown away; it writes to no slot and attends to nothing. A graph is captured
    when its size comes first, which takes as long as some steps. If capturing fails, that is logged, and from then on
    all steps run without graphs.

    Args:
        model: what is run.
        memory: where the requests' keys and values are.
        max_num_seqs: the most requests of a batch.
        capture: makes graphs, `CUDACapture` for instance; None: no graphs. A model that is no
            `minicache.model.minigpt.Transformer` gets none, as nobody knows what it does.
    """

    def __init__(self, model: Model, memory: PagedMemory, max_num_seqs: int, capture: Capture | None) -> None:
        self._model = model
        self._memory = memory
        self._max_num_seqs = max_num_seqs
        self._capture = capture
        self._graphs: dict[StepSize, DecodeGraph] = {}
        self._sampler = GPUSampler()

    def run_model(self, output: SchedulerOutput) -> Tensor:
        """As `LLM.run_model`: `[B, vocab]`.

        Raises:
            InvariantError: the scheduler has given a request fewer blocks than its tokens need.
        """
        require_blocks(output, self._memory.storage.pool.block_size)
        self._memory.num_steps += 1
        counts = list(output.num_scheduled_tokens.values())
        with torch.inference_mode():
            if max(counts) == 1 and self._capture is not None and isinstance(self._model, Transformer):
                return self._model.logits(self._decode(self._model, self._capture, output.scheduled))
            return self._run(output.scheduled, counts)

    def pick_tokens(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[TokenSampler]) -> list[int | None]:
        """Pick tokens as `GPUSampler.pick_tokens`."""
        return self._sampler.pick_tokens(logits, rows, samplers)

    def _decode(self, model: Transformer, capture: Capture, requests: list[Request]) -> Tensor:
        """The hidden states of a step of one token each, `[B, hidden_size]`, by the graph of the next size."""
        num_seqs = min(padded_batch(len(requests)), self._max_num_seqs)
        size = StepSize(num_seqs, num_seqs, padded_width(_longest(requests)))
        if size not in self._graphs:
            try:
                self._graphs[size] = DecodeGraph(model, self._memory.storage, size, capture)
            except RuntimeError as error:
                logger.warning("a decode step cannot be captured as a CUDA graph, so none will be: %s", error)
                self._graphs.clear()
                self._capture = capture = eagerly
                self._graphs[size] = DecodeGraph(model, self._memory.storage, size, capture)
        packed = pack(requests, [1] * len(requests), self._memory.storage.pool.block_size, size)
        return self._graphs[size](packed)[: len(requests)]

    def _run(self, requests: list[Request], counts: list[int]) -> Tensor:
        """The logits after the last token of each request, by as many calls as it takes."""
        storage = self._memory.storage
        size = StepSize(sum(counts), len(requests), _aligned(_longest(requests)))
        packed = pack(requests, counts, storage.pool.block_size, size)
        tensors = size.views(packed.to(storage.device, non_blocking=True))
        step = PackedStep(storage, tensors, is_decode=max(counts) == 1)
        return logits_at(self._model, tensors.token_ids[None], step, tensors.last)


def eagerly(run: Run) -> Run:
    """A `Capture` that captures nothing: the padded steps of a runner without CUDA graphs, on any device."""
    return run


def padded_batch(num_seqs: int) -> int:
    """The sequences of the graph that decodes a batch: 1, 2, 4, or a multiple of 8."""
    return 1 << (num_seqs - 1).bit_length() if num_seqs <= 8 else -(-num_seqs // 8) * 8


def padded_width(num_blocks: int) -> int:
    """The columns of its block tables."""
    width = LEAST_WIDTH
    while width < num_blocks:
        width *= 4
    return width


def _longest(requests: Sequence[Request]) -> int:
    """The blocks of the request that has the most."""
    return max(len(request.block_ids) for request in requests)
