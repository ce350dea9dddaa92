"""The numbers of "What the field does today", computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from minicache.arithmetic.arithmetic import cache_bytes_per_token
from minicache.arithmetic.specs import DEEPSEEK_V3, H100, LLAMA_3_8B, LLAMA_3_70B

PAGES = Path(__file__).parents[2] / "docs/en/today"
HEADS, LATENT, ROPE, WIDTH = 128, 512, 64, 128
"""DeepSeek-V3's attention; its report."""
COMPUTED = 0.5 * H100.peak_flops
"""FLOP/s that the pages assume for a prompt."""


def text(name: str) -> str:
    """A page's words, wherever its lines end."""
    return " ".join((PAGES / f"{name}.md").read_text(encoding="utf-8").split())


def test_latent_attention() -> None:
    page = text("01-latent-attention")
    rebuilt = 2 * LATENT * HEADS * (WIDTH + WIDTH)
    plain = 2 * HEADS * ((WIDTH + ROPE) + WIDTH)
    absorbed = 2 * HEADS * ((LATENT + ROPE) + LATENT)
    plain_nbytes, nbytes = 2 * HEADS * (WIDTH + ROPE + WIDTH), 2 * (LATENT + ROPE)
    layers = DEEPSEEK_V3.num_layers
    for number in (rebuilt, plain, absorbed, nbytes, absorbed - plain):
        assert f"{number:,}" in page.replace("{,}", ",")
    assert plain_nbytes == plain  # one FLOP a byte
    assert f"{absorbed / plain:.1f} times the arithmetic and reads a {plain_nbytes / nbytes:.0f}st" in page
    assert f"{absorbed / nbytes:.0f} FLOPs a byte" in page
    assert f"approx {rebuilt / (absorbed - plain):.0f}" in page
    seconds = 8192 * layers / H100.bandwidth
    assert f"| {seconds * plain_nbytes * 1e3:.1f} ms | {seconds * nbytes * 1e3:.2f} ms |" in page
    work = 8192 * layers
    assert f"{work * rebuilt / 1e12:.1f} TFLOP: {work * rebuilt / H100.peak_flops * 1e3:.0f} ms" in page
    chunk = 2048 * work
    rebuilding = f"{chunk * plain / 1e12:.0f} + {work * rebuilt / 1e12:.0f}"
    assert f"{chunk * absorbed / 1e12:.0f} TFLOP absorbed, {rebuilding}" in page
    assert 8 * cache_bytes_per_token(DEEPSEEK_V3) == pytest.approx(562e3, rel=1e-3)
    few = 2 * 16 * (WIDTH + ROPE + WIDTH) / nbytes
    assert f"{few:.1f} times as many" in " ".join(page.split())


def test_tiers() -> None:
    page = text("02-tiers")
    cells = {
        LLAMA_3_8B: (LLAMA_3_8B.num_parameters, "30,800", "4.0"),
        LLAMA_3_70B: (LLAMA_3_70B.num_parameters, "3,500", "1.1"),
        DEEPSEEK_V3: (37_000_000_000, "6,700", "0.5"),
    }
    for model, (num_active, tokens, bandwidth) in cells.items():
        nbytes, rate = cache_bytes_per_token(model), COMPUTED / (2 * num_active)
        assert rate == pytest.approx(float(tokens.replace(",", "")), rel=0.01)
        assert rate * nbytes / 1e9 == pytest.approx(float(bandwidth), abs=0.05)
        assert f"| {nbytes:,} | {tokens} | {bandwidth} GB/s |" in page
    nbytes = cache_bytes_per_token(LLAMA_3_8B)
    for link, tokens, ms in ((55e9, "420,000", "19"), (12.5e9, "95,000", "84"), (7e9, "53,000", "150")):
        assert link / nbytes == pytest.approx(float(tokens.replace(",", "")), rel=0.01)
        assert 8000 * nbytes / link * 1e3 == pytest.approx(float(ms), rel=0.01)
        assert f"| {tokens} | {ms} ms |" in page
    for capacity, held in ((60e9, "458 thousand"), (512e9, "3.9 million"), (4e12, "31 million")):
        number = capacity / nbytes / (1e3 if "thousand" in held else 1e6)
        assert number == pytest.approx(float(held.split()[0]), rel=0.02)
        assert held in page


def test_a_step_on_a_gpu() -> None:
    page = text("03-a-step-on-a-gpu")
    weights = 2 * LLAMA_3_8B.num_parameters
    assert f"{H100.bandwidth / weights:.0f} tokens a second" in page
    for requests, scheduler in ((1, 0.04), (64, 0.7), (256, 2.9)):
        nbytes = weights + requests * 1000 * cache_bytes_per_token(LLAMA_3_8B)
        gpu = nbytes / H100.bandwidth * 1e3
        parts = f"{gpu:.1f} ms | {scheduler} ms | {gpu + scheduler:.1f} ms | {gpu:.1f} ms"
        assert f"| {requests} | {nbytes / 1e9:.1f} GB | {parts} |" in page
    assert f"idle for {2.9 / (14.81 + 2.9):.0%}".replace("%", " %") in page


def test_structured_outputs() -> None:
    page = text("04-structured-outputs")
    hidden, kv, inner, vocabulary = 4096, 1024, 14_336, 128_256
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
    head = vocabulary * hidden
    parameters = LLAMA_3_8B.num_parameters
    assert f"a layer has {layer / 1e6:.0f} million parameters, {layer / parameters:.1%}".replace("%", " %") in page
    assert f"has {head / 1e6:.0f} million, {head / parameters:.1%}".replace("%", " %") in page
    cost = 4 * (layer + head) / parameters
    assert f"= {cost:.0%}".replace("%", " %") in page
    gained = (1 - 0.8**5) / (1 - 0.8)
    assert f"{gained:.2f} / {1 + cost:.2f} = {gained / (1 + cost):.2f}" in page
    assert f"1.85 / 1.016 = {1.85 / (1 + 1 / DEEPSEEK_V3.num_layers):.2f}" in page
    assert f"{vocabulary // 8:,} bytes" in page
