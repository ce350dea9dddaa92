"""What a request holds in a model with sliding windows, with groups of layers and without: bytes, and the step's time.

The layers of Gemma 3 1B, 22 of 26 with a window of 512 tokens, in a model of small width with random weights. One
request of 8,192 tokens is served by an engine whose scheduler has the model's groups, and by one whose running requests
keep all blocks. The bytes are those of the pool's used blocks: `peak` while the prompt is computed, by the token budget
of a step; `held` in decode, when the request has 8,192 tokens. A token takes 1 KiB a layer in Gemma 3 1B (one KV head,
256 numbers, bfloat16), so the MiB here are its own. The time is that of a decode step at that length: CPU time of one
thread, the two engines in turn, the least of STEPS.

    python -m benchmarks.kv_groups

Keys of results/kv_groups.json: model, num_tokens, groups (windows, num_layers); without and with, of each held_mib,
peak_mib by budget, step_us; ratio (of held bytes), step_ratio.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from benchmarks._record import record
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.model import Decoder
from minicache.model.decoder import DecoderConfig
from minicache.model.groups import layer_groups
from minicache.scheduler import create_scheduler

NUM_LAYERS, PATTERN, WINDOW = 26, 6, 512
NUM_TOKENS: Final = 8192
BUDGETS: Final = (512, 2048, 8192)
BLOCK_SIZE: Final = 16
STEPS: Final = 60
LAYER_NBYTES: Final = 1024
"""Of a token in one layer of Gemma 3 1B."""

WINDOWS: Final = tuple(None if layer % PATTERN == 0 else WINDOW for layer in range(1, NUM_LAYERS + 1))
CONFIG: Final = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=NUM_LAYERS,
    num_heads=1,
    num_kv_heads=1,
    head_dim=32,
    max_seq_len=2 * NUM_TOKENS,
    sliding_windows=WINDOWS,
)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, groups = Decoder(CONFIG).eval(), layer_groups(WINDOWS)
    found: dict[str, dict[str, Any]] = {"without": {"peak_mib": {}}, "with": {"peak_mib": {}}}
    engines = {}
    for budget in BUDGETS:
        for name in found:
            engines[name] = llm = engine(model, budget, has_groups=name == "with")
            llm.add_request([1] * (NUM_TOKENS - STEPS), SamplingParams(max_tokens=2 * STEPS, ignore_eos=True))
            peak = 0.0
            while not llm.scheduler.running or llm.scheduler.running[0].num_computed_tokens < NUM_TOKENS - STEPS:
                llm.step()
                peak = max(peak, used_mib(llm))
            found[name]["peak_mib"][str(budget)] = peak
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(STEPS):
        for name, llm in engines.items():
            begun = time.thread_time()
            llm.step()
            times[name].append(time.thread_time() - begun)
    for name, llm in engines.items():
        assert llm.scheduler.running[0].num_computed_tokens == NUM_TOKENS
        found[name] |= {"held_mib": used_mib(llm), "step_us": 1e6 * min(times[name])}
    record(
        "kv_groups",
        {
            "model": f"Gemma 3 1B's layers, {NUM_LAYERS}, each {PATTERN}th without a window of {WINDOW}",
            "num_tokens": NUM_TOKENS,
            "groups": {"windows": groups.windows, "num_layers": groups.num_layers},
            **found,
            "ratio": found["without"]["held_mib"] / found["with"]["held_mib"],
            "step_ratio": found["with"]["step_us"] / found["without"]["step_us"],
        },
    )


def engine(model: Decoder, budget: int, *, has_groups: bool) -> LLM:
    """An engine whose scheduler has the model's groups, or none."""
    options: dict[str, Any] = {"num_blocks": 8 * NUM_TOKENS // BLOCK_SIZE, "block_size": BLOCK_SIZE}
    options |= {"max_num_batched_tokens": budget, "max_model_len": 2 * NUM_TOKENS}
    if has_groups:
        return LLM(model, **options)
    return LLM(model, scheduler=create_scheduler("chunked", **options))


def used_mib(llm: LLM) -> float:
    """What the pool's used blocks take in Gemma 3 1B, in MiB."""
    assert llm.storage is not None
    return llm.scheduler.pool.num_used * BLOCK_SIZE * llm.storage.num_layers * LAYER_NBYTES / 2**20


if __name__ == "__main__":
    main()
