"""The moving picture of the home page: six requests under static and continuous batching, step by step.

The runs are those of phase 5's grids. The SVG moves by its own style sheet: what a step adds has a class, and the
class becomes visible when its step comes. A reader who asked for less motion sees the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minicache.palette import INK, PALETTE, Scheme, color
from minicache.trace import TraceStep
from scripts.browser.playground.workloads import SIX
from scripts.figures import labels
from scripts.figures.phase_05 import SLOTS, role_of, run_six, slots_of, utilisation
from scripts.figures.style import FIGURES, SCHEMES

SECONDS, PAUSE = 0.7, 6
"""Of a step; and how many steps the end is shown for before it begins anew."""

WIDTH, HEIGHT, LEFT, CELL, TALL = 720, 316, 118, 34, 26
"""Of the picture; the left edge of the grids; the size of a cell. In pixels."""


def main() -> None:
    """Draw it, in both schemes and both languages."""
    runs = {name: run_six(name)[0] for name in ("static", "continuous")}
    for scheme in SCHEMES:
        for lang, say in (("", str), (".es", labels.spanish)):
            picture = moving(runs, scheme, say)
            (FIGURES / f"batching-moving{lang}.{scheme}.svg").write_text(picture, encoding="utf-8")


def moving(runs: dict[str, list[TraceStep]], scheme: Scheme, say: Callable[[str], str]) -> str:
    """The whole picture: a grid for each scheduler, and one clock for both; `say` puts its words into a language."""
    num_steps = max(map(len, runs.values()))
    shares = [100 * (step + 1) / (num_steps + 1 + PAUSE) for step in range(num_steps + 1)]
    appear = "\n".join(
        f".{kind}{step} {{ animation-name: {kind}{step}; }} "
        f"@keyframes {kind}{step} {{ 0% {{ opacity: {before}; }} {share:.2f}% {{ opacity: {1 - before}; }} }}"
        for step, share in enumerate(shares)
        for kind, before in (("s", 0), ("g", 1))
    )
    lasts = f"{SECONDS * (num_steps + 1 + PAUSE):.1f}s"
    roles = "\n".join(
        f".{role} {{ fill: {color(role, scheme)}; }} .on-{role} {{ fill: {_on(role, scheme)}; }}"
        for role in ("prompt", "generated", "end", "wasted", "free")
    )
    grids = "\n".join(_grid(name, steps, 14 + row * 146, say) for row, (name, steps) in enumerate(runs.items()))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">
<style>
rect {{ shape-rendering: crispEdges; }}
text {{ font: 14px "DejaVu Sans", Verdana, sans-serif; fill: {INK[scheme]}; }}
.bold {{ font-weight: bold; }}
.name {{ text-anchor: middle; font-weight: bold; }}
{roles}
.moves {{ animation-duration: {lasts}; animation-timing-function: step-end; animation-iteration-count: infinite; }}
.goes {{ opacity: 0; }}
{appear}
@media (prefers-reduced-motion: reduce) {{ .moves {{ animation: none; }} }}
</style>
{grids}
{_legend(HEIGHT - 18, say)}
</svg>
"""


def _grid(name: str, steps: Sequence[TraceStep], y: int, say: Callable[[str], str]) -> str:
    """A scheduler's name and queue, a row for each slot, and what came of it."""
    slots = slots_of(steps)
    admitted = {request: next(n for n, step in enumerate(steps) if role_of(step, request)) for request in SIX}
    shapes = [_words(LEFT, y + 14, say(f"{name} batching"), "bold")]
    waiting = [request for request in SIX if admitted[request] > 0]
    shapes.append(f'<g class="moves goes g{max(admitted.values())}">{_words(LEFT + 210, y + 14, say("waiting:"))}</g>')
    for place, request in enumerate(waiting):
        shapes.append(_cell("free", LEFT + 285 + place * 40, y, request, f"moves goes g{admitted[request]}"))
    top = y + 28
    for slot in range(SLOTS):
        shapes.append(_words(12, top + slot * TALL + 18, say(f"batch slot {slot + 1}")))
        for column, step in enumerate(steps):
            here = next((str(each.request_id) for each in step.batch if slots[each.request_id] == slot), "")
            role = (role_of(step, here) if here else None) or "wasted"
            shapes.append(_cell(role, LEFT + column * CELL, top + slot * TALL, here, f"moves s{column}"))
    told = say(f"{len(steps)} steps, {utilisation(steps, SLOTS):.0%} of the slots used")
    shapes.append(_words(LEFT + 285, y + 14, told, f"bold moves s{len(steps)}"))
    return "\n".join(shapes)


def _legend(y: int, say: Callable[[str], str]) -> str:
    words = {"prompt": "its prompt", "generated": "a token", "end": "the last token", "wasted": "an idle slot"}
    return "".join(
        f'<rect class="{role}" x="{LEFT + place * 148}" y="{y - 12}" width="16" height="14"/>'
        + _words(LEFT + 22 + place * 148, y, say(name))
        for place, (role, name) in enumerate(words.items())
    )


def _on(role: str, scheme: Scheme) -> str:
    """The colour of letters on a role's shade."""
    return PALETTE[role].on_light if scheme == "light" else PALETTE[role].on_dark


def _cell(role: str, x: int, y: int, label: str, kind: str) -> str:
    box = f'<rect class="{role}" x="{x}" y="{y}" width="{CELL - 2}" height="{TALL - 2}"/>'
    letter = f'<text class="name on-{role}" x="{x + CELL / 2 - 1}" y="{y + 17}">{label}</text>' if label else ""
    return f'<g class="{kind}">{box}{letter}</g>'


def _words(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{words}</text>'


if __name__ == "__main__":
    main()
