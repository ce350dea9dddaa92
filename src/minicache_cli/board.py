"""The board of the arena: score files as one static page, with the policies next to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from gettext import gettext as _
from html import escape
from io import StringIO
from itertools import groupby
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minicache.palette import GRID, INK, Scheme, color
from minicache.plots import STYLE
from minicache_course.arena.record import read
from minicache_course.arena.workloads import WINDOW
from minicache_course.errors import CourseError
from minicache_course.language import in_use

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES: Final = 6
"""Policies of a plot, the best ones."""

ROLES: Final = ("generated", "end", "shared", "wasted", "prompt", "free")


def _colours(scheme: Scheme, paper: str) -> str:
    link = color("generated", scheme)
    return f":root {{ --ink: {INK[scheme]}; --line: {GRID[scheme]}; --link: {link}; --paper: {paper} }}\n"


CSS: Final = f"""\
:root {{ color-scheme: light dark }}
{_colours("light", "#ffffff")}
@media (prefers-color-scheme: dark) {{
  {_colours("dark", "#14171f")}
  .plot {{ filter: invert(1) hue-rotate(180deg) }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }}
body {{ max-width: 62rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }}
th, td {{ padding: .4rem .6rem; border-bottom: 1px solid var(--line); text-align: right }}
th:nth-child(2), td:nth-child(2) {{ text-align: left }}
a {{ color: var(--link) }}
.scroll {{ overflow-x: auto }}
.plot svg {{ max-width: 100%; height: auto }}
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the board.

    Attributes:
        record: the score file's content.
        policy: the file next to it of the same name, `ada.py` for `ada.json`, if it is the one that was scored.
    """

    record: dict[str, Any]
    policy: Path | None

    def shares(self) -> Iterator[tuple[str, float]]:
        """Of each workload, the mean share over its loads."""
        for name, cells in groupby(self.record["cells"], key=lambda cell: cell["workload"]):
            shares = [cell["share"] for cell in cells]
            yield name, fsum(shares) / len(shares)


def entries(folder: Path) -> list[Entry]:
    """The score files of a folder, the best first.

    Raises:
        CourseError: there is none, or a JSON file in it is none; or they are of several seeds, leagues or workloads.
    """
    from minicache_course.arena.score import digest

    found = []
    for file in sorted(folder.glob("*.json")):
        record, policy = read(file), file.with_suffix(".py")
        is_its = policy.is_file() and digest(policy.read_text(encoding="utf-8")) == record["policy"]
        found.append(Entry(record, policy if is_its else None))
    if not found:
        raise CourseError(
            _("{folder} has no score files: write some with `minicache arena run --out`").format(folder=folder)
        )
    loads = {
        (each.record["league"], each.record["seed"], *((c["workload"], c["rate"]) for c in each.record["cells"]))
        for each in found
    }
    if len(loads) > 1:
        raise CourseError(
            _("{folder} has scores of several leagues, seeds or workloads: make a board of each").format(folder=folder)
        )
    return sorted(found, key=lambda each: (-each.record["score"], each.record["author"]))


def write_board(folder: Path, out: Path, title: str) -> Path:
    """Write `index.html` and the policies into a folder.

    Returns:
        The page.

    Raises:
        CourseError: as `entries`.
        OSError: a file cannot be written.
    """
    found = entries(folder)
    policies = out / "policies"
    policies.mkdir(parents=True, exist_ok=True)
    for each in found:
        if each.policy is not None:
            shutil.copyfile(each.policy, policies / each.policy.name)
    page = out / "index.html"
    page.write_text(_page(found, title), encoding="utf-8")
    return page


def _page(found: Sequence[Entry], title: str) -> str:
    names = [name for name, _share in found[0].shares()]
    headings = ["", _("policy"), _("score"), *names, _("version")]
    rows = "\n".join(_row(number, each) for number, each in enumerate(found, start=1))
    about = _(
        "Requests that met the limits of their class, as a share of what no policy can exceed; the mean over all "
        "workloads and loads. Seed {seed}. To recompute a score: `minicache arena verify` with the policy's file."
    ).format(seed=found[0].record["seed"])
    language, plots = in_use(), _("Goodput against load")
    what = _("Goodput of the best policies against the load, a plot for each workload")
    return f"""<!doctype html>
<html lang="{language}">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<style>{CSS}</style>
<h1>{escape(title)}</h1>
<p>{escape(about)}</p>
<div class="scroll"><table>
<tr>{"".join(f'<th scope="col">{escape(each)}</th>' for each in headings)}</tr>
{rows}
</table></div>
<h2>{escape(plots)}</h2>
<div class="plot" role="img" aria-label="{escape(what)}">
{plot(found[:MOST_LINES])}
</div>
</html>
"""


def _row(number: int, entry: Entry) -> str:
    record = entry.record
    name = escape(record["author"])
    if entry.policy is not None:
        name = f'<a href="policies/{escape(entry.policy.name)}">{name}</a>'
    shares = [f"{share:.1%}" for _name, share in entry.shares()]
    cells = [f"{number}", f"{name} <small>{record['policy'][:8]}</small>", f"<b>{record['score']:.2f} %</b>", *shares]
    return "<tr>" + "".join(f"<td>{each}</td>" for each in (*cells, escape(record["version"]))) + "</tr>"


def plot(found: Sequence[Entry]) -> str:
    """The goodput of each entry against the load, as an SVG; the bound is dashed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**STYLE, "svg.hashsalt": "board", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        paint(figure, found)
        text = StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def paint(figure: Figure, found: Sequence[Entry]) -> None:
    """Draw a pair of axes for each workload."""
    names = [name for name, _share in found[0].shares()]
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        for place, entry in enumerate(found):
            cells = [cell for cell in entry.record["cells"] if cell["workload"] == name]
            rates = [cell["rate"] for cell in cells]
            if not place:
                bounds = [cell["bound"] / WINDOW for cell in cells]
                axes.plot(rates, bounds, "--", color=INK["light"], linewidth=1, label=_("bound"))
            goodputs = [cell["goodput"] for cell in cells]
            axes.plot(rates, goodputs, "o-", markersize=3, color=color(ROLES[place]), label=entry.record["author"])
        axes.set(title=name, xlabel=_("sessions per second"), ylim=(0, None))
    panels[0].set_ylabel(_("requests per second in their limits"))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
