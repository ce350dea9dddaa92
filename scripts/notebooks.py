"""The phases' notebooks: executed from their percent scripts, rendered as pages of the site.

    python scripts/notebooks.py execute            notebooks/*.py → notebooks/*.ipynb, outputs included
    python scripts/notebooks.py execute --check    run every notebook and write nothing; fails if an .ipynb is stale

The percent script is the source: edit it, or its .ipynb in Jupyter (jupytext keeps the pair in step). A cell that draws
a picture says what it shows, for those who cannot see it: `# %% alt="time per token against position: …"`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import jupytext
import nbformat
import typer
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from nbformat import NotebookNode
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
TIMEOUT = 1000
"""Seconds that one cell may take."""

app = typer.Typer(add_completion=False, help="Execute the notebooks from their percent scripts.")


class NotebookError(Exception):
    """A notebook is stale, was never executed, or draws a picture without saying what it shows."""


# --- executing ------------------------------------------------------------------------------------------------------


@app.callback()
def _keep_execute_a_word_of_its_own() -> None: ...


@app.command()
def execute(
    names: Annotated[
        list[str] | None, typer.Argument(help="Notebooks, such as phase-01-dense-cache; all if none.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Run them and write nothing.")] = False,
) -> None:
    """Run the percent scripts and write the notebooks with their outputs."""
    scripts = [NOTEBOOKS / f"{name}.py" for name in names] if names else sorted(NOTEBOOKS.glob("*.py"))
    if not scripts:
        raise typer.BadParameter(f"no notebooks in {NOTEBOOKS}")
    console = Console()
    for script in track(scripts, description="Executing", console=console):
        console.print(f"  {script.stem}")
        if check:
            assert_current(script)
        notebook = run(script)
        if not check:
            script.with_suffix(".ipynb").write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def read(script: Path) -> NotebookNode:
    """The notebook of a percent script: no outputs yet, and nothing in it that would change from run to run."""
    notebook: NotebookNode = jupytext.read(script)
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"
    notebook.metadata = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def run(script: Path) -> NotebookNode:
    """The executed notebook. Its cells run in the repository's root; a cell that raises stops it."""
    notebook = read(script)
    metadata = dict(notebook.metadata)
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=TIMEOUT, record_timing=False, resources=resources).execute()
    notebook.metadata = metadata  # the kernel adds its Python version
    return notebook


def assert_current(script: Path) -> None:
    """Raise NotebookError unless the committed .ipynb has the cells of the script, executed."""
    path = script.with_suffix(".ipynb")
    if not path.is_file():
        raise NotebookError(f"{path.name} is missing: python scripts/notebooks.py execute {script.stem}")
    committed, source = nbformat.read(path, as_version=4), read(script)
    if [(c.cell_type, c.source) for c in committed.cells] != [(c.cell_type, c.source) for c in source.cells]:
        raise NotebookError(f"{path.name} is not what {script.name} says: python scripts/notebooks.py execute")
    if not any(cell.get("outputs") for cell in committed.cells):
        raise NotebookError(f"{path.name} has no outputs: python scripts/notebooks.py execute {script.stem}")


# --- rendering ------------------------------------------------------------------------------------------------------

TEMPLATE = """
{%- extends 'markdown/index.md.j2' -%}
{%- block stream -%}{{ fenced(output.text) }}{%- endblock -%}
{%- block data_text scoped -%}{{ fenced(output.data['text/plain']) }}{%- endblock -%}
{%- block data_png -%}
![{{ alt(cell) }}]({{ output.metadata.filenames['image/png'] }}){ .notebook-plot loading=lazy }
{%- endblock -%}
"""

INTRODUCTION = """
!!! note "This page is a notebook"
    It was executed from `notebooks/{name}.py`. [Download it]({name}.ipynb), or run it yourself from the root of the
    repository: `.venv/bin/jupyter lab notebooks/{name}.ipynb`.

!!! resumen "En español"
    Esta página es un cuaderno de Jupyter ya ejecutado: los experimentos de la fase, con sus gráficas. Puedes bajarlo
    y ejecutarlo tú, sobre la referencia o sobre tus propios ficheros.
"""


def render(path: Path) -> dict[str, str | bytes]:
    """An executed notebook as a page.

    Returns:
        File name → content: `notebook.md`, and the pictures that it shows.

    Raises:
        NotebookError: a picture has no alt text.
    """
    exporter = MarkdownExporter(raw_template=TEMPLATE)
    exporter.environment.globals.update(fenced=_fenced, alt=_alt)
    body, resources = exporter.from_notebook_node(
        nbformat.read(path, as_version=4), resources={"unique_key": "notebook"}
    )
    title, _, rest = body.lstrip().partition("\n")
    page = f"---\nrender_macros: false\n---\n{title}\n{INTRODUCTION.format(name=path.stem)}\n{rest}"
    return {"notebook.md": page, **resources.get("outputs", {})}


def _fenced(text: str) -> str:
    """Printed text, without terminal colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()
    return f"\n```{{ .text .output }}\n{plain}\n```\n"


def _alt(cell: Any) -> str:
    """What a cell's picture shows."""
    text = cell.metadata.get("alt", "").strip()
    if not text:
        raise NotebookError(f'this cell draws a picture: say what it shows, # %% alt="…"\n{cell.source}')
    return str(text)


if __name__ == "__main__":
    app()
