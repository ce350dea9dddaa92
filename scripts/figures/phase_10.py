"""The figures of phase 10: two threads, admission, a client that leaves, latencies, costs, an event's bytes.

The event's bytes are those that `sse_event` writes. Latencies and costs are drawn from
benchmarks/results/serving_http.json and serving_overhead.json; the rest is drawn by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from minicache.palette import GRID, INK, Scheme, color
from minicache.serving.http.streaming import sse_event
from scripts.figures.style import TYPE_SIZE, Diagram, draw

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = TYPE_SIZE * 0.85


def main() -> None:
    """Draw them all."""
    draw("phase-10-two-threads", two_threads, size=(7.2, 3.6))
    draw("phase-10-who-calls", who_calls, size=(6.2, 3.3))
    draw("phase-10-line", line, size=(7.2, 3.48))
    draw("phase-10-disconnect", disconnect, size=(6.2, 3.9))
    draw("phase-10-latency-rate", latency_against_rate, size=(7.2, 3.6))
    draw("phase-10-overhead", overhead, size=(7.2, 3.0))
    draw("phase-10-sse-bytes", event_bytes, size=(7.2, 3.6))


def results(name: str) -> dict[str, Any]:
    """A benchmark's results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


# --- theory 1: one thread owns the model ------------------------------------------------------------------------------


def two_threads(figure: Figure, scheme: Scheme) -> None:
    """Three steps: requests come in as commands, a step's chunks go out in one call, and a client leaves."""
    diagram = Diagram(figure, scheme, width=24, height=12)
    thread, loop, high = 2.4, 7.6, 1.4
    for y, words in ((thread, "the engine's\nthread"), (loop, "the event\nloop")):
        diagram.text(0.2, y + high / 2, words, bold=True)
    steps = ((6.2, "0, 1, 2", "0, 1, 2"), (11.0, "0, 1, 2", "0, 2"), (17.5, "0", "0"))  # 1 leaves during the second
    for x, who, to_whom in steps:
        diagram.cell(x, thread, f"step: {who}", "generated", width=4.4, height=high)
        end = x + 4.4
        diagram.arrow((end, thread + high + 0.1), (end + 0.4, loop - 0.1))
        diagram.cell(
            end + 0.1, loop, f"to {to_whom}", "shared", width=2.4 if "," in who else 1.5, height=high, fontsize=SMALL
        )
    for row, name in enumerate("012"):
        x = 3.1 + row * 0.85
        diagram.cell(x, loop, name, "prompt", width=0.85, height=high, fontsize=SMALL)
        diagram.cell(x + 0.5, thread, name, "prompt", width=0.85, height=high, fontsize=SMALL)
        diagram.arrow((x + 0.42, loop - 0.1), (x + 0.92, thread + high + 0.1))
    diagram.cell(13.3, loop, "1 leaves", "end", width=2.1, height=high, fontsize=SMALL)
    diagram.cell(15.5, thread, "abort 1", "end", width=1.9, height=high, fontsize=SMALL)
    diagram.arrow((14.3, loop - 0.1), (16.5, thread + high + 0.1))
    for x, words in ((3.1, "between steps:\nadd 0, 1, 2"), (15.5, "between steps:\n1 is gone, its blocks free")):
        diagram.text(x, thread - 1.1, words, fontsize=SMALL)
    diagram.text(6.3, 5.6, "commands go up", fontsize=SMALL)
    diagram.text(21.7, 5.6, "chunks come down,\none call a step", align="right", fontsize=SMALL)
    diagram.arrow((3.1, 9.8), (23.6, 9.8))
    diagram.text(23.6, 10.3, "time", align="right", fontsize=SMALL)
    roles = {
        "prompt": "a request",
        "generated": "a step of the model",
        "shared": "chunks to streams",
        "end": "a client leaves",
    }
    diagram.legend(roles, 0.4, 11.1, step=5.9, size=0.6)


def who_calls(figure: Figure, scheme: Scheme) -> None:
    """The functions of `AsyncEngine` in the event loop and in the thread, and the two ways across."""
    diagram = Diagram(figure, scheme, width=24, height=12.8)
    high, inner, outer = 1.5, 9.8, 16.0
    diagram.text(0.3, 0.6, "in the event loop", bold=True)
    diagram.text(outer, 0.6, "in the thread", bold=True)
    for ends in ((0.3, 1.5), (3.2, 6.4), (7.5, 9.9), (11.0, 12.5)):  # with room for what crosses
        diagram.axes.plot([12.9, 12.9], ends, color=GRID[scheme], linewidth=2.5)
    rows = {"prompt": 1.6, "shared": 5.4, "end": 8.9}
    diagram.cell(0.3, rows["prompt"], "add_request, leave", "prompt", width=7.2, height=high)
    diagram.arrow((7.6, rows["prompt"] + high / 2), (10.5, rows["prompt"] + high / 2))
    diagram.cell(10.6, rows["prompt"], "commands", "prompt", width=4.6, height=high)
    diagram.arrow((15.3, rows["prompt"] + high / 2), (outer - 0.1, rows["prompt"] + high / 2))
    diagram.cell(outer, rows["prompt"], "run: commands, step", "generated", width=7.7, height=high)
    for role, thread, loop, into in (("shared", "deliver", "dispatch", "put"), ("end", "fail_step", "fail", "fail")):
        middle = rows[role] + high / 2
        diagram.cell(outer, rows[role], thread, role, width=4.2, height=high)
        diagram.arrow((outer - 0.1, middle), (inner + 0.1, middle))
        diagram.cell(inner - 4.0, rows[role], loop, role, width=4.0, height=high)
        diagram.text(12.9, middle + 0.8, "call_in_loop", align="center")
        diagram.arrow((inner - 4.1, middle), (3.4, middle), into)
    diagram.arrow((17.6, rows["prompt"] + high + 0.1), (17.6, rows["shared"] - 0.1))
    diagram.text(18.0, 4.2, "chunks")
    diagram.arrow((22.0, rows["prompt"] + high + 0.1), (20.3, rows["end"] - 0.1))
    diagram.text(23.8, 7.7, "an error", align="right")
    diagram.cell(0.3, rows["shared"], "stream", None, width=3.0, height=rows["end"] - rows["shared"] + high)
    diagram.arrow((1.8, rows["end"] + high + 0.1), (1.8, 11.7))
    diagram.text(0.3, 12.2, "a client reads: take")


# --- theory 2: admission ----------------------------------------------------------------------------------------------


def line(figure: Figure, scheme: Scheme) -> None:
    """Two batch slots and two waiting slots: four are admitted, the fifth is refused; then a slot is free."""
    diagram = Diagram(figure, scheme, width=24, height=11.6)
    width, high, left, wall = 1.9, 1.7, 4.6, 13.2
    middle = left + 2 * width + 0.5
    diagram.text(left, 0.9, "2 batch slots", bold=True)
    diagram.text(middle, 0.9, "2 waiting slots", bold=True)
    rows: tuple[tuple[float, str, list[str], list[str]], ...] = (
        (1.7, "all slots\nare taken", ["1", "2"], ["3", "4"]),
        (5.4, "1 has finished,\n3 runs", ["2", "3"], ["4", ""]),
    )
    for y, words, seated, waiting in rows:
        diagram.text(0.3, y + high / 2, words)
        diagram.row(left, y, seated, ["generated"] * 2, width=width, height=high)
        diagram.row(middle, y, waiting, ["prompt" if each else "free" for each in waiting], width=width, height=high)
        diagram.axes.plot([wall, wall], [y - 0.4, y + high + 0.4], color=INK[scheme], linewidth=3)
    _turned_away(diagram, 1.7, wall, "5", "429, Retry-After")
    _turned_away(diagram, 5.4, wall, "n = 2", "429: it needs two slots")
    diagram.cell(wall + 1.7, 7.9, "6", "prompt", width=width, height=high)
    diagram.arrow((wall + 1.6, 7.9 + high / 2), (middle + 1.6 * width, 5.4 + high + 0.15))
    diagram.text(wall + 4.0, 7.9 + high / 2, "admitted", bold=True)
    roles = {
        "generated": "in the batch",
        "prompt": "waiting",
        "end": "refused",
        "free": "free",
    }
    for (role, meaning), x in zip(roles.items(), (0.3, 8.0, 15.5, 19.6), strict=True):
        diagram.legend({role: meaning}, x, 10.6, size=0.6)


def _turned_away(diagram: Diagram, y: float, wall: float, name: str, words: str) -> None:
    """A request that is refused."""
    diagram.cell(wall + 1.7, y, name, "end", width=1.9, height=1.7)
    diagram.arrow((wall + 1.6, y + 0.85), (wall + 0.2, y + 0.85))
    diagram.text(wall + 4.0, y + 0.85, words, bold=True)


# --- theory 3: who leaves ---------------------------------------------------------------------------------------------


def disconnect(figure: Figure, scheme: Scheme) -> None:
    """A client closes: the listening task, the working task, and the engine's thread, one after the other."""
    diagram = Diagram(figure, scheme, width=24, height=15.1)
    left, high = 4.6, 1.5
    rows = {"client": 0.5, "task that\nlistens": 3.5, "task that\nworks": 6.5, "engine's\nthread": 10.3}
    for name, y in rows.items():
        diagram.text(0.2, y + high / 2, name, bold=True)
    client, listens, works, thread = rows.values()
    diagram.cell(left, client, "reads five tokens", "shared", width=6.4, height=high)
    diagram.cell(11.1, client, "closes", "end", width=2.8, height=high)
    diagram.cell(left, listens, "waits in receive()", None, width=7.5, height=high)
    diagram.cell(12.2, listens, "http.disconnect", "end", width=6.2, height=high)
    diagram.cell(left, works, "waits for the next token", None, width=9.9, height=high)
    diagram.cell(14.6, works, "CancelledError, close()", "end", width=9.0, height=high)
    diagram.text(23.6, works + high + 0.6, "admission slots are free", align="right")
    for x, width, role, words in (
        (left, 5.2, "generated", "step"),
        (9.9, 5.2, "generated", "step"),
        (15.2, 2.8, "end", "abort"),
        (18.1, 5.5, "generated", "step"),
    ):
        diagram.cell(x, thread, words, role, width=width, height=high)
    diagram.text(23.6, thread + high + 0.6, "blocks and batch slot are free", align="right")
    diagram.arrow((12.5, client + high + 0.1), (13.4, listens - 0.1))
    diagram.arrow((15.6, listens + high + 0.1), (16.4, works - 0.1))
    diagram.arrow((15.0, works + high + 0.1), (15.7, thread - 0.1))
    diagram.text(14.8, 9.1, "a command", align="right")
    diagram.arrow((left, 13.6), (23.6, 13.6))
    diagram.text(23.6, 14.3, "time", align="right")


# --- theory 5: what to measure ----------------------------------------------------------------------------------------


def latency_against_rate(figure: Figure, scheme: Scheme) -> None:
    """TTFT and TPOT, p50 and p99, against the rate: measured and predicted."""
    found = results("serving_http")
    rates = found["rates"]
    panels = figure.subplots(1, 2)
    titles = {"ttft": "time to first token, ms", "tpot": "time per output token, ms"}
    for axes, (what, title) in zip(panels, titles.items(), strict=True):
        for statistic, role, marker in (("p50", "generated", "o"), ("p99", "end", "s")):
            for source, style in (("measured", "-"), ("predicted", "--")):
                axes.plot(
                    [each["rate"] for each in rates],
                    [each[source][f"{what}_{statistic}_ms"] for each in rates],
                    style,
                    marker=marker,
                    markersize=5,
                    markerfacecolor=color(role, scheme) if source == "measured" else "none",
                    color=color(role, scheme),
                    linewidth=1.6,
                    label=f"{statistic} {source}",
                )
        axes.axvline(found["requests_per_second_at_most"], color=INK[scheme], linestyle=":", linewidth=1.4)
        axes.set(xlabel="requests a second", xlim=(0, None))
        axes.set_title(title, fontsize=TYPE_SIZE)
    panels[0].set_yscale("log")
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_major_formatter("{x:,.0f}")
    panels[0].minorticks_off()
    panels[1].set_ylim(0, None)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=SMALL)


# --- theory 1 and 5: what it costs ------------------------------------------------------------------------------------


def overhead(figure: Figure, scheme: Scheme) -> None:
    """A step's time at 1, 16 and 64 requests of three models: what the model takes is 1, the rest engine and server."""
    found = results("serving_overhead")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    names = {"minigpt": "MiniGPT", "llama": "random Llama", "smollm2": "SmolLM2"}
    for axes, (name, title) in zip(panels, names.items(), strict=True):
        batches = found[name]["batches"]
        for row, told in enumerate(batches.values()):
            added = told["server_over_model"]  # below 0 if the server was the faster: noise
            axes.barh(row, min(1.0, 1 + added), color=color("generated", scheme), height=0.62)
            axes.barh(row, max(0.0, added), left=1.0, color=color("end", scheme), height=0.62)
            axes.annotate(
                f"{added:+.0%}",
                (0.99, row),
                xycoords=("axes fraction", "data"),
                va="center",
                ha="right",
            )
        axes.axvline(1 + found["goal"], color=INK[scheme], linestyle="--", linewidth=1.2)
        axes.set(
            yticks=range(len(batches)),
            yticklabels=[f"{batch} requests" if batch != "1" else "1 request" for batch in batches],
        )
        axes.set_title(f"{title}, {found[name]['num_parameters'] / 1e6:.1f} M", fontsize=TYPE_SIZE)
        axes.grid(visible=False, axis="y")
    panels[0].invert_yaxis()
    panels[0].set(xlim=(0, 2.1), xticks=(0, 1, 2))
    panels[1].set_xlabel("time of a step, the model alone = 1")
    parts = {"model": "generated", "engine and server": "end"}
    handles = [Patch(color=color(role, scheme), label=name) for name, role in parts.items()]
    goal = Line2D([], [], color=INK[scheme], linestyle="--", linewidth=1.2, label="the goal, for 64 requests")
    figure.legend(handles=[*handles, goal], loc="outside lower center", ncols=4)


# --- theory 4: events over HTTP ---------------------------------------------------------------------------------------


def event_bytes(figure: Figure, scheme: Scheme) -> None:
    """One event on the wire, a chunk of HTTP around it; a cell for each byte, and what each of the parts is for."""
    event = sse_event('{"text": " saw"}')
    chunk = f"{len(event):x}".encode() + b"\r\n" + event + b"\r\n"
    parts = (
        ("free", len(f"{len(event):x}") + 2, "how many bytes the event has, in hex, and CR LF: HTTP's chunk begins"),
        ("prompt", len("data: "), "the field of an event that carries data"),
        ("generated", len(event) - len("data: ") - 2, "JSON, in one line"),
        ("end", 2, "LF ends the line, LF again ends the event: now the client acts on it"),
        ("free", 2, "CR LF: HTTP's chunk ends. The client's HTTP library takes it away"),
    )
    roles = [role for role, count, _ in parts for _ in range(count)]
    assert len(roles) == len(chunk)
    diagram = Diagram(figure, scheme, width=24, height=12)
    width, per_row = 1.4, 16
    shown = {"\r": "CR", "\n": "LF", " ": "␣"}
    for place, (byte, role) in enumerate(zip(chunk, roles, strict=True)):
        x, y = 0.8 + place % per_row * width, 0.6 + place // per_row * 2.6
        letter = chr(byte)
        diagram.cell(
            x,
            y,
            shown.get(letter, letter),
            role,
            width=width,
            height=1.3,
            fontsize=SMALL if letter in "\r\n" else TYPE_SIZE,
        )
        diagram.text(x + width / 2, y + 1.75, f"{byte:02x}", align="center", fontsize=TYPE_SIZE * 0.75)
    for row, (role, _, words) in enumerate(parts):
        y = 5.9 + row * 1.15
        diagram.cell(0.8, y, "", role, width=0.7, height=0.7)
        diagram.text(1.9, y + 0.35, words, fontsize=TYPE_SIZE * 0.9)


if __name__ == "__main__":
    main()
