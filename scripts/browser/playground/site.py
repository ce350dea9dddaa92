"""Make `assets/playground/` of the site: the page's scripts, what can be chosen, and a run that needs no Python.

That run is what the playground shows before anything is clicked.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from minicache.palette import INK, PALETTE, Scheme
from minicache_course.table import load_course
from minicache_course.workspace import TABLE
from scripts.browser.build import archive
from scripts.browser.playground.frames import Frame
from scripts.browser.playground.run import run
from scripts.browser.playground.schedulers import PACKAGE, SCHEDULERS, Choice
from scripts.browser.playground.workloads import IN_STEPS, WORKLOADS

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[2]
GROUND: Final[dict[Scheme, str]] = {"light": "#FFFFFF", "dark": "#14171F"}
"""Behind a saved picture: the pages' own grounds."""

FIRST: Final = "six"
"""The workload of a playground that is opened without a link."""


def build(target: Path) -> None:
    """Write everything into `target`, an empty or missing folder next to that of `scripts.browser.build`."""
    target.mkdir(parents=True, exist_ok=True)
    for file in (*HERE.glob("*.js"), HERE / "playground.css"):
        shutil.copy(file, target / file.name)
    for name, content in (("catalogue.json", catalogue()), ("first.json", recording())):
        (target / name).write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
    modules = (ROOT / "scripts" / "__init__.py", HERE.parent / "__init__.py", *HERE.glob("*.py"))
    files = ((file.relative_to(ROOT).as_posix(), file.read_bytes()) for file in modules)
    (target / "playground.zip").write_bytes(archive(files))


def catalogue() -> dict[str, Any]:
    """All that can be chosen, and where the sliders stand for each workload."""
    return {
        "first": FIRST,
        "workloads": {
            name: {
                "title": each.title,
                "unit": "steps" if each.cost is IN_STEPS else "s",
                "schedulers": each.schedulers,
                "settings": asdict(each.settings),
            }
            for name, each in WORKLOADS.items()
        },
        "schedulers": {
            name: {"title": each.title, "module": each.module, "built_from": built_from(each)}
            for name, each in SCHEDULERS.items()
        },
        "files": files(),
        "palettes": {"light": _palette("light"), "dark": _palette("dark")},
    }


def files() -> dict[str, str]:
    """Module → the learner's file from the root of a course, of all that the schedulers are built from."""
    modules = {module for choice in SCHEDULERS.values() for module in built_from(choice)}
    written = (
        (module, f"labs/{phase.folder}/{file}")
        for phase in load_course(ROOT / TABLE)
        for module, file in phase.files.items()
    )
    return {module: path for module, path in written if module in modules}


def built_from(choice: Choice) -> list[str]:
    """The modules of a stage that a learner writes: its own one, those that it extends, and the queue."""
    if not choice.stage:
        return []
    stage = type(choice.create(WORKLOADS[FIRST].settings, import_module))
    extended = [each.__module__ for each in stage.__mro__ if each.__module__.startswith(f"{PACKAGE}.")]
    return list(dict.fromkeys([choice.module, *extended, f"{PACKAGE}.queue"]))


def _palette(scheme: Scheme) -> dict[str, str]:
    """Role → colour, and "on-" role → that of letters on it."""
    shades = {role: each.shade(scheme) for role, each in PALETTE.items()}
    letters = {f"on-{role}": each.on_light if scheme == "light" else each.on_dark for role, each in PALETTE.items()}
    return {"ink": INK[scheme], "ground": GROUND[scheme], **shades, **letters}


def recording() -> dict[str, Any]:
    """The first workload on its two schedulers, step by step."""
    workload = WORKLOADS[FIRST]
    panes = []
    for scheduler in workload.schedulers:
        frames: list[Frame] = []
        run(FIRST, scheduler, workload.settings, frames.append)
        panes.append({"scheduler": scheduler, "frames": frames})
    return {"workload": FIRST, "unit": "steps", "settings": asdict(workload.settings), "panes": panes}
