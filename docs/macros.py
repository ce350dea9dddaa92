"""What a page can call. The delimiters are `{$ … $}`, so neither code nor math has to be escaped.

    {$ source("minicache.cache.dense:KVCache.append") $}    the code of that symbol, taken from its file
    {$ figure("name", alt="…", caption="…") $}        a picture drawn by scripts/figures, in both colour schemes; on a
                                                      Spanish page with Spanish words, if it has any
    {$ result("decode_cost", "speedup.512", ".1f") $} a number that a benchmark wrote, or
                                                      that scripts/numbers.py computes
    {$ result_table("kernels", "rungs", name="rung", bytes="bytes") $}   a list of results as a table
    {$ gpus() $}                                      what `make gpu` has found, a table for each GPU
    {$ machine("decode_cost") $}                      where and with what command it was measured
    {$ tasks(0) $}  {$ phases() $}                    tables from labs/course.toml
    {$ num_hours(0, 1, "3.1") $}                      hours of phases, and of writing single tasks
    {$ route(1, "3.4") $}                             a route: the pages of a phase, or up to a task's, and the hours
    {$ here() $}                                      "You are here", for who has passed tasks in the browser
    {$ first_picture("…") $}                          what moves in the home page's first minute; the text is its alt
    {$ commands() $}                                  every `minicache` command, from its own help
    {$ roles() $}                                     the rows of the colour code's legend
    {$ play("the burst", "workload=burst&a=continuous&b=paged") $}   a link to the playground, as its address bar has it

On a Spanish page they print Spanish, from docs/es/site.po; what the command line says, from its own catalogues. Inside
an indented block (a tab, an admonition) write `{$ source("…") | indent(4) $}`. A call that names something that is not
there fails the build: a page cannot drift from the code, the measurements or the course.
"""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from babel.messages import pofile
from babel.messages.catalog import Catalog
from mkdocs.utils import get_relative_url

from minicache.palette import PALETTE
from minicache_course.errors import CourseError
from minicache_course.language import LOCALE
from minicache_course.symbols import find_symbol
from minicache_course.table import Phase, Task, load_course

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.browser import course, first  # noqa: E402
from scripts.browser.playground.schedulers import SCHEDULERS  # noqa: E402
from scripts.browser.playground.workloads import WORKLOADS, Settings  # noqa: E402
from scripts.numbers import COMPUTED  # noqa: E402

FIGURES = ROOT / "docs" / "shared" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
COURSE = ROOT / "labs" / "course.toml"
SITE_WORDS = ROOT / "docs" / "es" / "site.po"
COURSE_WORDS = LOCALE / "es" / "LC_MESSAGES" / "course.po"


class PageError(Exception):
    """A page asks for a symbol, figure, number or phase that does not exist."""


@cache
def _catalogue(file: Path) -> Catalog:
    with file.open("rb") as stream:
        return pofile.read_po(stream, locale="es")


def in_spanish(text: str) -> str:
    """What a macro prints, in Spanish."""
    for file in (SITE_WORDS, COURSE_WORDS):
        message = _catalogue(file).get(text)
        if message and message.string:
            return str(message.string)
    raise PageError(f"{SITE_WORDS.relative_to(ROOT)} has no Spanish for {text!r}")


def in_words(text: str, say: Say) -> str:
    """The words of a result: those of an entry, of an entry with "{}" for what has no spaces, or part by part.

    "8 sequences, 64/8 heads of 128" has two parts. What the catalogue does not have, such as a name, stays as it is.
    """
    try:
        return say(text)
    except PageError:
        pass
    for pattern, entry in _templates():
        if match := pattern.fullmatch(text):
            return say(entry).format(*match.groups())
    for separator in (": ", ", "):
        if separator in text:
            return separator.join(in_words(part, say) for part in text.split(separator))
    return text


@cache
def _templates() -> list[tuple[re.Pattern[str], str]]:
    """The entries with "{}", and what they match; those with most words first."""
    entries = [message.id for message in _catalogue(SITE_WORDS) if isinstance(message.id, str) and "{}" in message.id]
    entries.sort(key=len, reverse=True)
    return [(re.compile(re.escape(entry).replace(r"\{\}", r"(\S+)")), entry) for entry in entries]


Say = Callable[[str], str]
SAY: dict[str, Say] = {"en": str, "es": in_spanish}
"""What a macro prints, by the language of the site."""


def define_env(env: Any) -> None:
    """Offer the functions of this module to every page (mkdocs-macros calls this)."""

    def relative(path: str) -> str:
        """The way from the page that is being rendered to `path` in the docs folder."""
        return posixpath.relpath(path, posixpath.dirname(env.page.file.src_uri) or ".")

    def figure(name: str, *, alt: str, caption: str = "") -> str:
        spanish = env.conf["theme"]["language"] == "es" and (FIGURES / f"{name}.es.light.svg").is_file()
        return figure_block(f"{name}.es" if spanish else name, relative("shared/figures"), alt=alt, caption=caption)

    say = SAY[env.conf["theme"]["language"]]

    def result(name: str, key: str, form: str = "") -> str:
        return number(name, key, form, say=say)

    def result_table(name: str, key: str, /, **columns: str) -> str:
        return number_table(name, key, columns, say=say)

    def gpus() -> str:
        return gpu_tables(say=say)

    def machine(name: str) -> str:
        return measured_on(name, say=say)

    def tasks(phase: int) -> str:
        return task_table(phase, relative("."), say=say)

    def predictions(task: str) -> str:
        return prediction_list(task, say=say)

    def phases() -> str:
        return phase_table(relative("."), say=say)

    def route(*stops: int | str) -> str:
        titles = env.conf["extra"].get("nav", {})
        return route_table(stops, env.conf["nav"], titles, relative("."), say=say)

    def here() -> str:
        url = ("es/" if env.conf["theme"]["language"] == "es" else "") + env.page.url
        return here_line(get_relative_url("assets/browser/here.js", url), say=say)

    def pure_tasks() -> str:
        return pure_task_table(relative("."), say=say)

    def commands() -> str:
        return command_help(env.conf["theme"]["language"])

    def roles() -> str:
        return role_rows(say=say)

    def play(text: str, link: str) -> str:
        return playground_link(text, link, here=env.page.url)

    results = (result, result_table, gpus, machine)
    pages = (tasks, predictions, phases, route, num_hours, here, pure_tasks, commands, roles, play)
    for function in (source, figure, *results, *pages):
        env.macro(function)
    env.macro(first.picture, "first_picture")


# --- code -----------------------------------------------------------------------------------------------------------


def source(symbol: str, *, docstring: bool = False) -> str:
    """The code of `module:qualified.name` as a fenced block titled with its file.

    Args:
        symbol: a function, class, method or module-level name, such as "minicache.cache.dense:KVCache.append".
        docstring: keep the docstrings; a page usually says the same in its own words.
    """
    module, _, name = symbol.partition(":")
    if not name:
        raise PageError(f'source("{symbol}"): write "module:name"')
    path = _module_path(module)
    text = path.read_text(encoding="utf-8")
    try:
        node = find_symbol(ast.parse(text), name)
    except CourseError as error:
        raise PageError(f'source("{symbol}"): {error}') from error
    code = _cut(text.splitlines(), node, keep_docstrings=docstring)
    return f'```python title="{path.relative_to(ROOT).as_posix()}"\n{code}\n```'


def _module_path(module: str) -> Path:
    """The file of a module of the package, or of one beside it (`scripts.…`, `benchmarks.…`)."""
    relative = Path(*module.split("."))
    for base in (ROOT / "src", ROOT):
        for path in (base / relative.with_suffix(".py"), base / relative / "__init__.py"):
            if path.is_file():
                return path
    raise PageError(f"no module {module!r}")


def _cut(lines: list[str], node: ast.stmt, *, keep_docstrings: bool) -> str:
    """The lines of a statement, decorators included, moved to the left margin."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    last = node.end_lineno or node.lineno
    dropped: set[int] = set()
    if not keep_docstrings:
        for inner in ast.walk(node):
            dropped |= _docstring_lines(inner, lines)
    kept = [lines[number - 1] for number in range(first, last + 1) if number not in dropped]
    return textwrap.dedent("\n".join(kept)).rstrip()


def _docstring_lines(node: ast.AST, lines: list[str]) -> set[int]:
    """The numbers of the lines that a definition's docstring fills, and of the empty line after it."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return set()
    if len(node.body) < 2 or ast.get_docstring(node, clean=False) is None:
        return set()  # a docstring that is all of the body has to stay
    doc = node.body[0]
    end = doc.end_lineno or doc.lineno
    if end < len(lines) and not lines[end].strip():
        end += 1
    return set(range(doc.lineno, end + 1))


# --- pictures -------------------------------------------------------------------------------------------------------


def figure_block(name: str, folder: str, *, alt: str, caption: str) -> str:
    """The two pictures of a figure; the style sheet shows the one of the reader's scheme."""
    if not alt.strip():
        raise PageError(f'figure("{name}"): alt text is needed: say what the picture shows')
    for scheme in ("light", "dark"):
        if not (FIGURES / f"{name}.{scheme}.svg").is_file():
            raise PageError(f'figure("{name}"): no docs/shared/figures/{name}.{scheme}.svg; draw it in scripts/figures')
    images = "\n".join(
        f"![{alt}]({folder}/{name}.{scheme}.svg#only-{scheme}){{ loading=lazy }}" for scheme in ("light", "dark")
    )
    below = f'\n<figcaption markdown="span">{caption}</figcaption>' if caption else ""
    return f'<figure class="drawn" markdown="1">\n\n{images}\n{below}\n</figure>'


# --- the playground -------------------------------------------------------------------------------------------------


def playground_link(text: str, link: str, *, here: str) -> str:
    """A link to a picture of the playground.

    Args:
        text: the words of the link.
        link: the picture, as the playground's address has it after the "#": "workload=thrash&a=thrash&b=fair".
        here: URL of the page that links, from the site's root.
    """
    said = dict(parse_qsl(link.replace("+", "%2B"), strict_parsing=True))
    known = said.get("workload") in WORKLOADS and all(
        said[pane] in {*SCHEDULERS, "none"} for pane in "ab" if pane in said
    )
    if not known or said.keys() - {"workload", "a", "b", "step", *(field.name for field in fields(Settings))}:
        raise PageError(f'play("{text}", "{link}"): the playground has no such workload, scheduler or setting')
    return f'<a href="{get_relative_url("playground/", here)}#{escape(link)}">{text}</a>'


# --- measurements ---------------------------------------------------------------------------------------------------


def number(name: str, key: str, form: str = "", *, say: Say = str) -> str:
    """The value at `key` of a result, formatted: dots go deeper, numbers index a list.

    A result is benchmarks/results/<name>.json, or what the function <name> of scripts/numbers.py computes.

    null is "not measured": the benchmark could not run that part where it ran. A percentage is
    printed as the pages write it, and on one line: "0.5 %", "−0.5 %", and no minus before a zero.
    """
    value = _value(name, key)
    if value is None:
        return say("not measured")
    if form.endswith("%"):
        return format(value, re.sub("^[+]?", r"\g<0>z", form)).replace("%", "\N{NO-BREAK SPACE}%").replace("-", "−")
    return in_words(format(value, form), say)


def number_table(name: str, key: str, columns: Mapping[str, str], *, say: Say = str) -> str:
    """The list at `key` as a table: a row for each entry, a column for each of its fields that is given a heading.

    Whole numbers get commas; numbers, with their unit or without, stand on the right. An empty list is "not measured":
    the benchmark could not run here.
    """
    entries = _value(name, key)
    if not entries:
        return f"*{say('Not measured.')}*"
    if missing := [field for field in columns if any(field not in entry for entry in entries)]:
        raise PageError(f'result_table("{name}", "{key}"): there is no {", ".join(missing)}')
    numbers = {field for field in columns if all(isinstance(entry[field], int) for entry in entries)}
    rows = [
        [f"{entry[field]:,}" if field in numbers else in_words(str(entry[field]), say) for field in columns]
        for entry in entries
    ]
    rules = ["--:" if all(str(entry[field])[:1].isdigit() for entry in entries) else "---" for field in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [list(columns.values()), rules, *rows])


def gpu_tables(*, say: Say = str) -> str:
    """What `make gpu` has found, a table for each GPU: benchmarks/results/gpu-*.json. Without any: "not measured"."""
    tables = []
    for path in sorted(RESULTS.glob("gpu-*.json")):
        about = _results(path.stem)
        capability = say("compute capability {}").format(about["capability"])
        software = f"{capability}, {about['dtype']}, {in_words(about['machine'], say)}, {about['date']}"
        table = number_table(path.stem, "summary", {"what": say("what"), "found": about["gpu"]}, say=say)
        tables.append(f"**{about['gpu']}** ({software}):\n\n{table}")
    return "\n\n".join(tables) or f"*{say('Not measured.')}*"


def _value(name: str, key: str) -> Any:
    """What is at `key` of benchmarks/results/<name>.json; None if that is null, or below a null."""
    value: Any = _results(name)
    for part in key.split("."):
        if value is None:
            break
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise PageError(f'result("{name}", "{key}"): there is no {part!r}') from None
    return value


def measured_on(name: str, *, say: Say = str) -> str:
    """One line: on what machine, and with what command, a result was made."""
    results = _results(name)
    for key in ("machine", "command"):
        if not isinstance(results.get(key), str):
            raise PageError(f'benchmarks/results/{name}.json has to say its "{key}", as a string')
    return say("Measured on {}, with `{}`.").format(in_words(results["machine"], say), results["command"])


def _results(name: str) -> dict[str, Any]:
    if compute := COMPUTED.get(name):
        return compute()
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise PageError(f"no benchmarks/results/{name}.json, and no {name} in scripts/numbers.py")
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


# --- the course -----------------------------------------------------------------------------------------------------


def task_table(number: int, root: str, *, say: Say = str) -> str:
    """A phase's tasks: number, title, the learner's file, points, with links to the pages that say what to do."""
    phase = load_course(COURSE).phase(number)
    if not phase.tasks:
        raise PageError(f"tasks({number}): labs/course.toml has no tasks for this phase yet")
    rows = [
        f"| {task.id} | [{say(task.title)}]({root}/{task.page.removeprefix('docs/en/')}) "
        f"| {_path(f'labs/{phase.folder}/{task.file}')} | {task.points} |"
        for task in phase.tasks
    ]
    head = [_row(["task", "what you write", "your file", "points"], say), "|---|---|---|--:|"]
    return "\n".join([*head, *rows, f"| | | | **{phase.points}** |"])


def prediction_list(task: str, *, say: Say = str) -> str:
    """What a task asks before one writes, lettered, and the folded answers."""
    phase, _, number = task.partition(".")
    asked = load_course(COURSE).phase(phase).task(int(number)).predictions
    if not asked:
        raise PageError(f"predictions({task!r}): labs/course.toml has none for this task")
    questions = [f"- *{letter}.* {say(question)}" for letter, (question, _) in zip("abcdefgh", asked, strict=False)]
    answers = ", ".join(f"{letter}: {answer}" for letter, (_, answer) in zip("abcdefgh", asked, strict=False))
    fold = f'??? question "{say("Answers")}"\n    {answers}'
    return "\n".join([*questions, "", fold])


def pure_task_table(root: str, *, say: Say = str) -> str:
    """The tasks that open in the browser, a row for each phase that has any: their ids, links to their handouts."""
    rows = []
    for phase, pure in course.pure_tasks().items():
        links = ", ".join(f"[{task.id}]({root}/{task.page.removeprefix('docs/en/')})" for task in pure)
        num_tasks = len(phase.tasks)
        share = say("all") if len(pure) == num_tasks else say("{} of {}").format(len(pure), num_tasks)
        rows.append(f"| {phase.number}, {say(phase.title)} | {links} | {share} |")
    return "\n".join([_row(["phase", "tasks", ""], say), "|---|---|---|", *rows])


def _row(heads: Sequence[str], say: Say) -> str:
    """The first row of a table."""
    return f"| {' | '.join(head and say(head) for head in heads)} |"


def _path(path: str) -> str:
    """A path in a cell; on a narrow screen its lines break after slashes."""
    return f"<code>{path.replace('/', '/<wbr>')}</code>"


def phase_table(root: str, *, say: Say = str) -> str:
    """All phases: number, title (a link where its pages are written), what the learner builds, the theory."""
    rows = [
        f"| {phase.number} | {_phase_title(phase, root, say)} | {say(phase.builds)} | {say(phase.theory)} |"
        for phase in load_course(COURSE)
    ]
    return "\n".join([_row(["phase", "", "you build", "you learn"], say), "|--:|---|---|---|", *rows])


WORDS_A_MINUTE = 180
"""Reading speed for technical text. Code blocks are not counted."""
MINUTES_A_TASK = 15
"""To read a task's tests and hints, and to run them."""
MINUTES_A_LINE = 1
"""For each line of the reference that a learner has to write: the bodies of the task's functions."""


TRIALS = {4: 14, 5: 6, 10: 6}
"""Phase → the hours that people needed who learned it from its pages, when those were longer; the rule above
estimates the others."""


def route_table(
    stops: Sequence[int | str], nav: object, titles: Mapping[str, str], root: str, *, say: Say = str
) -> str:
    """A route through the course as a table: a row for each stop, with its pages in the order of the nav, and hours.

    Args:
        stops: phases by number, or a task ("3.4") for its phase as far as the page that asks for it; none: all.
        nav: of mkdocs.yml.
        titles: words of the nav, English to the page's language.
        root: the way to the docs folder.
        say: what it prints, in the page's language.
    """
    rows, whole = [], 0.0
    for stop in stops or [phase.number for phase in load_course(COURSE)]:
        number, _, last = str(stop).partition(".")
        phase = load_course(COURSE).phase(number)
        pages, tasks = nav_pages(nav, phase.folder), phase.tasks
        if last:
            end = phase.task(int(last)).page.removeprefix("docs/en/")
            pages = pages[: [page for page, _ in pages].index(end) + 1]
            tasks = tasks[: int(last)]
        hours = phase_hours(phase)
        if last:
            hours = _half(_reading(page for page, _ in pages) + sum(map(writing_hours, tasks)))
        whole += hours
        links = ", ".join(f"[{titles.get(title, title)}]({root}/{page})" for page, title in pages)
        tried = "*" if not last and phase.number in TRIALS else ""
        rows.append(f"| {phase.number} | {_phase_title(phase, root, say)}: {links} | {hours:g}{tried} |")
    head = [_row(["phase", "pages", "hours"], say), "|--:|---|--:|"]
    return "\n".join([*head, *rows, f"| | **{say('in all')}** | **{whole:g}** |"])


def nav_pages(nav: object, folder: str) -> list[tuple[str, str]]:
    """(page, title) of what the nav has of a phase, in its order, without the phase's first page."""
    if isinstance(nav, list):
        return [found for item in nav for found in nav_pages(item, folder)]
    if not isinstance(nav, dict):
        return []
    found = []
    for title, inside in nav.items():
        if isinstance(inside, list):
            found += nav_pages(inside, folder)
        elif inside.startswith(f"{folder}/"):
            found.append((inside, title))
    return found


def num_hours(*which: int | str) -> str:
    """The table's hours of phases (numbers; by default all), and of writing single tasks ("3.1"), in half hours."""
    course = load_course(COURSE)
    hours = writing = 0.0
    for name in which or tuple(phase.number for phase in course):
        if isinstance(name, int):
            hours += phase_hours(course.phase(name))
        else:
            number, _, task = name.partition(".")
            writing += writing_hours(course.phase(int(number)).task(int(task)))
    return f"{hours + _half(writing):g}"


def phase_hours(phase: Phase) -> float:
    """The hours of a phase: those of trials; or reading its spine and writing its tasks, in half hours."""
    pages = (ROOT / "docs" / "en" / phase.folder).rglob("*.md")
    spine = [page.relative_to(ROOT / "docs" / "en").as_posix() for page in pages if page.parent.name != "further"]
    return TRIALS.get(phase.number) or _half(_reading(spine) + sum(map(writing_hours, phase.tasks)))


def _reading(pages: Iterable[str]) -> float:
    """Hours for the words of pages of docs/en outside code blocks, at WORDS_A_MINUTE."""
    files = [file for page in pages if (file := ROOT / "docs" / "en" / page).is_file()]  # a notebook's page is rendered
    texts = (re.sub(r"^( *)```.*?^\1```", "", file.read_text("utf-8"), flags=re.M | re.S) for file in files)
    return sum(len(text.split()) for text in texts) / WORDS_A_MINUTE / 60


def writing_hours(task: Task) -> float:
    """MINUTES_A_TASK, and MINUTES_A_LINE for the lines of the reference that the learner writes."""
    return (MINUTES_A_TASK + MINUTES_A_LINE * _lines_to_write(task)) / 60


def _lines_to_write(task: Task) -> int:
    """The lines of the bodies of a task's targets in the reference, without docstrings and empty lines."""
    text = _module_path(task.module).read_text(encoding="utf-8")
    tree, lines, count = ast.parse(text), text.splitlines(), 0
    for target in task.targets:
        node = find_symbol(tree, target)
        body = getattr(node, "body", [node])
        inside = set(range(body[0].lineno, (node.end_lineno or node.lineno) + 1)) - _docstring_lines(node, lines)
        count += sum(1 for number in inside if lines[number - 1].strip())
    return count


def _half(hours: float) -> float:
    return round(2 * hours) / 2


def _phase_title(phase: Phase, root: str, say: Say) -> str:
    page = f"{phase.folder}/index.md"
    written = (ROOT / "docs" / "en" / page).is_file()
    title = say(phase.title)
    return f"[{title}]({root}/{page})" if written else f"{title} *({say('planned')})*"


def here_line(script: str, *, say: Say = str) -> str:
    """Where who learns in the browser is, and what is next: hidden, until the script has found out."""
    words = (say("You are here: {}").format("<a></a>."), say("Next: {}").format("<a></a>."))
    parts = " ".join(f"<span>{part}</span>" for part in words)
    return f'<p id="here" hidden>{parts}</p><script type="module" src="{script}"></script>'


# --- generated tables -----------------------------------------------------------------------------------------------


def role_rows(*, say: Say = str) -> str:
    """A table row for each role of the palette: its name in its colour, and what it marks."""
    return "\n".join(
        f'| <span class="swatch {name}">{name}</span> | {say(role.meaning)} |' for name, role in PALETTE.items()
    )


def command_help(language: str) -> str:
    """Every command of `minicache`, with what its own `--help` prints in a language."""
    command = [sys.executable, "-m", "scripts.commands"]
    environment = os.environ | {"LANGUAGE": language}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PageError(done.stderr.strip())
    return done.stdout
