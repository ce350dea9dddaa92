"""The demo's first half: what a KV cache is for. Full recomputation and the dense cache: same tokens, two speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from gettext import gettext as _
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from minicache.errors import MinicacheError
from minicache.palette import color
from minicache.plots import save_plot
from minicache_cli.show import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minicache.grammar import Tokenizer
    from minicache.model import MiniGPT

WAYS = {"recompute": "wasted", "KV cache": "generated"}
"""Way of decoding → its colour role."""


@dataclass(frozen=True)
class Run:
    """One prompt decoded in one way: the new token ids, and the seconds that each took."""

    token_ids: list[int]
    seconds: list[float]


def show(
    model: MiniGPT, tokenizer: Tokenizer, texts: Sequence[str], max_seq_len: int, out: Path, console: Console
) -> None:
    """Complete `texts` in both ways, print what came out and how long it took, and save the plot in `out`.

    Raises:
        MinicacheError: the two ways disagree about a token.
    """
    prompts = [tokenizer.encode(text) for text in texts]
    runs = _decode_all(model, prompts, max_seq_len, console)
    for text, recomputed, cached in zip(texts, *runs.values(), strict=True):
        if recomputed.token_ids != cached.token_ids:
            message = _("{text!r}: the cache changed the tokens. That is a bug: please report it.")
            raise MinicacheError(message.format(text=text))

    by_position = {way: _median_by_position(prompts, way_runs) for way, way_runs in runs.items()}
    console.print(_completions(tokenizer, prompts, runs["KV cache"]))
    console.print(Text.from_ansi(_terminal_plot(by_position, console.width)))
    seconds = {way: sum(sum(run.seconds) for run in way_runs) for way, way_runs in runs.items()}
    console.print(_totals(model, prompts, runs, seconds, by_position))
    console.print(f"[bold]{verdict(seconds['recompute'] / seconds['KV cache'])}[/]")
    plot, title = out / "time_per_token.png", "One more token: computed from scratch, or with a KV cache"
    save_plot(partial(_plot, by_position=by_position), title, plot)
    console.print(_("Plot: {file}").format(file=f"[bold]{plot}[/]"), soft_wrap=True)


def _decode_all(model: MiniGPT, prompts: list[list[int]], max_seq_len: int, console: Console) -> dict[str, list[Run]]:
    """Decode every prompt in both ways up to `max_seq_len` tokens. After the end of a text the next one begins."""
    import torch

    from minicache.cache.dense import KVCache
    from minicache.engine.decoding import decode
    from minicache.engine.timing import timed

    config = model.config
    cache = KVCache(config.num_layers, 1, config.num_kv_heads, max_seq_len, config.head_dim)
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    columns = (TextColumn("{task.description:<10}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bars = {
            way: progress.add_task(_name(way), total=sum(max_seq_len - len(ids) for ids in prompts)) for way in WAYS
        }
        for prompt, way in product(prompts, WAYS):  # in turns: a busy moment of the machine meets both
            cache.reset()
            way_cache = cache if way == "KV cache" else None
            run = Run([], [])
            for token, seconds in timed(
                decode(model, torch.tensor([prompt]), max_seq_len - len(prompt), cache=way_cache)
            ):
                run.token_ids.append(int(token))
                run.seconds.append(seconds)
                progress.advance(bars[way])
            runs[way].append(run)
    return runs


def _name(way: str) -> str:
    return {"recompute": _("recompute"), "KV cache": _("KV cache")}[way]


def _median_by_position(prompts: list[list[int]], runs: list[Run]) -> dict[int, float]:
    """Position of a generated token → milliseconds it took: the median over the prompts that reach it."""
    samples: dict[int, list[float]] = {}
    for prompt, run in zip(prompts, runs, strict=True):
        for step, seconds in enumerate(run.seconds):
            samples.setdefault(len(prompt) + step, []).append(seconds * 1e3)
    return {position: median(times) for position, times in sorted(samples.items())}


def _completions(tokenizer: Tokenizer, prompts: list[list[int]], runs: list[Run], num_shown: int = 8) -> Table:
    """The beginning of every completion: prompt and generated words in their colours."""
    table = Table(title=_("Same tokens both ways"), title_justify="left", show_header=False, box=None)
    for prompt, run in zip(prompts, runs, strict=True):
        given = tokenizer.decode(prompt)
        shown = tokenizer.decode(prompt + run.token_ids[:num_shown])
        line = Text(given, style=color("prompt", "dark"))
        line.append(shown[len(given) :], style=color("generated", "dark"))
        table.add_row(line.append(" …"), Text(_("{num} tokens").format(num=len(run.token_ids)), style="dim"))
    return table


def verdict(speed_up: float) -> str:
    """What the totals show: `speed_up` is the seconds of recomputation over those with the cache."""
    if round(speed_up, 1) > 1:
        return _("Same tokens, computed {speed_up:.1f} times as fast.").format(speed_up=speed_up)
    message = _("Same tokens, but no time was saved ({speed_up:.1f} ×): a cache pays when texts are longer.")
    return message.format(speed_up=speed_up)


def _totals(
    model: MiniGPT,
    prompts: list[list[int]],
    runs: dict[str, list[Run]],
    seconds: dict[str, float],
    by_position: dict[str, dict[int, float]],
) -> Table:
    """Seconds, positions that the model computed, cache bytes and the speed-up, a row a way."""
    from minicache.arithmetic.arithmetic import kv_bytes_per_token

    config = model.config
    last = max(by_position["KV cache"])
    token_nbytes = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, "float32")
    lengths = [(len(prompt), len(run.token_ids)) for prompt, run in zip(prompts, runs["KV cache"], strict=True)]
    computed = {
        "recompute": sum(p * n + n * (n - 1) // 2 for p, n in lengths),
        "KV cache": sum(p + n - 1 for p, n in lengths),
    }
    at_last = _("ms, token {last}").format(last=last)
    headings = ("", _("seconds"), at_last, _("positions"), _("KV bytes"), _("speed-up"))
    table = figures(*headings, caption=_("positions: computed by the model · KV bytes: per token in the cache"))
    for way, role in WAYS.items():
        table.add_row(
            Text(_name(way), style=color(role, "dark")),
            f"{seconds[way]:.2f}",
            f"{by_position[way][last]:.2f}",
            f"{computed[way]:,}",
            f"{token_nbytes:,}" if way == "KV cache" else "0",
            f"{seconds['recompute'] / seconds[way]:.1f} ×",
        )
    return table


def _terminal_plot(by_position: dict[str, dict[int, float]], width: int) -> str:
    """Milliseconds a token against position, drawn with characters."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(width, 100), 18)
    for way, role in WAYS.items():
        times = by_position[way]
        rgb = tuple(bytes.fromhex(color(role, "dark")[1:]))
        plotext.plot(list(times), list(times.values()), label=_name(way), color=rgb, marker="braille")
    last = max(max(times) for times in by_position.values())
    plotext.xticks(range(0, last + 1, max(1, round(last, -1) // 5)))  # left alone, it puts ticks at fractions
    plotext.title(_("ms per token against position"))
    return str(plotext.build())


def _plot(figure: Figure, by_position: dict[str, dict[int, float]]) -> None:
    """The same as a picture."""
    axes = figure.subplots()
    for way, role in WAYS.items():
        axes.plot(*zip(*by_position[way].items(), strict=True), label=way, color=color(role))
    axes.set(xlabel="position of the token", ylabel="milliseconds, median of the prompts", ylim=(0, None))
    axes.legend()
