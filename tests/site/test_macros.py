"""What pages can call: the right code, number and table, or a build that fails."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from minicache_course.table import load_course

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def macros() -> ModuleType:
    spec = importlib.util.spec_from_file_location("macros_under_test", ROOT / "docs" / "macros.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(macros: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(macros, "RESULTS", tmp_path)
    return tmp_path


MODULE = '''
LIMIT: int = 3
"""What a constant means."""


class Box:
    """A box."""

    @property
    def size(self) -> int:
        """How big.

        Long story.
        """
        return LIMIT  # units

    def empty(self) -> None:
        """Nothing but this."""
'''


COURSE_OF_ONE = """
[[phase]]
number = 0
slug = "boxes"
title = "Boxes"
builds = "a box"
theory = "boxes"

[[phase.task]]
number = 1
title = "A size"
module = "minicache.box"
targets = ["Box.size"]
points = 100
page = "docs/en/phase-00-boxes/index.md"
hints = ["Look.", "Look again."]
"""


@pytest.fixture
def module(macros: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "boxes.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setattr(macros, "ROOT", tmp_path)
    return "boxes"


def test_source_gives_a_method_without_its_docstring(macros: ModuleType, module: str) -> None:
    assert macros.source("boxes:Box.size") == (
        '```python title="boxes.py"\n@property\ndef size(self) -> int:\n    return LIMIT  # units\n```'
    )


def test_source_keeps_docstrings_on_request_and_where_they_are_the_body(macros: ModuleType, module: str) -> None:
    assert '"""How big.' in macros.source("boxes:Box.size", docstring=True)
    assert '"""Nothing but this."""' in macros.source("boxes:Box.empty")


def test_source_gives_a_constant(macros: ModuleType, module: str) -> None:
    assert "\nLIMIT: int = 3\n" in macros.source("boxes:LIMIT")


@pytest.mark.parametrize("symbol", ["boxes:Box.weight", "boxes:Bag", "boxes", "nowhere:Box", "boxes:LIMIT.real"])
def test_source_refuses_what_is_not_there(macros: ModuleType, module: str, symbol: str) -> None:
    with pytest.raises(macros.PageError):
        macros.source(symbol)


def test_result_follows_dots_and_formats(macros: ModuleType, results: Path) -> None:
    (results / "speed.json").write_text(json.dumps({"cached": {"ms": [1.25, 2.5]}}), encoding="utf-8")
    assert macros.number("speed", "cached.ms.1", ".2f") == "2.50"


@pytest.mark.parametrize(
    ("value", "form", "printed"),
    [
        (0.125, ".1%", "12.5\N{NO-BREAK SPACE}%"),
        (0.5, "+.0%", "+50\N{NO-BREAK SPACE}%"),
        (-0.5, ".0%", "−50\N{NO-BREAK SPACE}%"),
        (-0.00001, ".2%", "0.00\N{NO-BREAK SPACE}%"),
    ],
)
def test_a_percentage_is_printed_as_pages_write_it(
    macros: ModuleType, results: Path, value: float, form: str, printed: str
) -> None:
    (results / "share.json").write_text(json.dumps({"hits": value}), encoding="utf-8")
    assert macros.number("share", "hits", form) == printed


def test_result_says_that_null_was_not_measured(macros: ModuleType, results: Path) -> None:
    (results / "speed.json").write_text(json.dumps({"peer": None}), encoding="utf-8")
    assert macros.number("speed", "peer", ",.0f") == "not measured"
    assert macros.number("speed", "peer.ms.0", ",.0f") == "not measured"


@pytest.mark.parametrize(("name", "key"), [("speed", "cached.seconds"), ("speed", "cached.ms.7"), ("other", "cached")])
def test_result_refuses_what_was_not_measured(macros: ModuleType, results: Path, name: str, key: str) -> None:
    (results / "speed.json").write_text(json.dumps({"cached": {"ms": [1.25]}}), encoding="utf-8")
    with pytest.raises(macros.PageError):
        macros.number(name, key)


def test_a_figure_can_be_computed(macros: ModuleType) -> None:
    assert macros.number("decode_steps", "minigpt.0.weights", ",") == "3,130,880"


def test_result_table_has_a_row_for_each_entry(macros: ModuleType, results: Path) -> None:
    rungs = [{"name": "naive", "bytes": 2048, "time": "not measured"}, {"name": "tuned", "bytes": 512, "time": "3 µs"}]
    (results / "speed.json").write_text(json.dumps({"rungs": rungs, "others": []}), encoding="utf-8")
    assert macros.number_table("speed", "rungs", {"name": "rung", "bytes": "bytes", "time": "measured"}) == (
        "| rung | bytes | measured |\n| --- | --: | --- |\n| naive | 2,048 | not measured |\n| tuned | 512 | 3 µs |"
    )
    assert macros.number_table("speed", "others", {"name": "kernel"}) == "*Not measured.*"
    with pytest.raises(macros.PageError, match="share"):
        macros.number_table("speed", "rungs", {"share": "share"})


def test_each_gpu_has_a_table(macros: ModuleType, results: Path) -> None:
    assert macros.gpu_tables() == "*Not measured.*"
    about = {"gpu": "Tesla T4", "capability": "7.5", "dtype": "float16", "machine": "a notebook", "date": "2027-01-01"}
    rows = [{"what": "copy bandwidth", "found": "240 GB/s"}]
    (results / "gpu-tesla-t4.json").write_text(json.dumps(about | {"summary": rows}), encoding="utf-8")
    assert macros.gpu_tables() == (
        "**Tesla T4** (compute capability 7.5, float16, a notebook, 2027-01-01):\n\n"
        "| what | Tesla T4 |\n| --- | --: |\n| copy bandwidth | 240 GB/s |"
    )


def test_machine_needs_machine_and_command(macros: ModuleType, results: Path) -> None:
    (results / "speed.json").write_text(json.dumps({"machine": "a laptop", "command": "python x.py"}), encoding="utf-8")
    assert macros.measured_on("speed") == "Measured on a laptop, with `python x.py`."
    (results / "speed.json").write_text(json.dumps({"machine": "a laptop"}), encoding="utf-8")
    with pytest.raises(macros.PageError):
        macros.measured_on("speed")


def test_figure_needs_both_pictures_and_alt_text(
    macros: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(macros, "FIGURES", tmp_path)
    (tmp_path / "map.light.svg").touch()
    with pytest.raises(macros.PageError, match="dark"):
        macros.figure_block("map", "shared/figures", alt="a map", caption="")
    (tmp_path / "map.dark.svg").touch()
    assert macros.figure_block("map", "../shared", alt="a map", caption="").count("![a map](../shared/map.") == 2
    with pytest.raises(macros.PageError, match="alt"):
        macros.figure_block("map", "shared/figures", alt=" ", caption="")


def test_tables_follow_the_course(macros: ModuleType) -> None:
    course = load_course(ROOT / "labs" / "course.toml")
    for phase in course:
        assert f"| {phase.number} |" in macros.phase_table(".")
    phase = course.phase(1)
    table = macros.task_table(1, "..")
    for task in phase.tasks:
        assert f"[{task.title}](../{task.page.removeprefix('docs/en/')})" in table
    assert f"**{phase.points}**" in table


def test_hours_follow_the_pages_and_the_reference(
    macros: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "labs").mkdir()
    (tmp_path / "labs" / "course.toml").write_text(COURSE_OF_ONE, encoding="utf-8")
    code = tmp_path / "src" / "minicache" / "box.py"
    code.parent.mkdir(parents=True)
    code.write_text(MODULE, encoding="utf-8")
    page = tmp_path / "docs" / "en" / "phase-00-boxes" / "index.md"
    page.parent.mkdir(parents=True)
    page.write_text("word " * 3 * 60 * 180 + "\n```python\n" + "code " * 5_000 + "\n```\n", encoding="utf-8")
    monkeypatch.setattr(macros, "ROOT", tmp_path)
    monkeypatch.setattr(macros, "COURSE", tmp_path / "labs" / "course.toml")
    phase = load_course(macros.COURSE).phase(0)
    assert macros.writing_hours(phase.tasks[0]) == pytest.approx(16 / 60)  # one task, one line
    assert macros.phase_hours(phase) == 3.5
    assert macros.num_hours() == macros.num_hours(0) == "3.5"
    assert macros.num_hours("0.1", "0.1", "0.1", "0.1") == "1"


def test_a_route_has_the_pages_of_the_nav_in_their_order(macros: ModuleType) -> None:
    first, second = "phase-03-paged-cache/theory/02-block-tables.md", "phase-03-paged-cache/theory/01-paging.md"
    lab, later = "phase-03-paged-cache/lab/00-blocks.md", "phase-03-paged-cache/lab/01-the-paged-cache.md"
    phase = {"3": ["phase-03-paged-cache/index.md", {"B": first}, {"A": second}, {"Lab": lab}, {"Later": later}]}
    nav = [{"Home": "index.md"}, {"Course": [phase]}]
    whole = macros.route_table([3], nav, {"A": "Á"}, "..")
    assert f": [B](../{first}), [Á](../{second}), [Lab](../{lab}), [Later](../{later}) |" in whole
    part = macros.route_table(["3.4"], nav, {}, "..")
    assert f"[Lab](../{lab}) |" in part
    assert float(part.split("**")[-2]) < float(whole.split("**")[-2])


def test_hours_of_trials_are_marked(macros: ModuleType) -> None:
    rows = macros.route_table([4, 6], [], {}, ".").splitlines()
    assert rows[2].endswith(f"| {macros.TRIALS[4]}* |")
    assert "*" not in rows[3]
    assert macros.num_hours(4) == str(macros.TRIALS[4])


def test_tables_are_printed_in_spanish_too(macros: ModuleType) -> None:
    say = macros.SAY["es"]
    assert macros.phase_table("..", say=say).startswith("| fase |  | construyes | aprendes |")
    assert "**en total**" in macros.route_table([0], [], {}, "..", say=say)
    assert "Estás aquí: <a></a>." in macros.here_line("here.js", say=say)
    assert "| todas |" in macros.pure_task_table("..", say=say)
    assert "token del prompt" in macros.role_rows(say=say)
    with pytest.raises(macros.PageError, match=r"site\.po has no Spanish for 'a new title'"):
        say("a new title")


@pytest.mark.parametrize(
    ("text", "spanish"),
    [
        ("not measured", "sin medir"),
        ("Xeon, 2 cores, torch 2.13 on 1 thread, Linux", "Xeon, 2 núcleos, torch 2.13 en 1 hilo, Linux"),
        ("75–175 tokens, heads of 32", "75–175 tokens, cabezas de 32"),
        ("ladder: token by token", "escalera: token a token"),
        ("99.5%", "99.5 %"),
        ("python -m benchmarks.kernels", "python -m benchmarks.kernels"),
    ],
)
def test_words_of_results_are_spanish_where_the_catalogue_has_them(macros: ModuleType, text: str, spanish: str) -> None:
    assert macros.in_words(text, macros.SAY["es"]) == spanish
    assert macros.in_words(text, str) == text


def test_results_on_spanish_pages_have_no_english_words(macros: ModuleType) -> None:
    english = re.compile(r"\b(the|its|of|and|by|on|at|to|not|each|with|every|one|cores?|threads?|heads|blocks)\b")
    say = macros.SAY["es"]
    seen: dict[str, str] = {}
    for page in sorted((ROOT / "docs" / "es").rglob("*.md")):
        text = page.read_text("utf-8")
        for name, key in re.findall(r'\bresult\("([\w-]+)", "([\w.-]+)"[,)]', text):
            seen[f"{page.name}: {name} {key}"] = macros.number(name, key, say=say)
        for name in re.findall(r'\bmachine\("([\w-]+)"\)', text):
            seen[f"{page.name}: {name}"] = macros.measured_on(name, say=say)
        for name, key, rest in re.findall(r'\bresult_table\("([\w-]+)", "([\w.-]+)", (.*?)\)(?: | )', text):
            columns = dict.fromkeys(re.findall(r"(\w+)=", rest), "")
            columns.pop("refused", None)  # what an exception says
            seen[f"{page.name}: {name} {key}"] = macros.number_table(name, key, columns, say=say)
    seen = {where: re.sub("`[^`]*`|tensor cores", "", words) for where, words in seen.items()}
    assert {where: words for where, words in seen.items() if english.search(words)} == {}


@pytest.mark.parametrize("number", range(12))
def test_all_titles_have_spanish(macros: ModuleType, number: int) -> None:
    assert macros.task_table(number, "..", say=macros.SAY["es"]).startswith("| tarea | lo que escribes | tu archivo |")


def test_a_link_to_the_playground_names_what_there_is(macros: ModuleType) -> None:
    link = macros.playground_link("it", "workload=prefix&a=fair&b=fair+prefix&step=7", here="phase-05-x/theory/01/")
    assert link == '<a href="../../../playground/#workload=prefix&amp;a=fair&amp;b=fair+prefix&amp;step=7">it</a>'
    for wrong in ("workload=nine", "a=fair", "workload=six&a=best", "workload=six&chairs=3"):
        with pytest.raises(macros.PageError, match="no such workload"):
            macros.playground_link("it", wrong, here="")
