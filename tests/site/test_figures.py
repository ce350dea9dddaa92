"""Drawing: two schemes, the palette's colours, and the same bytes each time."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from minicache.palette import color

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def style(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("scripts.figures.style")
    monkeypatch.setattr(module, "FIGURES", tmp_path)
    return module


def paint(style: ModuleType, name: str = "cells") -> None:
    def cells(figure, scheme):
        diagram = style.Diagram(figure, scheme, width=8, height=3)
        diagram.row(0, 0, ["I", "worked"], ["prompt", "generated"], width=2)
        diagram.arrow((1, 1), (3, 2), "then", bend=0.2)
        diagram.span(0, 4, 1.5, "two tokens")
        diagram.legend(["prompt", "generated"], 0, 2.4)

    style.draw(name, cells, size=(4, 1.5))


def test_each_scheme_has_its_shades(style: ModuleType, tmp_path: Path) -> None:
    paint(style)
    for scheme, other in (("light", "dark"), ("dark", "light")):
        picture = (tmp_path / f"cells.{scheme}.svg").read_text(encoding="utf-8").lower()
        assert color("prompt", scheme).lower() in picture
        assert color("prompt", other).lower() not in picture


def test_drawing_again_changes_nothing(style: ModuleType, tmp_path: Path) -> None:
    paint(style)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    paint(style)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_a_plot_is_drawn_on_no_ground(style: ModuleType, tmp_path: Path) -> None:
    def line(figure, scheme):
        style.plot(figure, xlabel="batch", ylabel="FLOP per byte").plot([1, 2], [3, 4])

    style.draw("line", line)
    assert "fill: #ffffff" not in (tmp_path / "line.light.svg").read_text(encoding="utf-8")


def test_every_figure_has_both_schemes() -> None:
    drawn = {path.name for path in (ROOT / "docs" / "shared" / "figures").glob("*.svg")}
    names = {name.removesuffix(".svg").removesuffix(".light").removesuffix(".dark") for name in drawn}
    assert drawn == {f"{name}.{scheme}.svg" for name in names for scheme in ("light", "dark")}
    assert {name.removesuffix(".es") for name in names} <= names, "a Spanish figure without an English one"


@pytest.fixture
def spanish(style: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The words of `paint` in a catalogue, but for one; the figure's labels."""
    labels = style.labels
    (tmp_path / "figures.po").write_text(
        'msgid "then"\nmsgstr "después"\n\nmsgid "{} tokens of {}"\nmsgstr "{} tokens"\n\n'
        'msgid "gone"\nmsgstr "ya no"\n\nmsgid "batch"\nmsgstr ""\n',
        encoding="utf-8",
    )
    monkeypatch.setattr(labels, "CATALOGUE", tmp_path / "figures.po")
    monkeypatch.setattr(labels, "seen", set())
    labels.catalogue.cache_clear()
    yield labels
    labels.catalogue.cache_clear()


def test_words_in_the_catalogue_are_drawn_in_spanish_too(
    spanish: ModuleType, style: ModuleType, tmp_path: Path
) -> None:
    paint(style)
    english, other = (tmp_path / f"cells.{name}light.svg" for name in ("", "es."))
    assert "<!-- then -->" in english.read_text(encoding="utf-8")
    assert "<!-- después -->" in other.read_text(encoding="utf-8")
    assert "<!-- then -->" not in other.read_text(encoding="utf-8")
    assert "<!-- worked -->" in other.read_text(encoding="utf-8")


def test_a_figure_without_translated_words_is_drawn_once(
    spanish: ModuleType, style: ModuleType, tmp_path: Path
) -> None:
    style.draw("line", lambda figure, scheme: style.plot(figure, xlabel="batch").plot([1, 2], [3, 4]))
    assert {path.name for path in tmp_path.glob("line.*")} == {"line.light.svg", "line.dark.svg"}


def test_labels_of_ticks_are_translated(spanish: ModuleType, style: ModuleType, tmp_path: Path) -> None:
    style.draw("bars", lambda figure, scheme: style.plot(figure).bar(["then", "now"], [3, 4]))
    picture = (tmp_path / "bars.es.light.svg").read_text(encoding="utf-8")
    assert "<!-- después -->" in picture
    assert "<!-- now -->" in picture


def test_numbers_are_not_part_of_an_entry(spanish: ModuleType) -> None:
    spanish.catalogue().add("{} blocks, {} free", "{} bloques, {} libres")
    assert spanish.spanish("1,024 blocks, 7 free") == "1\u202f024 bloques, 7 libres"
    assert spanish.spanish("3.5") == "3.5"
    with pytest.raises(ValueError, match="has 2 numbers"):
        spanish.spanish("3 tokens of 4")


def test_words_in_an_svg_are_translated(spanish: ModuleType) -> None:
    picture = '<style>text {{ fill: red; }}</style><text x="1" class="then">{}</text><text>A</text>'
    assert spanish.in_svg(picture.format("then")) == picture.format("después")


def test_the_catalogue_follows_the_figures(spanish: ModuleType, style: ModuleType) -> None:
    paint(style)
    spanish.update()
    spanish.catalogue.cache_clear()
    entries = {message.id: message.string for message in spanish.catalogue() if message.id}
    assert entries == {"then": "después", "two tokens": "", "worked": "", **dict.fromkeys(meanings(), "")}


def meanings() -> list[str]:
    from minicache.palette import PALETTE

    return [PALETTE[role].meaning for role in ("prompt", "generated")]


def test_an_unknown_figure_script_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    main = importlib.import_module("scripts.figures.__main__")
    with pytest.raises(SystemExit, match="phase_99"):
        main.painters(["phase_99"])
    assert "site" in main.painters([])
    assert "style" not in main.painters([])
