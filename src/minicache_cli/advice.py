"""What an engine can hold, and options of `minicache serve` that will disappoint: what to set instead."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minicache.engine.options import ReplicaOptions
    from minicache.serving.replica.messages import EngineInfo


def advice(info: EngineInfo, options: ReplicaOptions, *, replicas: int, drain_seconds: float) -> list[str]:
    """A sentence for each option that was set to what will disappoint; none for what serves well.

    Args:
        info: the engine as it was made.
        options: what it was made from.
        replicas: how many engines there are.
        drain_seconds: how long SIGTERM waits for answers.
    """
    return [*_about_cache(info), *_about_steps(info, options), *_about_machine(options, replicas, drain_seconds)]


def capacity(info: EngineInfo) -> str:
    """How many requests an engine runs at once, in words."""
    num_tokens, longest = info.cache.num_blocks * info.cache.block_size, info.max_model_len
    num_full = num_tokens // longest
    if num_full >= info.max_num_seqs:
        return f"up to {info.max_num_seqs} requests at once"
    if num_full == 0:
        return f"{num_tokens:,} tokens, less than one request of {longest:,}"
    most = min(info.max_num_seqs, info.cache.num_blocks)
    return f"{num_tokens:,} tokens, {num_full} requests of {longest:,} at once, or up to {most} shorter ones"


def _about_cache(info: EngineInfo) -> list[str]:
    from minicache.memory.blocks import blocks_for  # a learner's file may take its place until now

    found, cache, longest = [], info.cache, info.max_model_len
    capacity = cache.num_blocks * cache.block_size
    if capacity < longest:
        enough = blocks_for(longest, cache.block_size)
        found.append(
            f"the cache holds {capacity} tokens ({_blocks(cache.num_blocks)} of {cache.block_size}), and one "
            f"request may have {longest}: set --num-blocks {enough} or more, or --max-model-len {max(capacity, 2)}"
        )
    elif cache.num_blocks < info.max_num_seqs:
        found.append(
            f"{info.max_num_seqs} requests cannot run together in {_blocks(cache.num_blocks)}, since each needs at "
            f"least one: set --num-blocks higher, or --max-num-seqs {cache.num_blocks} or less"
        )
    if cache.block_size > longest:
        found.append(
            f"a block of {cache.block_size} tokens is never full, since a request has at most {longest}: set "
            "--block-size 16"
        )
    return found


def _about_steps(info: EngineInfo, options: ReplicaOptions) -> list[str]:
    from minicache.scheduler import has_option  # as above

    found, budget, longest = [], options.max_num_batched_tokens, info.max_model_len
    if budget < info.max_num_seqs:
        found.append(
            f"a step computes at most {budget} tokens, and {info.max_num_seqs} running requests need one each: set "
            f"--max-num-batched-tokens {info.max_num_seqs} or more, or --max-num-seqs {budget} or less"
        )
    if not has_option(options.scheduler, "long_prefill_threshold") and budget < longest - 1:
        found.append(
            f"the scheduler {options.scheduler} computes a prompt in one step, so it refuses prompts of more than "
            f"{budget} tokens: set --max-num-batched-tokens {longest}, or --scheduler chunked"
        )
    if options.num_host_blocks and options.preemption != "swap":
        found.append("--num-host-blocks has no effect without swapping: set --preemption swap too")
    if options.preemption == "swap" and not has_option(options.scheduler, "preemption"):
        found.append(f"the scheduler {options.scheduler} never preempts: --preemption swap needs --scheduler chunked")
    return found


def _about_machine(options: ReplicaOptions, replicas: int, drain_seconds: float) -> list[str]:
    found, is_on_gpu = [], (options.device or "cpu").startswith("cuda")
    num_cores, num_processes = os.cpu_count() or 1, replicas * options.tensor_parallel_size
    if not is_on_gpu and num_processes * (options.num_threads or 1) > num_cores:
        found.append(
            f"{_processes(num_processes)} of {_threads(options.num_threads)} compete for {num_cores} cores: "
            "lower --replicas, --tensor-parallel or --num-threads"
        )
    if not is_on_gpu and options.enforce_eager:
        found.append("--enforce-eager has no effect on a CPU, which has no CUDA graphs: leave it out")
    if drain_seconds == 0:
        found.append("--drain-seconds 0 cuts off answers in progress at SIGTERM: set it to the duration of an answer")
    return found


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"


def _processes(number: int) -> str:
    return "1 engine process" if number == 1 else f"{number} engine processes"


def _threads(number: int | None) -> str:
    return "1 thread each" if number in (None, 1) else f"{number} threads each"
