"""The numbers on phase 1's pages, computed again: a page must not drift from the model or the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from minicache.arithmetic.arithmetic import (
    arithmetic_intensity,
    cache_bytes_per_token,
    cache_capacity_tokens,
    max_concurrent_sequences,
    step_bytes,
    step_flops,
    step_seconds,
    weight_bytes,
)
from minicache.arithmetic.specs import A100_40GB, GIB, LLAMA_3_8B, MINIGPT
from minicache.grammar import Tokenizer

RESERVED_SLOTS = 2048
LENGTHS = (137, 520, 61, 1893, 250, 905, 48, 330)
RAGGED = (200, 1500, 60)
PAGES = Path(__file__).parents[2] / "docs" / "en" / "phase-01-dense-cache" / "theory"


def of_the_vocabulary() -> list[str]:
    size = Tokenizer().vocab_size
    return [f" {size} words", f"| logits `[B, T, {size}]` | `[1, 2, {size}]` |"]


def of_the_cost() -> list[str]:
    position, entry = 2 * MINIGPT.num_parameters, 4 * MINIGPT.num_layers * MINIGPT.num_heads * MINIGPT.head_dim
    without = sum(step_flops(MINIGPT, 2 + step) for step in range(500))
    through = step_flops(MINIGPT, 2) + sum(step_flops(MINIGPT, 1, 1 + step) for step in range(1, 500))
    llama = 2 * LLAMA_3_8B.num_parameters / (4 * LLAMA_3_8B.num_layers * LLAMA_3_8B.num_heads * LLAMA_3_8B.head_dim)
    return [
        f"2 · {MINIGPT.num_parameters:,} = {position:,} FLOPs",
        f"{position:,} / {entry:,} ≈ {position / entry:.0f} tokens",
        f"a factor of {position / entry:.0f}",
        f"{without / 1e9:.0f} · 10⁹ without",
        f"{through / 1e9:.2f} · 10⁹ with",
        f"{without / through:.0f} times less",
        f"≈ {round(llama, -2):,.0f} tokens",
    ]


def of_the_memory() -> list[str]:
    weights = weight_bytes(MINIGPT.num_parameters, "float32")
    stated = [f"a {step_flops(MINIGPT, 512) / step_flops(MINIGPT, 1, 511):.0f}th of the arithmetic"]
    for batch in (1, 8, 32, 128):
        flops, nbytes = step_flops(MINIGPT, 1, 511, batch), step_bytes(MINIGPT, 1, 511, batch, "float32")
        intensity = arithmetic_intensity(flops, nbytes)
        caches, linear = nbytes - weights, 2 * MINIGPT.num_parameters * batch / weights
        share = f"{caches / nbytes:.0%}".replace("%", " %")
        stated.append(f"| {batch} | {weights:,} | {caches:,} | {share} | {linear:g} | 1.0 | {intensity:.2f} |")
        flops, nbytes = step_flops(LLAMA_3_8B, 1, 511, batch), step_bytes(LLAMA_3_8B, 1, 511, batch)
        milliseconds = step_seconds(A100_40GB, flops, nbytes) * 1e3
        stated.append(f"| {nbytes / 1e9:.2f} · 10⁹ |")
        stated.append(
            f"| {arithmetic_intensity(flops, nbytes):.3g} | {milliseconds:.2f} | {milliseconds / batch:.2f} |"
        )
    return stated


def of_the_waste() -> list[str]:
    used, reserved = sum(LENGTHS), RESERVED_SLOTS * len(LENGTHS)
    padded, tokens = max(RAGGED) * len(RAGGED), sum(RAGGED)
    blocks, ragged_blocks = ([-(-length // 16) for length in lengths] for lengths in (LENGTHS, RAGGED))
    capacity = cache_capacity_tokens(
        A100_40GB.memory_bytes,
        weight_bytes(LLAMA_3_8B.num_parameters),
        cache_bytes_per_token(LLAMA_3_8B),
        reserved_bytes=4 * GIB,
    )
    return [
        f"{used:,} of {reserved:,} slots held a token in the end: {used / reserved:.0%}".replace("%", " %"),
        f"{capacity:,} tokens",
        f"that is {max_concurrent_sequences(capacity, RESERVED_SLOTS)} sequences",
        f"{used // len(LENGTHS)} slots on average",
        f"would make {max_concurrent_sequences(capacity, used // len(LENGTHS))}.",
        f"{padded:,} slots for 200 + 1,500 + 60 = {tokens:,} tokens: {padded / tokens:.2f} times",
        f"{1 - tokens / padded:.0%} padding".replace("%", " %"),
        f"{padded - tokens:,} slots of padding",
        f"{16 * sum(blocks):,}: {sum(blocks)} blocks",
        f"{used / (16 * sum(blocks)):.1%}".replace("%", " %"),
        f"{' + '.join(map(str, ragged_blocks))} = {sum(ragged_blocks)} blocks, {16 * sum(ragged_blocks):,} slots",
    ]


@pytest.mark.parametrize(
    ("page", "stated"),
    [
        ("01-prefill-and-decode.md", of_the_vocabulary),
        ("02-cost-with-and-without.md", of_the_cost),
        ("03-decode-is-memory-bound.md", of_the_memory),
        ("05-toward-pagedattention.md", of_the_waste),
    ],
)
def test_a_page_states_what_the_arithmetic_gives(page, stated):
    text = " ".join((PAGES / page).read_text(encoding="utf-8").split())  # wherever the lines are broken
    assert [number for number in stated() if number not in text] == []
