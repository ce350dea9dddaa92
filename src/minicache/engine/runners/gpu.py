"""A model's steps on a GPU: one copy of integers a step, decode as CUDA graphs, and nothing that waits for the device.

A GPU computes what it was asked for some time ago, and the host asks for more meanwhile. So a step must read nothing
back until its tokens are picked, and should ask with few calls. `minicache.cache.packed` puts all integers of a step
into one buffer, which is copied at once. A decode step makes the same calls every time, hundreds of them: they are
captured once for each size as a CUDA graph, and replayed by one call, over the same buffer with new numbers. No phase
builds this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from minicache.cache.packed import PADDING, PackedStep, StepSize, aligned, pack
from minicache.engine.kv import Model, PagedMemory, Step, logits_at
from minicache.engine.runners.sampling import GPUSampler
from minicache.engine.sampling import TokenSampler
from minicache.model.minigpt import Transformer
from minicache.scheduler import SchedulerOutput

logger = logging.getLogger("minicache")

LEAST_WIDTH: Final = 64
"""Columns of the block tables of a graph: so many, or 4 times that, or 16 times … Few graphs, and short copies."""

Run = Callable[[], Tensor]
"""A function that reads the same memory whenever it is called, and returns what it has computed."""

Capture = Callable[[Run], Run]
"""Makes of a `Run` one that is cheaper to call, and returns the same tensor every time, with new values."""


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
        memory: where keys and values are.
        size: of the step.
        capture: as `Capture`.
    """

    def __init__(self, model: Transformer, memory: PagedMemory, size: StepSize, capture: Capture) -> None:
        storage, places = memory.storage, memory.groups.places
        self._buffer = torch.zeros(size.buffer_size, dtype=torch.int64, device=storage.device)
        tensors = size.views(self._buffer)
        for view, padding in zip(tensors, PADDING, strict=True):
            view.fill_(padding)  # so what runs before the first step writes to no slot

        def run() -> Tensor:
            return model.hidden_states(tensors.token_ids[None], PackedStep(storage, tensors, places=places))[0]

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
            `minicache.model.minigpt.Transformer` gets none, as what it does is unknown.
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
        step = self._memory.begin(output)
        with torch.inference_mode():
            if max(step.counts) == 1 and self._capture is not None and isinstance(self._model, Transformer):
                return self._model.logits(self._decode(self._model, self._capture, step))
            return self._run(step)

    def pick_tokens(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[TokenSampler]) -> list[int | None]:
        """Pick tokens as `GPUSampler.pick_tokens`."""
        return self._sampler.pick_tokens(logits, rows, samplers)

    def _decode(self, model: Transformer, capture: Capture, step: Step) -> Tensor:
        """The hidden states of a step of one token each, `[B, hidden_size]`, by the graph of the next size."""
        num_seqs = min(padded_batch(len(step.requests)), self._max_num_seqs)
        size = StepSize(num_seqs, num_seqs, padded_width(step.width), num_groups=step.blocks.num_groups)
        if size not in self._graphs:
            try:
                self._graphs[size] = DecodeGraph(model, self._memory, size, capture)
            except RuntimeError as error:
                logger.warning("a decode step cannot be captured as a CUDA graph, so none will be: %s", error)
                self._graphs.clear()
                self._capture = capture = eagerly
                self._graphs[size] = DecodeGraph(model, self._memory, size, capture)
        packed = pack(step.requests, step.counts, step.blocks, size)
        return self._graphs[size](packed)[: len(step.requests)]

    def _run(self, step: Step) -> Tensor:
        """The logits after the last token of each request and after its draft tokens, by as many calls as it takes.

        In the step decodes stand before chunks, so attention computes each kind from views of the step's tensors.
        """
        storage = self._memory.storage
        order = sorted(range(len(step.requests)), key=lambda i: step.counts[i] > 1)
        requests, counts = [step.requests[i] for i in order], [step.counts[i] for i in order]
        num_rows = [1 + len(request.draft_token_ids) for request in requests]
        num_groups = step.blocks.num_groups
        size = StepSize(sum(counts), len(requests), aligned(step.width), sum(num_rows) - len(requests), num_groups)
        packed = pack(requests, counts, step.blocks, size)
        last = size.views(packed).last
        rows = dict(zip(order, torch.split(last.clone(), num_rows), strict=True))
        torch.cat([rows[index] for index in range(len(order))], out=last)  # in the order of the batch
        tensors = size.views(packed.to(storage.device, non_blocking=True))
        lengths = [request.num_computed_tokens + count for request, count in zip(requests, counts, strict=True)]
        places = self._memory.groups.places
        cache = PackedStep(storage, tensors, num_new_tokens=counts, lengths=lengths, places=places)
        return logits_at(self._model, tensors.token_ids[None], cache, tensors.last)


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
