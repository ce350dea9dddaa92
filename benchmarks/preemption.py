"""What a preempted request costs: by recompute and by swap, in copies, in steps, and on a modelled GPU.

Three questions, and three kinds of answers:

- `tensors`, **measured**: one sequence's blocks are copied to CPU blocks and back (`minicache.cache.swap`), and its
  tokens are computed again in one step, over block sizes and lengths. Both memories are this machine's RAM: what is
  measured is the work, not a bus. `one_by_one` copies each block of each layer by a call of its own, as vLLM's first
  release did; it shows what small transfers cost.
- `pressure`, `block_sizes`, `watermarks`, **counted**: a burst of requests with ShareGPT's lengths is scheduled with a
  smaller and smaller pool, and with other block sizes and watermarks. Preemptions, tokens computed again, blocks moved
  and steps are exact. Seconds are **modelled**: each step takes what the roofline says for OPT-13B on an A100-40GB,
  and each transfer delays it (`transfer_seconds`). No time of this machine is in them.
- `modelled`: the paper's ablation (Kwon et al. 2023, figure 19a) from data sheets: recomputing against moving, over
  block sizes, for a GPU on PCI Express 4.0.

    python -m benchmarks.preemption
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from rich.progress import track

from benchmarks._record import record
from minicache.arithmetic.arithmetic import cache_bytes_per_token, step_bytes, step_flops, step_seconds
from minicache.arithmetic.specs import A100_40GB, H100, LLAMA_3_8B, OPT_13B, Accelerator, Transformer
from minicache.cache.paged import PagedStorage, RaggedStep
from minicache.cache.swap import HostStorage
from minicache.memory.blocks import BlockPool, BlockTable, blocks_for
from minicache.model.config import MiniGPTConfig
from minicache.model.minigpt import MiniGPT
from minicache.request import Request, RequestId
from minicache.scheduler import Scheduler, SchedulerOutput, create_scheduler
from minicache.scheduler.drive import Tally, drive
from minicache.scheduler.observe import Observer, observe
from minicache.simulator.costs import RooflineCost, StepLoad
from minicache.simulator.workload import SHAREGPT, generate

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTH = 512
"""Tokens of the sequence, where block sizes are compared."""
LENGTHS = (64, 128, 256, 512, 1024)
"""Of the larger model, where lengths are compared, in blocks of 16."""
BLOCK = 16
MIB: Final = 2**20

MODELS = {
    "minigpt": MiniGPTConfig(vocab_size=512),
    "larger": MiniGPTConfig(
        vocab_size=4096,
        hidden_size=384,
        num_layers=6,
        num_heads=6,
        num_kv_heads=6,
        head_dim=64,
        intermediate_size=1024,
        max_seq_len=1024,
    ),
}
"""MiniGPT's own shape, and one thirteen times as large without grouped queries. Weights are random: no matter here."""

REPEATS = {"minigpt": 15, "larger": 5}

NUM_REQUESTS, SEEDS = 64, (0, 1, 2)
POOL_PERCENTS = (100, 90, 80, 70, 60, 50, 40, 30)
MIDDLE_PERCENT = 50
"""The pool for which block sizes and watermarks are compared."""
HOST_PERCENTS = (100, 25, 5)
"""CPU swap spaces, in percent of the device's pool."""
WATERMARKS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)

PCIE_4: Final = 25e9
"""Bytes/s of a copy over PCI Express 4.0, 16 lanes. Their limit is 16 GT/s · 16 · 128/130 / 8 = 31.5e9; that a copy
reaches four fifths of it is an assumption."""
PCIE_5: Final = 2 * PCIE_4
TRANSFER_LATENCY: Final = 5e-6
"""Seconds that each transfer takes in addition to its bytes. An assumption; `modelled` also has 2 and 10 µs."""

ROOFLINE: Final = RooflineCost(OPT_13B, A100_40GB, flops_efficiency=1, bandwidth_efficiency=1, overhead_seconds=0)
"""A step at its best: peak FLOP/s, all of the bandwidth."""

Way = Literal["recompute", "swap"]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        tensors = {name: measure(name) for name in MODELS}
    record("preemption", {"threads": 1, "tensors": tensors, **scheduled(), "modelled": modelled()})


# --- measured: one sequence's blocks ----------------------------------------------------------------------------------


class Sequence:
    """One sequence of a model, its blocks anywhere in a storage that has four times as many.

    Args:
        config: the model's shape.
        num_tokens: tokens whose keys and values are in the blocks.
        block_size: tokens of a block.
    """

    def __init__(self, config: MiniGPTConfig, num_tokens: int, block_size: int) -> None:
        self.num_tokens, self.num_layers = num_tokens, config.num_layers
        num_blocks = blocks_for(num_tokens, block_size)
        pool = BlockPool(4 * num_blocks, block_size)
        order = pool.allocate(pool.num_blocks)
        random.Random(0).shuffle(order)
        pool.free(order)  # first in, first out: now blocks come in this order
        sizes = config.num_layers, config.num_kv_heads, config.head_dim
        self.storage = PagedStorage(pool, *sizes)
        self.host = HostStorage(self.storage, num_blocks)
        self.plain_host = PagedStorage(BlockPool(num_blocks, block_size), *sizes)
        self.table = BlockTable(pool)
        self.table.append(num_tokens)
        self.pairs = list(zip(self.table.block_ids, range(num_blocks), strict=True))

    def swap(self) -> None:
        """Copy the blocks to the host and back, as the engine does."""
        self.host.swap_out(self.pairs)
        self.host.swap_in([(there, here) for here, there in self.pairs])

    def swap_one_by_one(self) -> None:
        """The same, by one call for each block, layer, and keys or values."""
        for source, target, pairs in (
            (self.storage, self.plain_host, self.pairs),
            (self.plain_host, self.storage, [(there, here) for here, there in self.pairs]),
        ):
            for layer in range(self.num_layers):
                for rows, copies in ((source.k(layer), target.k(layer)), (source.v(layer), target.v(layer))):
                    for here, there in pairs:
                        copies[there].copy_(rows[here])

    def recompute(self, model: MiniGPT, token_ids: torch.Tensor) -> None:
        """Compute all tokens again in one step, and the logits of the last, as for a request that resumes."""
        self.table.release()
        step = RaggedStep(self.storage, [self.table], [self.num_tokens])
        model.logits(model.hidden_states(token_ids[None], step)[:, -1:])


def measure(name: str) -> dict[str, Any]:
    """Milliseconds of each way, over block sizes and over lengths."""
    config = MODELS[name]
    model = MiniGPT(config).eval()
    by_block_size = {
        size: times(name, model, LENGTH, size) for size in track(BLOCK_SIZES, description=f"Block sizes, {name}")
    }
    lengths = [length for length in LENGTHS if length <= config.max_seq_len]
    by_length = {length: times(name, model, length, BLOCK) for length in track(lengths, description=f"Lengths, {name}")}
    at_16 = by_block_size[BLOCK]
    row_nbytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "row_nbytes": row_nbytes,
        "mib_moved": 2 * LENGTH * row_nbytes / MIB,
        "by_block_size": by_block_size,
        "by_length": by_length,
        "recompute_over_swap_at_16": at_16["recompute_ms"] / at_16["swap_ms"],
        "one_by_one_1_over_256": by_block_size[1]["one_by_one_ms"] / by_block_size[256]["one_by_one_ms"],
        "recompute_spread": spread(each["recompute_ms"] for each in by_block_size.values()),
        "swap_gb_per_s_at_16": 2 * LENGTH * row_nbytes / at_16["swap_ms"] / 1e6,
    }


def times(name: str, model: MiniGPT, num_tokens: int, block_size: int) -> dict[str, float]:
    """The minimum in milliseconds of each way. They take turns."""
    sequence = Sequence(model.config, num_tokens, block_size)
    token_ids = torch.randint(model.config.vocab_size, (num_tokens,))
    ways: dict[str, Callable[[], None]] = {
        "swap_ms": sequence.swap,
        "one_by_one_ms": sequence.swap_one_by_one,
        "recompute_ms": lambda: sequence.recompute(model, token_ids),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(REPEATS[name]):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            best[way] = min(best[way], (time.perf_counter() - start) * 1e3)
    return {way: round(milliseconds, 4) for way, milliseconds in best.items()}


def spread(values: Iterable[float]) -> float:
    """The largest over the smallest."""
    values = list(values)
    return max(values) / min(values)


# --- modelled: a GPU and its bus --------------------------------------------------------------------------------------


def transfer_seconds(
    model: Transformer,
    num_blocks: int,
    block_size: int,
    *,
    packed: bool,
    bandwidth: float = PCIE_4,
    latency: float = TRANSFER_LATENCY,
) -> float:
    """The time to move blocks over a bus, one way.

    `packed`: a block is one transfer, as `HostStorage` moves it. If not, it is one for the keys and one for the values
    of each layer, which lie apart on the device: 2 · num_layers transfers.
    """
    transfers = num_blocks * (1 if packed else 2 * model.num_layers)
    return transfers * latency + num_blocks * block_size * cache_bytes_per_token(model) / bandwidth


def recompute_seconds(model: Transformer, accelerator: Accelerator, num_tokens: int) -> float:
    """The least time to compute so many tokens in one step that has nothing else to do."""
    return step_seconds(accelerator, step_flops(model, num_tokens), step_bytes(model, num_tokens))


def modelled() -> dict[str, Any]:
    """Recomputing and moving 1,024 tokens of OPT-13B on an A100 over block sizes; and three machines per token."""
    num_tokens = 1024
    recompute = recompute_seconds(OPT_13B, A100_40GB, num_tokens)
    by_block_size: dict[int, dict[str, float]] = {}
    for size in BLOCK_SIZES:
        entry = {"transfer_kib": size * cache_bytes_per_token(OPT_13B) / 80 / 1024}
        num_blocks = blocks_for(num_tokens, size)
        for microseconds in (2, 5, 10):
            one_way = transfer_seconds(OPT_13B, num_blocks, size, packed=False, latency=microseconds * 1e-6)
            entry[f"swap_ms_{microseconds}_us"] = 2e3 * one_way
        entry["packed_ms"] = 2e3 * transfer_seconds(OPT_13B, num_blocks, size, packed=True)
        by_block_size[size] = entry | {"recompute_over_swap": recompute * 1e3 / entry["swap_ms_5_us"]}
    machines = {
        "opt_13b_a100": per_token(OPT_13B, A100_40GB, PCIE_4),
        "llama_3_8b_a100": per_token(LLAMA_3_8B, A100_40GB, PCIE_4),
        "llama_3_8b_h100": per_token(LLAMA_3_8B, H100, PCIE_5),
    }
    return {
        "num_tokens": num_tokens,
        "bandwidth": PCIE_4,
        "latency_us": TRANSFER_LATENCY * 1e6,
        "recompute_ms": 1e3 * recompute,
        "by_block_size": by_block_size,
        "machines": machines,
    }


def per_token(model: Transformer, accelerator: Accelerator, bandwidth: float) -> dict[str, float]:
    """What one token of a long sequence costs each way, in microseconds, neither attention nor latency counted."""
    recompute = 2 * model.num_parameters / accelerator.peak_flops
    swap = 2 * cache_bytes_per_token(model) / bandwidth
    return {"recompute_us": 1e6 * recompute, "swap_us": 1e6 * swap, "recompute_over_swap": recompute / swap}


# --- counted: a scheduler under pressure ------------------------------------------------------------------------------


@dataclass
class Clock(Observer):
    """Tells the modelled time: a step of OPT-13B on an A100-40GB, after the transfers that it waits for.

    Attributes:
        packed: how blocks move, see `transfer_seconds`.
        now: seconds since the first step began.
        finished: id → when it finished.
        longest_pause: id → the longest time between two of its tokens.
    """

    packed: bool = True
    now: float = 0.0
    finished: dict[RequestId, float] = field(default_factory=dict)
    longest_pause: dict[RequestId, float] = field(default_factory=dict)
    _last_token: dict[RequestId, float] = field(default_factory=dict)

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Let the step's time pass."""
        block_size = scheduler.pool.block_size
        counts = output.num_scheduled_tokens.values()
        batch = zip(counts, (request.num_computed_tokens for request in output.scheduled), strict=True)
        if output.scheduled:
            self.now += ROOFLINE.step_seconds(StepLoad.of(batch))
        moved = sum(map(len, (*output.swapped_out.values(), *output.swapped_in.values())))
        if moved:
            self.now += transfer_seconds(OPT_13B, moved, block_size, packed=self.packed)

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """Note which requests got a token, and which have finished."""
        for request in output.scheduled:  # no chunks here: each of them did
            pause = self.now - self._last_token.get(request.request_id, self.now)
            self.longest_pause[request.request_id] = max(pause, self.longest_pause.get(request.request_id, 0.0))
            self._last_token[request.request_id] = self.now
        self.finished |= dict.fromkeys((request.request_id for request in finished), self.now)


@dataclass(frozen=True)
class Setting:
    """One scheduler under one pressure.

    Attributes:
        pool_percent: the pool, in percent of what the burst would use if there were room for all.
        way: how it preempts.
        host_percent: the CPU swap space, in percent of the pool; 0 for recompute.
        block_size: tokens of a block. The pool has as many tokens whatever it is.
        watermark: `PagedScheduler`'s.
        packed: how blocks move, see `transfer_seconds`.
    """

    pool_percent: int
    way: Way = "recompute"
    host_percent: int = 0
    block_size: int = BLOCK
    watermark: float = 0.0
    packed: bool = True


def burst(seed: int) -> list[Request]:
    """The requests, all there from the start."""
    arrivals = generate(SHAREGPT, NUM_REQUESTS, seed)
    return [Request(index, [0] * each.num_prompt_tokens, each.num_output_tokens) for index, each in enumerate(arrivals)]


def peak_tokens(seed: int) -> int:
    """Tokens of the blocks of 16 that the burst uses at most, with room for all."""
    steps: list[int] = []

    class Watch(Observer):
        def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
            steps.append(scheduler.pool.num_used)

    roomy = create_scheduler("paged", num_blocks=NUM_REQUESTS * 128, max_num_batched_tokens=NUM_REQUESTS * 2048)
    drive(observe(roomy, Watch()), burst(seed))
    return max(steps) * BLOCK


def serve(setting: Setting, seed: int, peak: int) -> dict[str, float]:
    """Serve one burst under one setting, and count."""
    num_blocks = peak * setting.pool_percent // 100 // setting.block_size
    clock = Clock(setting.packed)
    scheduler = create_scheduler(
        "paged",
        num_blocks=num_blocks,
        block_size=setting.block_size,
        preemption=setting.way,
        num_host_blocks=max(1, num_blocks * setting.host_percent // 100),
        watermark=setting.watermark,
        max_num_batched_tokens=NUM_REQUESTS * 2048,
    )
    requests = burst(seed)
    tally = drive(observe(scheduler, clock), requests)
    pauses = [clock.longest_pause[request.request_id] for request in requests if request.num_preemptions]
    return counts(tally, requests) | {
        "victims_longest_pause_s": statistics.fmean(pauses) if pauses else 0.0,
        "seconds": clock.now,
        "mean_latency_s": statistics.fmean(clock.finished.values()),
        "slowest_quarter_s": statistics.fmean(sorted(clock.finished.values())[-NUM_REQUESTS // 4 :]),
    }


def counts(tally: Tally, requests: list[Request]) -> dict[str, float]:
    """What the run cost, in things that can be counted."""
    useful = sum(request.num_tokens - 1 for request in requests)  # the last token of each is never computed
    return {
        "preemptions": tally.num_preemptions,
        "requests_preempted": sum(request.num_preemptions > 0 for request in requests),
        "recomputed_tokens": tally.num_recomputed_tokens,
        "recomputed_percent": 100 * tally.num_recomputed_tokens / useful,
        "moved_blocks": tally.num_swapped_blocks,
        "steps": tally.num_steps,
        "mean_batch": tally.mean_batch_size,
        "mean_latency_steps": statistics.fmean(tally.finished.values()) + 1,
        "mean_first_token_steps": statistics.fmean(tally.first_token.values()) + 1,
    }


def scheduled() -> dict[str, Any]:
    """Every setting by name, each the mean over the seeds."""
    middle = MIDDLE_PERCENT
    ways: dict[str, tuple[Way, int]] = {"recompute": ("recompute", 0)}
    ways |= {f"swap_{percent}": ("swap", percent) for percent in HOST_PERCENTS}
    moves: dict[str, tuple[Way, int, bool]] = {
        "recompute": ("recompute", 0, True),
        "packed": ("swap", 100, True),
        "by_layer": ("swap", 100, False),
    }
    sweeps = {
        "pressure": {
            name: {percent: Setting(percent, *way) for percent in POOL_PERCENTS} for name, way in ways.items()
        },
        "block_sizes": {
            name: {size: Setting(middle, way, host, size, packed=packed) for size in BLOCK_SIZES}
            for name, (way, host, packed) in moves.items()
        },
        "watermarks": {
            "recompute": {round(100 * part): Setting(middle, watermark=part) for part in WATERMARKS},
        },
    }
    peaks = {seed: peak_tokens(seed) for seed in SEEDS}
    found: dict[str, Any] = {
        name: {
            way: {key: averaged(setting, peaks) for key, setting in settings.items()}
            for way, settings in track(sweep.items(), description=f"Scheduling, {name}")
        }
        for name, sweep in sweeps.items()
    }
    return {"num_requests": NUM_REQUESTS, "seeds": len(SEEDS), "peak_tokens": statistics.fmean(peaks.values()), **found}


def averaged(setting: Setting, peaks: dict[int, int]) -> dict[str, float]:
    """The means of a setting's runs, one a seed."""
    runs = [serve(setting, seed, peak) for seed, peak in peaks.items()]
    return {name: round(statistics.fmean(run[name] for run in runs), 3) for name in runs[0]}


if __name__ == "__main__":
    main()
