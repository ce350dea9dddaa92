"""The command line in Spanish: how the language is chosen, and what a learner reads in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo

from minicache_course import language, templates

ROOT = Path(__file__).resolve().parents[2]
CHOICES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")


def run(*arguments: str, status: int = 0, **chosen: str) -> str:
    """What `minicache arguments` prints where these of `CHOICES` are set."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES} | chosen
    command = [sys.executable, "-c", "from minicache_cli import main; main()", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"COLUMNS": "120"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (["--lang", "es"], {}),
        (["--lang=es"], {"LANG": "en_US.UTF-8"}),
        ([], {"LANG": "es_MX.UTF-8"}),
        ([], {"LC_ALL": "es_ES", "LANG": "en_US.UTF-8"}),
        ([], {"LANGUAGE": "ca:es"}),
    ],
)
def test_spanish(options: list[str], chosen: dict[str, str]) -> None:
    told = run(*options, "hint", "0.1", "--all", **chosen)
    assert "En papel: ¿cuánto ocupa un token?" in told
    assert "docs/es/phase-00" in told
    assert "Era la última pista." in told
    assert not re.search(r"\b(the|of|and)\b", told)


@pytest.mark.parametrize(
    ("options", "chosen"),
    [([], {}), (["--lang", "en"], {"LANG": "es_ES.UTF-8"}), ([], {"LANG": "fr_FR.UTF-8"}), ([], {"LANGUAGE": "en:es"})],
)
def test_english(options: list[str], chosen: dict[str, str]) -> None:
    told = run(*options, "hint", "0.1", "--all", **chosen)
    assert "On paper: how big is a token?" in told
    assert "docs/en/phase-00" in told


def test_a_language_that_there_is_not() -> None:
    assert run("--lang", "fr", "status", status=1) == "minicache: no language 'fr': there are en, es\n"
    assert run("--lang", status=1) == "minicache: --lang needs a language: en, es\n"


@pytest.fixture
def labs(tmp_path: Path) -> Path:
    """The files of phase 0 as handed out, but for a key that is counted without its value."""
    shutil.copytree(ROOT / "labs" / "phase-00-decode-arithmetic", tmp_path / "phase-00-decode-arithmetic")
    file = tmp_path / "phase-00-decode-arithmetic" / "arithmetic" / "arithmetic.py"
    reference = (ROOT / "src" / "minicache" / "arithmetic" / "arithmetic.py").read_text(encoding="utf-8")
    wrong = reference.replace("return 2 * num_layers * num_kv_heads", "return num_layers * num_kv_heads")
    assert wrong != reference
    file.write_text(wrong, encoding="utf-8")
    return tmp_path


def test_a_failure(labs: Path) -> None:
    told = run("--lang", "es", "grade", "0.2", "--labs", str(labs), status=1)
    for text in (
        "Fase 0, Aritmética de la decodificación.",
        "verifica ",
        "llamada   kv_bytes_per_token(40, 40, 128)",
        "obtenido  409600",
        "esperado  819200",
        "difiere   lo tuyo es 0.5 veces lo esperado",
        "lee       docs/es/phase-00-decode-arithmetic/lab/01-write-the-arithmetic.md",
        "falla ",
    ):
        assert text in told


@pytest.mark.slow
def test_a_failure_under_pytest(labs: Path) -> None:
    command = [sys.executable, "-m", "pytest", "tests/phase-00-decode-arithmetic", "--mine", "--task=2"]
    environment = os.environ | {"LANGUAGE": "es", "COLUMNS": "100"}
    done = subprocess.run(
        [*command, f"--labs={labs}", "-p", "no:cacheprovider"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "esperado  819200" in done.stdout
    assert "minicache: puntos" in done.stdout


@pytest.mark.slow
def test_every_help_is_legible_in_spanish() -> None:
    told = {}
    for each in language.languages():
        done = subprocess.run(
            [sys.executable, "-m", "scripts.commands"],
            cwd=ROOT, env=os.environ | {"LANGUAGE": each}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        told[each] = done.stdout
    assert max(map(len, told["es"].splitlines())) <= 76
    assert "…" not in told["es"]
    names = {each: re.findall(r"^## .*|^│ {1,6}(?:\* +)?--[a-z-]+", text, re.MULTILINE) for each, text in told.items()}
    assert names["es"] == names["en"]


@pytest.fixture
def speak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A language with a few texts."""
    catalogue = Catalog()
    for text, its in {
        "called": "appelé",
        "{got}, expected a tensor": "{got}, attendu : un tenseur",
        "{count} of {total} differ": "sur {total}, {count} diffèrent",
        "a list": "une liste",
        "Store": "Ranger",
        "large": "grand",
        "{items} numbers, {what}": "{items} numbers, {what}",
        'A dict, {"float16": 2}.': 'Un dict, {"float16": 2}.',
    }.items():
        catalogue.add(text, its)
    folder = tmp_path / "fr" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    for name in ("course", "minicache"):
        with (folder / f"{name}.mo").open("wb") as file:
            write_mo(file, catalogue)
    monkeypatch.setattr(language, "LOCALE", tmp_path)
    monkeypatch.setattr(language, "_shown", {})
    monkeypatch.setenv("LANGUAGE", "fr")
    language.in_use.cache_clear()
    yield
    language.in_use.cache_clear()


@pytest.mark.usefixtures("speak")
def test_a_text_is_english_and_is_shown_in_the_readers_language() -> None:
    got = language.said("{got}, expected a tensor", got="a list")
    assert got == "a list, expected a tensor"
    assert language.translated(got) == "une liste, attendu : un tenseur"
    both = language.joined("; ", [language.said("{count} of {total} differ", count=3, total=8), got])
    line = language.labelled("called", both)
    assert line == "called    3 of 8 differ; a list, expected a tensor"
    assert language.translated(line) == "appelé    sur 8, 3 diffèrent; une liste, attendu : un tenseur"
    cut = language.combined(lambda text: f"{text[:6]} …", got)
    assert (cut, language.translated(cut)) == ("a list …", "une li …")


@pytest.mark.usefixtures("speak")
@pytest.mark.parametrize(
    ("told", "translated"),
    [
        ('A dict, {"float16": 2}.', 'Un dict, {"float16": 2}.'),
        ("ValueError: a list", "ValueError: a list"),
        ("3 of 8 differ", "3 of 8 differ"),  # not said here
        ("", ""),
        ("docs/en/index.md", "docs/fr/index.md"),
    ],
)
def test_a_text_that_was_not_put_together(told: str, translated: str) -> None:
    assert language.translated(told) == translated


@pytest.mark.usefixtures("speak")
def test_a_name_is_no_word() -> None:
    assert language.translated(language.said("{got}, expected a tensor", got="Store")) == "Store, attendu : un tenseur"


@pytest.mark.usefixtures("speak")
def test_another_process_takes_over_what_was_said() -> None:
    text = language.said("{got}, expected a tensor", got=3)
    told = language.translations(text, "a list")
    language._shown.clear()
    language.remember(told)
    assert language.translated(text) == "3, attendu : un tenseur"


@pytest.mark.usefixtures("speak")
def test_the_f_strings_of_a_marked_module_are_said(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""What it is for."""\n\nfrom __future__ import annotations\n\nfrom minicache_course.language import said\n\n'
        "def tell(items: list[int], big: bool) -> str:\n"
        """    return f"{len(items)!r:>2} numbers, {said('large') if big else f'{items[0]:.1f}'}"\n"""
        '\ndef fail() -> None:\n    raise ValueError(f"{tell([1], True)}")\n',
        encoding="utf-8",
    )
    module = templates.load(file)
    assert module.tell([1, 2], big=False) == " 2 numbers, 1.0"
    assert language.translated(module.tell([1, 2], big=True)) == " 2 numbers, grand"
    with pytest.raises(ValueError, match=" 1 numbers, large") as raised:
        module.fail()
    assert raised.traceback[-1].lineno == 10  # counted from 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["hint"], "Falta N.K."),
        (["grade", "--labz", "1"], "No existe la opción --labz. ¿Querías decir --labs?"),
        (["grade", "1", "2"], "Esto sobra: 2"),
        (["simulate", "--rate"], "--rate necesita un valor."),
        (["grad"], "No hay ningún comando 'grad'. ¿Querías decir 'grade'?"),
    ],
)
def test_a_refusal_of_the_arguments(arguments: list[str], told: str) -> None:
    printed = run("--lang", "es", *arguments, status=2)
    assert told in printed
    assert "Usage" not in printed
