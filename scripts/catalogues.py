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

from minicache_course.language import LABEL_WIDTH, LOCALE, places

ROOT = Path(__file__).resolve().parents[1]
SPANISH = LOCALE / "es" / "LC_MESSAGES"
COURSE = ROOT / "src" / "minicache_course"

MOST_MISSING = 0.05
"""The share of the messages that may lack their Spanish."""

NOT_FOR_LEARNERS = ("notebook", "server", "symbols", "wrong")
"""Of the course's modules, those whose words are not translated."""

# What Typer says by itself, in a help text or an error.
TYPERS = (
    "Arguments", "Options", "Commands", "Error", "Aborted.", "[required]", "[default: {}]", "[env var: {}]",
    "Try [blue]'{command_path} {help_option}'[/] for help.", "Show this message and exit.", "Missing command.",
    "No such command {name!r}.", "required", "default: {default}",
)  # fmt: skip

# What the grader and `doctor` tell that no rule would find: single words, and what a join or a loop puts together.
WORDS = (
    "active", "browser", "course", "progress", "importing", "yours", "reads", "finds", "a {kind}", "{one} or {other}",
    "at {place}", "requests of {tokens}: {ids}", "interpreter, canary passed",
)  # fmt: skip

_WORD = re.compile(r"[a-z]{2,}")
_LABEL = re.compile(r"([a-z][a-z ]{0,6}[a-z])  +", re.ASCII)
_CODE = re.compile(r"^[-/.<\[]|^\s|\\[sdwA]|\n\s*(def|import|from|class) |^(def|import|from|class) ")


def told_by(file: Path) -> Iterator[str]:
    """What the strings of a Python file may tell, as templates; the first lines of the docstrings of tests."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    # Docstrings, and what a string or a call of `_` is made of.
    inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and _constant(node.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and (doc := ast.get_docstring(node)):
            yield doc.splitlines()[0]
        elif id(node) in inside:
            continue
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_":
            inside |= {id(argument) for argument in node.args}  # the command line's own
        elif isinstance(node, ast.IfExp):
            yield from filter(_WORD.fullmatch, map(_constant, (node.body, node.orelse)))
        elif isinstance(node, ast.Attribute) and node.attr == "format" and (text := _constant(node.value)):
            inside.add(id(node.value))
            parts = [
                literal + f"{{{name or 'what'}}}" * (name is not None) for literal, name, *_ in Formatter().parse(text)
            ]
            yield from _messages("".join(parts))
        elif isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp) and (template := _template(node)):
            # The text between an f-string's braces is no message by itself; what is in them may be.
            inside |= {id(part) for part in _parts(node)}
            yield from _messages(template)


def _constant(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _parts(node: ast.AST) -> list[ast.AST]:
    """What a string is made of: its text, and the values that are put in."""
    if isinstance(node, ast.BinOp):
        return [node, *_parts(node.left), *_parts(node.right)]
    if isinstance(node, ast.JoinedStr):
        return [node, *(each for each in node.values if isinstance(each, ast.Constant))]
    return [node]


def _template(node: ast.AST) -> str:
    """A string as a template: "{count} of {total} differ"; "" if it is no string."""
    names: dict[str, str] = {}

    def placeholder(value: ast.expr) -> str:
        name, source = _name_of(value), ast.unparse(value)
        number = 1
        while names.setdefault(f"{name}{number}" if number > 1 else name, source) != source:
            number += 1
        return f"{{{name}{number if number > 1 else ''}}}"

    def text(part: ast.AST) -> str:
        if isinstance(part, ast.Constant):
            return part.value.replace("{", "{{").replace("}", "}}") if isinstance(part.value, str) else ""
        if isinstance(part, ast.JoinedStr):
            return "".join(map(text, part.values))
        if isinstance(part, ast.FormattedValue):
            return placeholder(part.value)
        if isinstance(part, ast.BinOp):
            return text(part.left) + text(part.right)
        return placeholder(part) if isinstance(part, ast.expr) else ""

    def is_text(part: ast.AST) -> bool:
        if isinstance(part, ast.BinOp):
            return isinstance(part.op, ast.Add) and (is_text(part.left) or is_text(part.right))
        return isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))

    return text(node) if is_text(node) else ""


def _name_of(value: ast.expr) -> str:
    """A short name for what is put into a string."""
    if isinstance(value, ast.Name):
        return value.id.strip("_")
    if isinstance(value, ast.Attribute):
        return value.attr.strip("_")
    if isinstance(value, ast.Call):
        return _name_of(value.args[0]) if value.args else _name_of(value.func)
    if isinstance(value, ast.Subscript):
        return _name_of(value.value)
    return "what"


def _messages(template: str) -> Iterator[str]:
    """The messages in a string: its lines, each without the label that it may begin with, and the label."""
    for line in template.split("\n"):
        label, text = line[:LABEL_WIDTH], line[LABEL_WIDTH:]
        if len(label) == LABEL_WIDTH and (found := _LABEL.fullmatch(label)):
            yield found[1]
        else:
            text = line
        text = text.strip()
        words = re.sub(r"\{\w*\}", "", text)
        if " " in text and _WORD.search(words) and not _CODE.search(text):
            yield text


def of_the_table(file: Path) -> Iterator[str]:
    """The titles and hints of the course's table."""
    for phase in tomllib.loads(file.read_text(encoding="utf-8"))["phase"]:
        yield phase["title"]
        for task in phase.get("task", ()):
            yield task["title"]
            yield from task.get("hints", ())


def of_the_course() -> list[str]:
    """The messages of `course.po`."""
    from minicache_course.results import Outcome

    modules = [file for file in sorted(COURSE.glob("*.py")) if file.stem not in NOT_FOR_LEARNERS]
    modules += [COURSE.parent / "minicache_teach" / f"{name}.py" for name in ("controls", "misnamed")]
    tests = sorted((ROOT / "tests").glob("phase-*/*.py"))
    broken = COURSE / "incidents" / "broken.py"
    found = [*map(str, Outcome), *WORDS, *of_the_table(ROOT / "labs" / "course.toml")]
    for file in (*modules, *tests):
        found += told_by(file)
    found += [doc.splitlines()[0] for doc in _classes_of(broken)]  # a grader names the bug that a test lets pass
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
