"""What one more token costs, against its position: recomputed from scratch, and with a KV cache.

The shipped MiniGPT decodes from one word up to its last position, once in each way per repeat, so both ways meet
the same weather on the machine. The time of a step is the minimum over the repeats. One thread.

    python -m benchmarks.decode_cost
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from rich.progress import track

from benchmarks._record import record
from minicache.arithmetic.arithmetic import kv_bytes_per_token
from minicache.cache.dense import KVCache
from minicache.engine.decoding import decode
from minicache.engine.timing import timed
from minicache.grammar import Tokenizer
from minicache.model import MiniGPT, load_minigpt

REPEATS = 9


def main() -> None:
    torch.set_num_threads(1)
    model = load_minigpt()
    prompt = torch.tensor([Tokenizer().encode("Yesterday")])
    runs: dict[str, list[list[float]]] = {"recomputed": [], "cached": []}
    for _ in track(range(REPEATS), description="Decoding"):
        for way in runs:
            runs[way].append(step_milliseconds(model, prompt, cached=way == "cached"))
    record("decode_cost", results(model, {way: best(repeats) for way, repeats in runs.items()}))


def step_milliseconds(model: MiniGPT, prompt: torch.Tensor, *, cached: bool) -> list[float]:
    """Milliseconds of each step from the prompt to the model's last position."""
    config = model.config
    cache = KVCache(config.num_layers, 1, config.num_kv_heads, config.max_seq_len, config.head_dim) if cached else None
    steps = decode(model, prompt, config.max_seq_len - prompt.shape[1] + 1, cache=cache)
    return [seconds * 1e3 for _, seconds in timed(steps)]


def best(repeats: list[list[float]]) -> list[float]:
    """The minimum over the repeats, step by step: what is left when no one disturbs."""
    return [round(min(times), 4) for times in zip(*repeats, strict=True)]


def results(model: MiniGPT, milliseconds: dict[str, list[float]]) -> dict[str, Any]:
    """Curves, totals and ratios. Step n (from 1) attends to n positions, the prompt being one token long."""
    config, num_steps = model.config, len(milliseconds["cached"])
    recomputed, cached = milliseconds["recomputed"], milliseconds["cached"]
    totals = {way: list(accumulate(times)) for way, times in milliseconds.items()}
    return {
        "model": f"MiniGPT, {model.num_parameters():,} parameters, float32",
        "threads": 1,
        "repeats": REPEATS,
        "num_steps": num_steps,
        "recomputed_ms": recomputed,
        "cached_ms": cached,
        "recomputed_ms_at_512": recomputed[511],
        "cached_ms_at_512": cached[511],
        "recomputed_ms_median_first_16": sorted(recomputed[:16])[8],
        "cached_ms_median_first_16": sorted(cached[:16])[8],
        "cached_ms_median_last_16": sorted(cached[-16:])[8],
        "speedup_at_512": recomputed[511] / cached[511],
        "recomputed_total_s": totals["recomputed"][-1] / 1e3,
        "cached_total_s": totals["cached"][-1] / 1e3,
        "speedup_total": totals["recomputed"][-1] / totals["cached"][-1],
        "speedup_total_256": totals["recomputed"][255] / totals["cached"][255],
        "positions_recomputed": num_steps * (num_steps + 1) // 2,
        "positions_cached": num_steps,
        "kv_bytes_per_token": kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, "float32"),
    }


if __name__ == "__main__":
    main()
