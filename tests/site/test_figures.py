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
    names = {name.split(".")[0] for name in drawn}
    assert drawn == {f"{name}.{scheme}.svg" for name in names for scheme in ("light", "dark")}


def test_an_unknown_figure_script_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    main = importlib.import_module("scripts.figures.__main__")
    with pytest.raises(SystemExit, match="phase_99"):
        main.painters(["phase_99"])
    assert "site" in main.painters([])
    assert "style" not in main.painters([])
