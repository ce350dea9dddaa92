"""Draw every figure of the docs: `python -m scripts.figures [phase_00 …]`.

Every module of this folder that has a `main()` is run. Redrawing an unchanged figure gives the same bytes. Drawing all
of them brings the entries of `docs/es/figures.po` up to date; those of the notebooks' plots are there too.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import track

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if str(ROOT) not in sys.path:  # run as a file, not with -m
    sys.path.insert(0, str(ROOT))


def painters(names: list[str]) -> dict[str, Callable[[], None]]:
    """Module name → its `main`, of the modules in `names`, or of all when there are none."""
    known = sorted(module.name for module in pkgutil.iter_modules([str(HERE)]) if not module.name.startswith("_"))
    unknown = set(names) - set(known)
    if unknown:
        raise SystemExit(f"no such figures: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    modules = {name: importlib.import_module(f"scripts.figures.{name}") for name in names or known}
    return {name: module.main for name, module in modules.items() if hasattr(module, "main")}


def main() -> None:
    from scripts import notebook_pages
    from scripts.figures import labels
    from scripts.figures.style import FIGURES

    console = Console()
    for name, paint in track(list(painters(sys.argv[1:]).items()), description="Drawing", console=console):
        console.print(f"  {name}")
        paint()
    if not sys.argv[1:]:
        for notebook in (ROOT / "notebooks").glob("*.ipynb"):
            for name, picture in notebook_pages.render(notebook).items():
                if name.endswith(".svg"):
                    labels.in_svg(picture)
        labels.update()
    console.print(f"{len(list(FIGURES.glob('*.light.svg')))} figures in {FIGURES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
