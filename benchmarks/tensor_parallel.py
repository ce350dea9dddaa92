"""What a second process costs and saves: bytes of each rank, an all-reduce, and a step on one rank and on two.

Bytes are counted from the tensors, and compared with the formula. An all-reduce between two processes (gloo) is timed
over message sizes, and latency + bytes / bandwidth is fitted to the minima. Then two random Llamas, the one of
`benchmarks/engine.py` and a larger one, decode on one rank and on two, a thread each, in turn; and rank 0's shard runs
as a model of its own, with no one to wait for. That shard's step and the fitted all-reduces predict the step of two
ranks. Wall time, since a rank that waits uses no processor; minimum and median. Last, what `minicache.arithmetic` says
about Llama 3 8B on two H100.

    python -m benchmarks.tensor_parallel
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from benchmarks._record import record
from benchmarks.engine import SHAPE, make_work
from minicache.arithmetic import step_bytes, step_flops, step_seconds
from minicache.arithmetic.parallel import (
    Link,
    allreduce_bytes,
    allreduce_seconds,
    break_even_latency,
    parallel_step_seconds,
    rank_kv_bytes_per_token,
    rank_weight_bytes,
    ring_factor,
)
from minicache.arithmetic.specs import GIB, H100, LLAMA_3_8B, Transformer
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.model import MiniGPT, MiniGPTConfig
from minicache.parallel import ParallelModel
from minicache.parallel.group import Group
from minicache.parallel.model import shard_weights

LARGE = MiniGPTConfig(
    vocab_size=4096,
    hidden_size=1024,
    num_layers=8,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=2816,
    max_seq_len=512,
)
MODELS = {"small": SHAPE, "large": LARGE}
BATCHES = (1, 8, 32)
WARM_UP, ROUNDS, STEPS = 10, 8, 5
MESSAGE_NBYTES = tuple(2**power for power in range(8, 23, 2))
ALLREDUCE_ROUNDS, ALLREDUCES, MANY_NBYTES = 5, 100, 2**20
LATENCY = 10e-6  # of NCCL between two GPUs of a DGX A100, NVIDIA/nccl-tests issue 123
LINKS = {"nvlink": Link(LATENCY, 450e9), "pcie": Link(LATENCY, 64e9)}
EXAMPLE = {"decode_1": (1, 1000, 1), "decode_64": (1, 1000, 64), "decode_256": (1, 1000, 256), "prefill": (8192, 0, 1)}


def main() -> None:
    torch.set_num_threads(1)
    allreduces = measure_allreduces()
    link, error = fit(allreduces)
    figures: dict[str, Any] = {
        "threads_per_rank": 1,
        "repeats": ROUNDS * STEPS,
        "allreduce": {"us": allreduces, "latency_us": link.latency * 1e6, "gb_per_s": link.bandwidth / 1e9},
        "models": {name: measure_model(config, link) for name, config in MODELS.items()},
        "example": example(),
    }
    figures["allreduce"]["worst_error"] = error
    record("tensor_parallel", figures)


# An all-reduce


def measure_allreduces() -> dict[str, dict[str, float]]:
    """Microseconds of an all-reduce between two processes, by bytes of the message."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        other = multiprocessing.get_context("spawn").Process(target=run_allreduces, args=(store, 1))
        other.start()
        seconds = run_allreduces(store, 0)
        other.join()
    return {
        str(nbytes): {"least": min(times) * 1e6, "median": statistics.median(times) * 1e6}
        for nbytes, times in seconds.items()
    }


def run_allreduces(store: str, rank: int) -> dict[int, list[float]]:
    """One process's part: seconds of each all-reduce, by bytes."""
    torch.set_num_threads(1)
    group = Group(store, rank, 2, torch.zeros(1, 1), 60)
    seconds: dict[int, list[float]] = {nbytes: [] for nbytes in MESSAGE_NBYTES}
    for _ in range(ALLREDUCE_ROUNDS):
        for nbytes, times in seconds.items():
            rows, count = torch.zeros(nbytes // 4, 1), ALLREDUCES if nbytes < MANY_NBYTES else ALLREDUCES // 10
            group.begin([len(rows)] * count)
            for _ in range(count):
                start = time.perf_counter()
                group.all_reduce(rows)
                times.append(time.perf_counter() - start)
    return seconds


def fit(measured: dict[str, dict[str, float]]) -> tuple[Link, float]:
    """Latency and bandwidth by least squares of the relative error, and the largest relative error left."""
    nbytes = np.array([int(each) for each in measured], dtype=float)
    seconds = np.array([each["least"] for each in measured.values()]) * 1e-6
    columns = np.stack([1 / seconds, ring_factor(2) * nbytes / seconds], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(nbytes)), rcond=None)
    link = Link(float(latency), float(1 / per_byte))
    predicted = np.array([allreduce_seconds(link, int(each), 2) for each in nbytes])
    return link, float(np.abs(predicted / seconds - 1).max())


# A model


def measure_model(config: MiniGPTConfig, link: Link) -> dict[str, Any]:
    """Bytes and step times of a random Llama, on one rank and on two."""
    torch.manual_seed(0)
    model = MiniGPT(config).eval()
    spec = Transformer(
        config.num_layers,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        model.num_parameters(),
    )
    ranks = ParallelModel(model, 2)
    try:
        figures = count_bytes(model, ranks, spec)
        figures["decode"] = {
            str(batch): decode_steps(model, ranks, batch, link) for batch in track(BATCHES, description="Decoding")
        }
    finally:
        ranks.close()
    return figures


def count_bytes(model: MiniGPT, ranks: ParallelModel, spec: Transformer) -> dict[str, Any]:
    """Bytes of each rank's weights and cache, from the tensors and by the formula."""
    weights = [sum(each.nbytes for each in shard_weights(model, rank, 2, torch.float32)) for rank in (0, 1)]
    assert weights[0] == sum(each.nbytes for each in ranks.parameters())
    replicated = model.embed_tokens.weight.numel() + sum(each.numel() for each in model.parameters() if each.ndim == 1)
    whole, half = (LLM(each, num_blocks=8).memory.storage for each in (model, ranks))
    assert whole is not None
    assert half is not None
    return {
        "num_parameters": spec.num_parameters,
        "weights_mb": [sum(each.nbytes for each in model.parameters()) / 1e6, *(nbytes / 1e6 for nbytes in weights)],
        "weights_formula_mb": rank_weight_bytes(spec.num_parameters, replicated, 2, "float32") / 1e6,
        "kv_bytes_per_token": [whole.token_nbytes, half.token_nbytes],
        "kv_formula": rank_kv_bytes_per_token(spec, 2, "float32"),
    }


def decode_steps(model: MiniGPT, ranks: ParallelModel, batch: int, link: Link) -> dict[str, float]:
    """Milliseconds of a decode step of so many sequences: on one rank, on two, and of a shard alone."""
    contestants: dict[str, MiniGPT | ParallelModel] = {"one": model, "two": ranks, "shard": standalone(ranks)}
    engines = {name: new_engine(each, batch) for name, each in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for llm in engines.values():
        for _ in range(WARM_UP):
            llm.step()
    for _ in range(ROUNDS):
        for name, llm in engines.items():
            seconds[name] += [timed(llm.step) for _ in range(STEPS)]
    config = model.config
    one, two, shard = (min(seconds[name]) * 1e3 for name in ("one", "two", "shard"))
    nbytes = batch * config.hidden_size * 4
    reducing = 2 * config.num_layers * allreduce_seconds(link, nbytes, 2) * 1e3
    return {
        "one_ms": one,
        "two_ms": two,
        "median_one_ms": statistics.median(seconds["one"]) * 1e3,
        "median_two_ms": statistics.median(seconds["two"]) * 1e3,
        "shard_ms": shard,
        "allreduces_ms": reducing,
        "predicted_two_ms": shard + reducing,
        "speedup": one / two,
    }


def standalone(ranks: ParallelModel) -> MiniGPT:
    """Rank 0's shard as a model of its own: what it computes makes no sense, and takes as long."""
    shard = MiniGPT(ranks.shard.config)  # type: ignore[arg-type]
    shard.load_state_dict(ranks.shard.state_dict())
    return shard.eval()


def new_engine(model: MiniGPT | ParallelModel, batch: int) -> LLM:
    """An engine with so many requests, none of which ends while it is measured."""
    llm = LLM(model, max_num_seqs=batch, num_blocks=1024)
    for prompt in make_work(batch).prompts:
        llm.add_request(prompt, SamplingParams(max_tokens=SHAPE.max_seq_len - len(prompt), ignore_eos=True))
    return llm


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# Llama 3 8B, computed


def example() -> dict[str, Any]:
    """What the page works out: Llama 3 8B in 16 bits on one H100 and on two."""
    model, embedding = LLAMA_3_8B, 128_256 * LLAMA_3_8B.hidden_size
    replicated = 2 * embedding
    figures: dict[str, Any] = {
        "weights_gb": [
            model.num_parameters * 2 / 1e9,
            rank_weight_bytes(model.num_parameters, replicated, 2) / 1e9,
            rank_weight_bytes(model.num_parameters - embedding, embedding, 2) / 1e9,
        ],
        "kv_kib_per_token": [rank_kv_bytes_per_token(model, ranks) / 1024 for ranks in (1, 2)],
        "tokens": [
            (H100.memory_bytes - nbytes) // rank_kv_bytes_per_token(model, ranks)
            for ranks, nbytes in (
                (1, model.num_parameters * 2),
                (2, rank_weight_bytes(model.num_parameters, replicated, 2)),
            )
        ],
        "memory_gib": H100.memory_bytes / GIB,
        "latency_us": LATENCY * 1e6,
    }
    for name, step in EXAMPLE.items():
        num_tokens = step[0] * step[2]
        row = {
            "allreduce_kib": allreduce_bytes(model, num_tokens) / 64 / 1024,
            "one_ms": step_seconds(H100, step_flops(model, *step), step_bytes(model, *step)) * 1e3,
        }
        for link_name, link in LINKS.items():
            two = parallel_step_seconds(model, H100, link, 2, *step, num_replicated=replicated) * 1e3
            at = break_even_latency(model, H100, link.bandwidth, 2, *step, num_replicated=replicated) * 1e6
            reducing = 64 * allreduce_seconds(link, allreduce_bytes(model, num_tokens) // 64, 2) * 1e3
            row |= {
                f"{link_name}_ms": two,
                f"{link_name}_allreduces_ms": reducing,
                f"{link_name}_speedup": row["one_ms"] / two,
                f"{link_name}_break_even_us": at,
            }
        figures[name] = row
    return figures


if __name__ == "__main__":
    main()
