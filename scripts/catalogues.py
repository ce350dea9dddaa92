"""The catalogues of what the `minicache` command says in Spanish, kept true to what it says in English.

`minicache.po` has what the command line prints, its help included, found by Babel in the calls of `_`. `course.po` has
what is written without a language in mind: the titles and hints of `labs/course.toml`, the checks, notes and docstrings
of the tests, the grader's own words. An f-string is a template there: its `{names}` stand for what it puts in.

    python -m scripts.catalogues            bring the catalogues up to date with the sources, and compile them
    python -m scripts.catalogues --check    fail if that was forgotten, or if more than 5 % is not translated
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any

from babel.messages import mofile, pofile
from babel.messages.catalog import Catalog
from babel.messages.extract import extract_from_dir
from rich.console import Console
from typer.main import get_command

from minicache_course.language import LOCALE
from minicache_course.templates import template_of

ROOT = Path(__file__).resolve().parents[1]
SPANISH = LOCALE / "es" / "LC_MESSAGES"
COURSE = ROOT / "src" / "minicache_course"

MOST_MISSING = 0.05
"""The share of the messages that may lack their Spanish."""

NOT_FOR_LEARNERS = ("language", "notebook", "server", "symbols", "templates", "wrong")
"""Of the course's modules, those whose words are not translated."""

# What Typer says by itself, in a help text or an error.
TYPERS = (
    "Arguments", "Options", "Commands", "Error", "Aborted.", "[required]", "[default: {}]", "[env var: {}]",
    "Try [blue]'{command_path} {help_option}'[/] for help.", "Show this message and exit.", "Missing command.",
    "No such command {name!r}.", "required", "default: {default}", "[OPTIONS]", "COMMAND [ARGS]...",
)  # fmt: skip

_WORD = re.compile(r"[a-z]{2,}")
_CODE = re.compile(r"^[-/.<\[]|\\[sdwA]|\n\s*(def|import|from|class) |^(def|import|from|class) ")


def told_by(file: Path) -> Iterator[str]:
    """What a Python file may tell: its f-strings as templates, its strings, the first line of a test's docstring."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    inside = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) if name.startswith("test_") and (doc := ast.get_docstring(node)):
                yield doc.splitlines()[0]
            case ast.Call(func=ast.Name(id="_"), args=arguments):  # the command line's own
                inside |= set(map(id, arguments))
            case ast.Call(func=ast.Name(id="labelled" | "said"), args=[ast.Constant(value=str(word)), *_]) if word:
                yield word
            case ast.JoinedStr(values=parts) if id(node) not in inside:
                inside |= {id(part) for part in parts if isinstance(part, ast.Constant)}
                inside |= {id(part.format_spec) for part in parts if isinstance(part, ast.FormattedValue)}
                yield from filter(_is_told, [template_of(node)[0]])
            case ast.Constant(value=str(text)) if id(node) not in inside:
                yield from filter(_is_told, [text])


def _is_told(message: str) -> bool:
    """Whether a string has words for a person."""
    words = re.sub(r"\{\w*\}", "", message)
    return " " in message.strip() and bool(_WORD.search(words)) and not _CODE.search(message)


def of_the_table(file: Path) -> Iterator[str]:
    """The titles, hints, questions and reasons of the course's table."""
    for phase in tomllib.loads(file.read_text(encoding="utf-8"))["phase"]:
        yield phase["title"]
        for task in phase.get("task", ()):
            yield task["title"]
            yield from task.get("hints", ())
            yield from (each["question"] for each in task.get("prediction", ()))
            yield from filter(None, [task.get("why")])


def of_the_course() -> list[str]:
    """The messages of `course.po`."""
    from minicache_course.results import Outcome

    modules = [file for file in sorted(COURSE.glob("*.py")) if file.stem not in NOT_FOR_LEARNERS]
    modules += sorted(COURSE.glob("arena/*.py"))
    modules += [COURSE.parent / "minicache_teach" / f"{name}.py" for name in ("controls", "misnamed")]
    tests = sorted((ROOT / "tests").glob("phase-*/*.py"))
    broken = [COURSE / "incidents" / f"{name}.py" for name in ("broken", "async_broken")]
    found = [*map(str, Outcome), *of_the_table(ROOT / "labs" / "course.toml")]
    for file in (*modules, *tests):
        found += told_by(file)
    for file in broken:
        found += [doc.splitlines()[0] for doc in _classes_of(file)]  # a grader names the bug that a test lets pass
    return list(dict.fromkeys(found))


def _classes_of(file: Path) -> Iterator[str]:
    """The docstrings of a file's classes."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and (doc := ast.get_docstring(node)):
            yield doc


def of_the_command_line() -> list[str]:
    """The messages of `minicache.po`."""
    from minicache_cli.commands import app

    found = [str(message) for _, _, message, *_ in extract_from_dir(ROOT / "src")]
    return list(dict.fromkeys([*found, *_helps(get_command(app)), *TYPERS]))


def _helps(command: Any) -> Iterator[str]:
    """What `--help` tells of a command and of those below it."""
    for each in (command, *command.params):
        yield from filter(None, (getattr(each, "help", None), getattr(each, "rich_help_panel", None)))
    for below in getattr(command, "commands", {}).values():
        yield from _helps(below)


def updated(file: Path, messages: Iterable[str]) -> Catalog:
    """A catalogue with these messages and the translations that it has of them."""
    with file.open("rb") as stream:
        known = pofile.read_po(stream, locale="es")
    catalogue = Catalog(locale="es", project="minicache", header_comment="")
    for message in messages:
        catalogue.add(message, known[message].string if message in known else "")
    return catalogue


def places(message: str) -> list[str] | None:
    """The names of a template's places; None if it is none, and its braces mean something else."""
    try:
        names = [name for _, name, *_ in Formatter().parse(message) if name is not None]
    except ValueError:
        return None
    return names if all(map(str.isidentifier, names)) else None


def faults(catalogue: Catalog) -> Iterator[str]:
    """Translations that have other `{names}` than their message, which no value could be put into."""
    for message in catalogue:
        its, theirs = places(str(message.id)), places(str(message.string))
        if its is not None and (theirs is None or set(theirs) - set(its)):
            yield f"{message.id!r}: its Spanish has other names: {message.string!r}"


def texts(catalogue: Catalog) -> dict[str, str]:
    """What a catalogue says, without its header, which has a date."""
    return {str(message.id): str(message.string) for message in catalogue if message.id}


write_po = partial(pofile.write_po, omit_header=True)


def main(*, check: bool) -> None:
    """Write the catalogues, or see whether that is needed."""
    console, wrong = Console(), list[str]()
    for name, messages in (("minicache", of_the_command_line()), ("course", of_the_course())):
        po, mo = SPANISH / f"{name}.po", SPANISH / f"{name}.mo"
        catalogue = updated(po, messages)
        missing = [message for message, spanish in texts(catalogue).items() if not spanish]
        wrong += faults(catalogue)
        if len(missing) > MOST_MISSING * len(catalogue):
            wrong.append(f"{po.name} lacks the Spanish of {len(missing)} of {len(catalogue)}, such as {missing[0]!r}")
        for path, read, write in ((po, pofile.read_po, write_po), (mo, mofile.read_mo, mofile.write_mo)):
            said = {message: spanish for message, spanish in texts(catalogue).items() if spanish or path == po}
            with path.open("rb") as file:
                is_current = texts(read(file)) == said
            if check and not is_current:
                wrong.append(f"{path.name} does not fit its sources: run python -m scripts.catalogues")
            elif not is_current:
                with path.open("wb") as file:
                    write(file, catalogue)
        console.print(f"{name}: {len(catalogue)} messages, {len(missing)} without Spanish", highlight=False)
    for each in wrong:
        console.print(each, markup=False, highlight=False, soft_wrap=True)
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main(check="--check" in sys.argv[1:])
