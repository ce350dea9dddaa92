"""An executed notebook as a page of the site: its cells, what they printed, their pictures with words for each.

The notebook is read as the JSON that it is: nbformat and nbconvert take longer to import than all pages to build.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from PIL import ImageFont

from scripts.figures import labels


class NotebookError(Exception):
    """A notebook is stale, was never executed, or draws a picture without saying what it shows."""


INTRODUCTION = """
!!! note "This page is a notebook"
    It was executed from `notebooks/{name}.py`. [Download it]({name}.ipynb), or run it yourself from the root of the
    repository: `.venv/bin/jupyter lab notebooks/{name}.ipynb`.
"""

INTRODUCTION_ES = """
!!! note "Esta página es un cuaderno"
    Se ejecutó a partir de `notebooks/{name}.py`. [Descárgalo]({name}.ipynb) (en inglés), o ejecútalo desde la raíz del
    repositorio: `.venv/bin/jupyter lab notebooks/{name}.ipynb`.
"""

_RIGHT_ALIGNED = re.compile(r'font-size: ([\d.]+)px[^>]*text-anchor: end[^>]* x="([\d.]+)"[^>]*>([^<]+)</text>')
_SIZE = re.compile(r'width="([\d.]+)pt" height="([\d.]+)pt" viewBox="[^"]*"')
_PART = re.compile(r"^%% (text|alt)\n", re.MULTILINE)


def render(path: Path, spanish: str | None = None) -> dict[str, str]:
    """An executed notebook as a page.

    Args:
        path: of the notebook.
        spanish: its words in Spanish: after a line `%% text` those of a Markdown cell, after `%% alt` those for a
            cell's picture, in the order of the cells.

    Returns:
        File name → content: `notebook.md`, and the pictures that it shows.

    Raises:
        NotebookError: a picture has no alt text, an output is neither printed text nor an SVG, `spanish` has other
            cells than the notebook, or a picture has words without an entry in `docs/es/figures.po`.
    """
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    if spanish is not None:
        _translate(cells, spanish)
    pictures: dict[str, str] = {}
    title, _, question = "".join(cells[0]["source"]).partition("\n")
    # A page's first screen is the question and its picture; what drew it comes after.
    opening = list(_parts(cells[1], 1, pictures))
    shown = [part for part in opening if part.startswith("\n![")]
    drawn_by = [part for part in opening if part not in shown]
    body = [part for place, cell in enumerate(cells[2:], start=2) for part in _parts(cell, place, pictures)]
    introduction = INTRODUCTION if spanish is None else INTRODUCTION_ES
    parts = (question, *shown, introduction.format(name=path.stem), *drawn_by, *body)
    if spanish is not None:
        pictures = {name: _in_spanish(picture) for name, picture in pictures.items()}
    page = f"---\nrender_macros: false\n---\n{title}\n" + "\n".join(parts)
    return {"notebook.md": page, **pictures}


def _translate(cells: list[Any], spanish: str) -> None:
    _, *pieces = _PART.split(spanish)
    given = list(zip(pieces[::2], (piece.strip() for piece in pieces[1::2]), strict=True))
    takers = [("text" if cell["cell_type"] == "markdown" else "alt", cell) for cell in cells if _has_words(cell)]
    if [kind for kind, _ in given] != [kind for kind, _ in takers]:
        wanted, found = (" ".join(kind for kind, _ in each) for each in (takers, given))
        raise NotebookError(f"the notebook's cells are {wanted}; the Spanish ones are {found}")
    for (_, words), (kind, cell) in zip(given, takers, strict=True):
        if kind == "text":
            cell["source"] = [words]
        else:
            cell["metadata"]["alt"] = words


def _in_spanish(picture: str) -> str:
    if missing := labels.missing_in(picture):
        entries = "".join(f'\nmsgid "{entry}"' for entry in missing)
        raise NotebookError(f"a plot has words without Spanish in docs/es/figures.po:{entries}")
    return _widened(labels.in_svg(picture))


def _widened(picture: str) -> str:
    """An SVG with room on its left for names of bars that became longer."""
    texts = _RIGHT_ALIGNED.findall(picture)
    starts = (float(x) - float(size) / 100 * _font().getlength(unescape(text)) for size, x, text in texts)
    left = min(starts, default=0.0) - 4
    if left >= 0:
        return picture
    return _SIZE.sub(
        lambda size: (
            f'width="{float(size[1]) - left}pt" height="{size[2]}pt" '
            f'viewBox="{left} 0 {float(size[1]) - left} {size[2]}"'
        ),
        picture,
        count=1,
    )


@cache
def _font() -> ImageFont.FreeTypeFont:
    """The font of plots."""
    return ImageFont.truetype(Path(mpl.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), 100)


def _has_words(cell: Any) -> bool:
    return cell["cell_type"] == "markdown" or "alt" in cell["metadata"]


def _parts(cell: Any, place: int, pictures: dict[str, str]) -> Iterator[str]:
    """A cell as Markdown, then its outputs; its pictures are added to `pictures`."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        yield f"\n{source}\n"
        return
    yield f"\n```python\n{source}\n```\n"
    for number, output in enumerate(cell["outputs"]):
        if output["output_type"] == "stream":
            yield _fenced("".join(output["text"]))
        elif "image/svg+xml" in (data := output.get("data", {})):
            name = f"notebook_{place}_{number}.svg"
            pictures[name] = "".join(data["image/svg+xml"])
            yield f"\n![{_alt(cell, source)}]({name}){{ .notebook-plot loading=lazy }}\n"
        elif set(data) == {"text/plain"}:
            yield _fenced("".join(data["text/plain"]))
        else:
            raise NotebookError(f"this cell's {output['output_type']} cannot be shown on a page\n{source}")


def _fenced(text: str) -> str:
    """Printed text, without terminal colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()
    return f"\n```{{ .text .output }}\n{plain}\n```\n"


def _alt(cell: Any, source: str) -> str:
    """What a cell's picture shows."""
    text = cell["metadata"].get("alt", "").strip()
    if not text:
        raise NotebookError(f'this cell draws a picture: say what it shows, # %% alt="…"\n{source}')
    return str(text)
