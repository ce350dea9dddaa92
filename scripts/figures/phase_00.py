"""The figures of phase 0: heads, bytes per token, what fits, what a step reads and computes, and the roofline.

Every number comes from `minicache.arithmetic.arithmetic` and `minicache.arithmetic.specs`; nothing here is measured.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from minicache.arithmetic.arithmetic import (
    arithmetic_intensity,
    attainable_flops,
    cache_bytes_per_token,
    cache_capacity_tokens,
    max_concurrent_sequences,
    ridge_point,
    step_bytes,
    step_flops,
    weight_bytes,
)
from minicache.arithmetic.specs import (
    A100_40GB,
    A100_80GB,
    DEEPSEEK_V3,
    GIB,
    LLAMA_3_8B,
    LLAMA_3_70B,
    OPT_13B,
    QWEN3_8B,
    QWEN3_32B,
    Transformer,
)
from minicache.palette import GRID, INK, PALETTE, Scheme, color
from scripts.figures.style import TYPE_SIZE, Diagram, draw, plot

SMALL = TYPE_SIZE * 0.9
LINES = (("generated", "-", "o"), ("end", "--", "s"), ("shared", "-.", "^"), ("wasted", ":", "D"))
"""Role, dash and marker of the first, second, … line: colour is never the only difference."""


def main() -> None:
    """Draw them all."""
    draw("kv-heads", heads, size=(7.2, 4.0))
    draw("kv-bytes-per-token", bytes_per_token, size=(7.2, 3.0))
    draw("a100-memory", memory, size=(7.2, 2.6))
    draw("concurrent-sequences", concurrency, size=(7.2, 3.8))
    draw("bytes-and-flops", bytes_and_flops, size=(6.2, 3.0))
    draw("roofline", roofline, size=(7.2, 4.0))
    draw("intensity-by-batch", intensity_by_batch, size=(7.2, 3.8))


def intensity(model: Transformer, num_new_tokens: int, context_len: int, batch_size: int) -> float:
    """FLOP/byte of a step in two-byte numbers."""
    flops = step_flops(model, num_new_tokens, context_len, batch_size)
    return arithmetic_intensity(flops, step_bytes(model, num_new_tokens, context_len, batch_size))


def heads(figure: Figure, scheme: Scheme) -> None:
    """Eight query heads above what a layer caches for one token, in four kinds of attention."""
    diagram = Diagram(figure, scheme, width=18, height=10)
    corners = ((0.5, 0.2), (9.5, 0.2), (0.5, 5.2), (9.5, 5.2))
    kinds = (
        ("Multi-head: 8 keys, 8 values", 8),
        ("Grouped-query: 2 keys, 2 values", 2),
        ("Multi-query: 1 key, 1 value", 1),
        ("Latent: 1 latent, 1 RoPE key", 0),
    )
    for (x, y), (title, kv_heads) in zip(corners, kinds, strict=True):
        diagram.text(x, y + 0.4, title, bold=True)
        diagram.row(x, y + 0.9, ["q"] * 8, [None] * 8)
        middles = [x + 4.0] if kv_heads == 0 else [x + 8 / kv_heads * (head + 0.5) for head in range(kv_heads)]
        for query in range(8):
            owner = middles[query * len(middles) // 8]
            diagram.axes.plot([x + query + 0.5, owner], [y + 1.95, y + 2.75], color=GRID[scheme], linewidth=1.4)
        role = "generated" if kv_heads == 8 else "shared"
        if kv_heads == 0:
            diagram.cell(x + 1.5, y + 2.8, "latent", role, width=3.6)
            diagram.cell(x + 5.2, y + 2.8, "RoPE", role, width=1.4, fontsize=SMALL)
        for middle in middles if kv_heads else []:
            diagram.cell(middle - 0.5, y + 2.8, "k", role, height=0.75)
            diagram.cell(middle - 0.5, y + 3.5, "v", role, height=0.75)


def bytes_per_token(figure: Figure, scheme: Scheme) -> None:
    """KiB that a token leaves in the cache, for published models in two-byte numbers."""
    models = {
        "OPT-13B (MHA, 40 of 40)": OPT_13B,
        "Llama-3-70B (GQA, 8 of 64)": LLAMA_3_70B,
        "Qwen3-32B (GQA, 8 of 64)": QWEN3_32B,
        "Qwen3-8B (GQA, 8 of 32)": QWEN3_8B,
        "Llama-3-8B (GQA, 8 of 32)": LLAMA_3_8B,
        "DeepSeek-V3 (MLA)": DEEPSEEK_V3,
    }
    sizes = [cache_bytes_per_token(model) / 1024 for model in models.values()]
    shades = [color("generated" if "MHA" in name else "shared", scheme) for name in models]
    axes = plot(figure, xlabel="KiB per token, 16-bit cache")
    bars = axes.barh(list(models), sizes, color=shades, height=0.62)
    axes.bar_label(bars, [f"{size:,.4g}" for size in sizes], padding=4, color=INK[scheme])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 900)


def memory(figure: Figure, scheme: Scheme) -> None:
    """An A100-40GB with OPT-13B and with Llama-3-8B: weights, the rest, and the cache."""
    rest = A100_40GB.memory_bytes - weight_bytes(OPT_13B.num_parameters) - 12 * GIB
    on_cache = PALETTE["shared"].on_light if scheme == "light" else PALETTE["shared"].on_dark
    axes = plot(figure, xlabel="GiB of 40")
    for row, (name, model) in enumerate({"OPT-13B": OPT_13B, "Llama-3-8B": LLAMA_3_8B}.items()):
        weights = weight_bytes(model.num_parameters)
        left = A100_40GB.memory_bytes - weights - rest
        tokens = cache_capacity_tokens(
            A100_40GB.memory_bytes, weights, cache_bytes_per_token(model), reserved_bytes=rest
        )
        at = 0.0
        for label, nbytes, fill, text in (
            (f"weights\n{weights / GIB:.1f} GiB", weights, GRID[scheme], INK[scheme]),
            (f"other\n{rest / GIB:.1f}", rest, "none", INK[scheme]),
            (f"cache {left / GIB:.1f} GiB\n{tokens:,} tokens", left, color("shared", scheme), on_cache),
        ):
            width = nbytes / GIB
            axes.barh(name, width, left=at, color=fill, edgecolor=GRID[scheme], height=0.66)
            axes.text(at + width / 2, row, label, color=text, ha="center", va="center", size=SMALL)
            at += width
    axes.invert_yaxis()
    axes.grid(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 40)


def concurrency(figure: Figure, scheme: Scheme) -> None:
    """Sequences that fit on an A100-80GB against their length, a tenth of the memory reserved."""
    axes = plot(figure, xlabel="tokens per sequence", ylabel="sequences at once, A100-80GB")
    lengths = [2**exponent for exponent in range(9, 18)]
    models = {"Llama-3-8B": LLAMA_3_8B, "Qwen3-8B": QWEN3_8B, "OPT-13B": OPT_13B, "Qwen3-32B": QWEN3_32B}
    for (name, model), (role, dash, marker) in zip(models.items(), LINES, strict=True):
        capacity = cache_capacity_tokens(
            A100_80GB.memory_bytes,
            weight_bytes(model.num_parameters),
            cache_bytes_per_token(model),
            reserved_bytes=A100_80GB.memory_bytes // 10,
        )
        fits = [max_concurrent_sequences(capacity, length) for length in lengths]
        # A logarithmic axis has no 0: the line ends where the last sequence fits.
        shown = [(length, count) for length, count in zip(lengths, fits, strict=True) if count]
        axes.plot(*zip(*shown, strict=True), dash, marker=marker, color=color(role, scheme), label=name)
    logarithmic(axes)
    axes.legend()


def bytes_and_flops(figure: Figure, scheme: Scheme) -> None:
    """Four steps of Llama-3-8B: the bytes of each, weights and caches, and its FLOPs next to them."""
    steps = {  # name → new tokens, tokens in the cache, sequences
        "decode,\n1 sequence": (1, 0, 1),
        "decode,\n32 sequences": (1, 1000, 32),
        "decode,\n256 sequences": (1, 1000, 256),
        "prefill,\n2,048 tokens": (2048, 0, 1),
    }
    weights = weight_bytes(LLAMA_3_8B.num_parameters) / 1e9
    moved, worked = figure.subplots(1, 2, sharey=True)
    for row, step in enumerate(steps.values()):
        total, flops = step_bytes(LLAMA_3_8B, *step) / 1e9, step_flops(LLAMA_3_8B, *step)
        moved.barh(row, weights, color=GRID[scheme], height=0.62, label="weights")
        moved.barh(row, total - weights, left=weights, color=color("shared", scheme), height=0.62, label="caches")
        worked.barh(row, flops / 1e12, color=color("prompt" if step[0] > 1 else "generated", scheme), height=0.62)
        ratio = intensity(LLAMA_3_8B, *step)
        is_prefill = step[0] > 1  # its bar is long: the words are on it
        ink, at = (PALETTE["prompt"].on_light, 0.0) if is_prefill else (INK[scheme], flops / 1e12)
        words = f"{ratio:,.0f} FLOP/byte" if ratio > 100 else f"{ratio:#.3g} FLOP/byte"
        worked.annotate(words, (at, row), xytext=(6, 0), textcoords="offset points", va="center", color=ink)
    moved.set(yticks=range(len(steps)), yticklabels=steps, xlabel="GB read and written", xlim=(0, 55))
    worked.set(xlabel="TFLOP computed", xlim=(0, 38))
    for axes in (moved, worked):
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    moved.invert_yaxis()
    handles, names = moved.get_legend_handles_labels()
    moved.legend(handles[:2], names[:2], loc="lower right")


def roofline(figure: Figure, scheme: Scheme) -> None:
    """The A100's roof, and where prefill and decode of Llama-3-8B lie under it."""
    axes = plot(figure, xlabel="arithmetic intensity, FLOP/byte", ylabel="attainable TFLOP/s")
    ridge = ridge_point(A100_40GB)
    across = [0.3, ridge, 5000.0]
    axes.plot(across, [attainable_flops(A100_40GB, x) / 1e12 for x in across], color=INK[scheme], linewidth=1.6)
    axes.axvline(ridge, color=GRID[scheme], linestyle="--", linewidth=1.2)
    axes.text(ridge * 1.08, 0.62, f"ridge {ridge:.0f}", size=SMALL)
    axes.text(6, 1.4, "memory-bound:\n1.555 TB/s × intensity", size=SMALL, va="bottom")
    axes.text(700, 420, "compute-bound: 312 TFLOP/s", size=SMALL, va="bottom", ha="center")
    for batch in (1, 8, 64, 256):
        x = intensity(LLAMA_3_8B, 1, 512, batch)
        place(axes, scheme, "generated", "o", x, f"decode, batch {batch}", (-9, 7), "right")
    for tokens, offset, align in ((32, (11, -11), "left"), (512, (0, -20), "center"), (2048, (0, -20), "center")):
        x = intensity(LLAMA_3_8B, tokens, 0, 1)
        place(axes, scheme, "prompt", "s", x, f"prefill, {tokens:,}", offset, align)
    logarithmic(axes)
    axes.set(xlim=(0.3, 5000), ylim=(0.5, 1000))


def place(
    axes: Axes, scheme: Scheme, role: str, marker: str, x: float, label: str, offset: tuple[int, int], align: str
) -> None:
    """A point on the A100's roof, with its words `offset` points away."""
    y = attainable_flops(A100_40GB, x) / 1e12
    axes.plot([x], [y], marker, color=color(role, scheme), markeredgecolor=INK[scheme], markersize=9, zorder=3)
    axes.annotate(label, (x, y), xytext=offset, textcoords="offset points", size=SMALL, ha=align)


def intensity_by_batch(figure: Figure, scheme: Scheme) -> None:
    """Decode's intensity against the batch: the longer the context, the sooner it saturates."""
    axes = plot(figure, xlabel="batch size", ylabel="FLOP/byte of a decode step")
    batches = [2**exponent for exponent in range(13)]
    contexts = {"empty context": 0, "1,024 tokens": 1024, "8,192 tokens": 8192, "65,536 tokens": 65_536}
    for (name, context), (role, dash, marker) in zip(contexts.items(), LINES, strict=True):
        values = [intensity(LLAMA_3_8B, 1, context, batch) for batch in batches]
        axes.plot(batches, values, dash, marker=marker, markersize=5, color=color(role, scheme), label=name)
    ridge = ridge_point(A100_40GB)
    axes.axhline(ridge, color=INK[scheme], linewidth=1.4)
    axes.text(1, ridge * 1.15, f"A100-40GB's ridge, {ridge:.0f}", size=SMALL)
    logarithmic(axes)
    axes.set_ylim(0.7, 8000)
    axes.legend(loc="upper left")


def logarithmic(axes: Axes) -> None:
    """Logarithmic axes with plain numbers on them."""
    axes.set(xscale="log", yscale="log")
    plain = FuncFormatter(lambda value, _position: f"{value:,g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    axes.minorticks_off()
