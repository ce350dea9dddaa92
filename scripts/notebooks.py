"""The phases' notebooks, executed from their percent scripts. `notebook_pages.py` makes pages of them.

    python -m scripts.notebooks execute            notebooks/*.py → notebooks/*.ipynb, outputs included
    python -m scripts.notebooks execute --check    run every notebook and write nothing; fails if an .ipynb is stale

The percent script is the source: edit it, or its .ipynb in Jupyter (jupytext keeps the pair in step). A cell that draws
a picture says what it shows, for those who cannot see it: `# %% alt="time per token against position: …"`.
"""

# ruff: noqa: E402, something comes before the imports

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

# jsonschema, which nbformat imports, would compile a grammar of URLs for seconds. A notebook has no URL to check.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

import jupytext
import nbformat
import typer
from nbclient import NotebookClient
from nbformat import NotebookNode
from rich.console import Console
from rich.progress import track

from scripts.notebook_pages import NotebookError

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PICTURES = (
    "--InlineBackend.figure_formats={'svg'}",
    "--InlineBackend.print_figure_kwargs={'bbox_inches': 'tight', 'metadata': {'Date': None, 'Creator': None}}",
)
"""The kernel draws pictures as SVG, where text stays text: a page has their words in its language."""
TIMEOUT = 1000
"""Seconds that one cell may take."""
AT_ONCE = min(2, os.cpu_count() or 1)
"""Notebooks that run at the same time. They measure on one thread each: more than cores would disturb each other."""

app = typer.Typer(add_completion=False, help="Execute the notebooks from their percent scripts.")


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

    def run_one(script: Path) -> Path:
        if check:
            assert_current(script)
        notebook = run(script)
        if not check:
            script.with_suffix(".ipynb").write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        return script

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for done in track(pool.map(run_one, scripts), "Executing", len(scripts), console=console):
                console.print(f"  {done.stem}")
        finally:
            pool.shutdown(cancel_futures=True)  # once one has failed, none is begun


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
    # What a kernel printed is one output, wherever it happened to be flushed.
    client = NotebookClient(notebook, timeout=TIMEOUT, record_timing=False, coalesce_streams=True, resources=resources)
    client.extra_arguments = list(PICTURES)
    client.execute()
    notebook.metadata = metadata  # the kernel adds its Python version
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        if picture := output.get("data", {}).get("image/svg+xml"):
            output.data["image/svg+xml"] = picture.replace(" \n", " ")  # a path on one line, and a small file
    return notebook


def assert_current(script: Path) -> None:
    """Raise NotebookError unless the committed .ipynb has the cells of the script, executed."""
    path = script.with_suffix(".ipynb")
    if not path.is_file():
        raise NotebookError(f"{path.name} is missing: python -m scripts.notebooks execute {script.stem}")
    committed, source = nbformat.read(path, as_version=4), read(script)
    if [(c.cell_type, c.source) for c in committed.cells] != [(c.cell_type, c.source) for c in source.cells]:
        raise NotebookError(f"{path.name} is not what {script.name} says: python -m scripts.notebooks execute")
    if not any(cell.get("outputs") for cell in committed.cells):
        raise NotebookError(f"{path.name} has no outputs: python -m scripts.notebooks execute {script.stem}")


if __name__ == "__main__":
    app()
