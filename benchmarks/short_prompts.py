"""Up to how many new tokens the decode kernel attends to a sequence faster than the one for prompts, query by query.

One sequence of float32 with n new tokens, after none (a whole prompt) and after 256 and 2,048 others (a chunk of one).
Both ways attend through the same plan, with the limits set so one or the other runs; CPU time, minimum, taking
turns. `minicache.kernels.cpu.steps.LONGEST_PROMPT` and `LONGEST_CHUNK` are read off here.

    python -m benchmarks.short_prompts
"""

from __future__ import annotations

import time
from typing import Any

import torch
from rich.progress import track

from benchmarks._record import record
from minicache.kernels import AttentionMetadata
from minicache.kernels.cpu import steps

BLOCK = 16
HEADS = [(8, 2, 32), (8, 2, 64), (8, 8, 64), (32, 8, 128), (7, 1, 64)]
NUM_BEFORE = [0, 256, 2048]
NUM_NEW = [2, 4, 8, 16, 32, 64, 96, 128, 192, 256]
SECONDS = 0.25


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = [(heads, before) for heads in HEADS for before in NUM_BEFORE]
    with torch.inference_mode():
        lines = [measure(heads, before) for heads, before in track(cases, description="Attending")]
    limits = {"longest_prompt": steps.LONGEST_PROMPT, "longest_chunk": steps.LONGEST_CHUNK}
    record("short_prompts", limits | {"decode_time_by_prompt_time": lines})


def measure(heads: tuple[int, int, int], before: int) -> dict[str, Any]:
    """The decode kernel's time divided by that of the one for prompts, for each number of new tokens."""
    num_heads, num_kv_heads, head_dim = heads
    ratios = {str(num_new): round(ratio(*heads, before, num_new), 2) for num_new in NUM_NEW}
    return {"heads": f"{num_heads}/{num_kv_heads} of {head_dim}", "tokens_before": before, "ratios": ratios}


def ratio(num_heads: int, num_kv_heads: int, head_dim: int, before: int, num_new: int) -> float:
    num_blocks = -(-(before + num_new) // BLOCK)
    k_cache, v_cache = (torch.randn(num_blocks, BLOCK, num_kv_heads, head_dim) for _ in range(2))
    q = torch.randn(num_new, num_heads, head_dim).numpy()
    out = torch.empty(num_new, num_heads, head_dim).numpy()
    caches = steps.CacheArrays.of(k_cache, v_cache, None, None)
    tables, lengths = torch.randperm(num_blocks)[None], torch.tensor([before + num_new])
    plans = []
    limits = steps.LONGEST_PROMPT, steps.LONGEST_CHUNK
    for limit in (num_new, 0):  # the decode kernel, that for prompts
        steps.LONGEST_PROMPT = steps.LONGEST_CHUNK = limit
        metadata = AttentionMetadata(tables, lengths, torch.tensor([0, num_new]))
        plans.append(steps.plan_step(metadata, num_blocks, BLOCK))
    steps.LONGEST_PROMPT, steps.LONGEST_CHUNK = limits
    best = [float("inf")] * 2
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for which, plan in enumerate(plans):
            start = time.thread_time()
            plan.attend(q, caches, head_dim**-0.5, 0, out)
            best[which] = min(best[which], time.thread_time() - start)
    return best[0] / best[1]


if __name__ == "__main__":
    main()
