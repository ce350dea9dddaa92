"""What of the course goes into the reader's browser: the tasks that need nothing but Python, and what grades them."""

from __future__ import annotations

import gettext
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from minicache_course.arena.baselines import BASELINES, FLEETS, ORACLES, text_of
from minicache_course.install import CARRIED
from minicache_course.language import LOCALE
from minicache_course.starters import starter
from minicache_course.table import Phase, Task, load_course
from minicache_course.workspace import TABLE

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"

PURE = (
    *(f"minicache/{name}.py" for name in ("__init__", "lazy", "errors", "palette", "request", "trace")),
    *(
        f"minicache/{name}"
        for name in ("arithmetic", "grammar", "memory", "scheduler", "fleet", "simulator", "structured", "verifier")
    ),
    *(f"minicache/tiers/{name}.py" for name in ("__init__", "contract", "cpu", "specs", "stack")),  # not the folder
    *(f"minicache_course/{name}" for name in ("__init__.py", "arena", "errors.py", "incidents", "language.py")),
)
"""What of `src` is pure standard library, and what a playground runs."""

PLUGINS = ("minicache/plugins/__init__.py", "minicache/plugins/adapter.py")
"""What is pure of the plug-ins: phase 11 builds it."""

SEARCH = ("minicache/engine/__init__.py", "minicache/engine/beam.py")
"""What is pure of the engine, and the tests of phase 8 share."""

GRADING = tuple(
    f"minicache_course/{name}.py"
    for name in (
        *("account", "checks", "effort", "encoding", "exposing", "finder", "follow", "journal", "pages", "plugin"),
        *(
            "predictions",
            "progress",
            "record",
            "results",
            "scenario",
            "seeds",
            "session",
            "stall",
            "table",
            "templates",
            "values",
        ),
        "workspace",
    )
)
"""What a run of pytest and its account need."""

Files = Iterator[tuple[str, bytes]]


def is_pure(task: Task) -> bool:
    """Whether a task can be graded without torch: whether the module that it asks for needs none."""
    path = task.module.replace(".", "/")
    return path.startswith(tuple(f"{name}/" for name in PURE)) or f"{path}.py" in PLUGINS


def pure_tasks() -> dict[Phase, list[Task]]:
    """The tasks that can be graded in a browser, of each phase that has any."""
    found = {phase: [task for task in phase.tasks if is_pure(task)] for phase in load_course(ROOT / TABLE)}
    return {phase: tasks for phase, tasks in found.items() if tasks}


def package_files(names: Iterable[str]) -> Files:
    """Modules and packages of `src`: path from the root of the repository, content."""
    for name in names:
        found = [SOURCES / name] if name.endswith(".py") else (SOURCES / name).rglob("*.py")
        for file in found:
            yield from _as_it_is(file)


def grading_files() -> Files:
    """What grading needs in addition to the pure modules: the course's table, starters, tests, and the page's glue."""
    yield from package_files(GRADING + PLUGINS + SEARCH)
    yield TABLE, table().encode()
    for name in ("__init__.py", "browser/__init__.py", "browser/grade.py"):
        yield from _as_it_is(ROOT / "scripts" / name)
    numbers = {f"phase-{phase.number:02d}": {task.number for task in tasks} for phase, tasks in pure_tasks().items()}
    for pattern in CARRIED:
        for file in ROOT.glob(pattern):
            name = file.relative_to(ROOT).as_posix()
            if not name.startswith("tests/"):
                continue
            here = re.match(r"tests/(phase-\d\d)", name)
            task = re.match(r"test_task_(\d+)_", file.name)
            if here and (here[1] not in numbers or (task and int(task[1]) not in numbers[here[1]])):
                continue
            yield from _as_it_is(file)
    for phase, tasks in pure_tasks().items():
        for path, text in starters(phase, tasks).items():
            yield path, text.encode()


def policies() -> dict[str, str]:
    """The arena's policies by their names: the learner's two, then the baselines that may be handed in."""
    own = {f"{name}.py": (ROOT / "labs" / "arena" / f"{name}.py").read_text("utf-8") for name in ("policy", "fleet")}
    others = [name for name in BASELINES + FLEETS if name not in ORACLES]
    return own | {name: text_of(name) for name in others}


def table() -> str:
    """`labs/course.toml` without the tasks that cannot be graded in a browser: there, the phases have only these."""
    pure = {(phase.number, task.number) for phase, tasks in pure_tasks().items() for task in tasks}
    kept, phase, is_kept = [], -1, True
    for block in re.split(r"(?m)^(?=\[\[)", (ROOT / TABLE).read_text(encoding="utf-8")):
        number = int(found[1]) if (found := re.search(r"(?m)^number = (\d+)$", block)) else -1
        if block.startswith("[[phase]]"):
            phase, is_kept = number, True
        elif block.startswith("[[phase.task]]"):
            is_kept = (phase, number) in pure
        if is_kept:  # a prediction goes with the task that it follows
            kept.append(block)
    return "".join(kept)


def starters(phase: Phase, tasks: list[Task]) -> dict[str, str]:
    """Path from the root of the repository → the starter, of the files that the tasks are written in.

    They are generated: what lies in labs/ may be solved.
    """
    return {f"labs/{phase.folder}/{task.file}": starter(phase, task.module) for task in tasks}


def spanish_files() -> Files:
    """What grading tells in Spanish."""
    yield from _as_it_is(LOCALE / "es" / "LC_MESSAGES" / "course.mo")


def sheet(phase: Phase, tasks: list[Task], language: str) -> bytes:
    """What a page in a language has to know of a phase before it loads Python, as JSON: tasks, hints, starters."""
    say = gettext.translation("course", LOCALE, [language], fallback=True).gettext
    told: dict[str, Any] = {
        "number": phase.number,
        "title": say(phase.title),
        "folder": phase.folder,
        "tasks": [
            {
                "id": task.id,
                "number": task.number,
                "title": say(task.title),
                "points": task.points,
                "file": f"labs/{phase.folder}/{task.file}",
                "hints": [*map(say, task.hints)],
            }
            for task in tasks
        ],
        "starters": starters(phase, tasks),
    }
    return json.dumps(told, ensure_ascii=False).encode()


def route(language: str) -> list[dict[str, str]]:
    """The tasks of the whole course in their order: id, title in a language, page from the root of its site."""
    say = gettext.translation("course", LOCALE, [language], fallback=True).gettext
    return [
        {"id": task.id, "title": say(task.title), "page": task.page.removeprefix("docs/en/").removesuffix(".md") + "/"}
        for phase in load_course(ROOT / TABLE)
        for task in phase.tasks
    ]


def _as_it_is(file: Path) -> Files:
    yield file.relative_to(ROOT).as_posix(), file.read_bytes()
