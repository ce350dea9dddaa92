"""The notebooks: current, executed from their scripts, and rendered with words for every picture."""

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))


@pytest.fixture
def notebooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("scripts.notebooks")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("scripts.notebook_pages")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_current_and_runs(notebooks: ModuleType, name: str) -> None:
    script = ROOT / "notebooks" / f"{name}.py"
    notebooks.assert_current(script)
    executed = notebooks.run(script)
    assert all(cell.execution_count for cell in executed.cells if cell.cell_type == "code" and cell.source)


@pytest.fixture(params=NOTEBOOKS)
def cells(notebooks: ModuleType, request: pytest.FixtureRequest) -> list:
    return notebooks.read(ROOT / "notebooks" / f"{request.param}.py").cells


LINES, COLUMNS = 35, 100
"""A screen, of a notebook and of the page that is made of it."""


def test_no_cell_is_longer_than_a_screen(cells) -> None:
    for cell in cells:
        lines = cell.source.splitlines()
        if cell.cell_type == "code":
            too_wide = [line for line in lines if len(line) > COLUMNS]
            assert not too_wide, f"more than {COLUMNS} columns: {too_wide}"
        shown = sum(max(1, -(-len(line) // COLUMNS)) for line in lines)  # text is wrapped
        assert shown <= LINES, f"{shown} lines, from {lines[0]!r}"


def test_a_notebook_opens_with_its_question_and_a_picture(cells) -> None:
    question, picture = cells[:2]
    assert question.cell_type == "markdown"
    assert question.source.startswith("# Phase ")
    assert "?" in question.source
    assert picture.cell_type == "code"
    assert picture.source.startswith("MINE = False")
    before, begin, after = picture.source.partition("nb.begin(")
    assert begin
    assert re.findall(r"^.*minicache.*$", before, re.M) == ["from minicache_course import notebook as nb"]
    assert "minicache" in after  # a learner's module is found only if it was not imported before
    assert picture.metadata["alt"]


def test_a_notebook_ends_with_an_experiment_of_the_learners_own(cells) -> None:
    headings = [number for number, cell in enumerate(cells) if re.search(r"^## ", cell.source, re.M)]
    instructions, experiment, outcome = cells[headings[-1] :]
    assert "## Your experiment: " in instructions.source
    assert "write down" in " ".join(instructions.source.lower().split())
    assert "YOUR_PREDICTION" in experiment.source
    assert experiment.metadata["alt"]
    assert outcome.source.startswith("**What to look for.**")


def test_plotting_is_not_in_the_notebooks() -> None:
    """It is in minicache_course.notebook, once."""
    for name in NOTEBOOKS:
        assert "matplotlib" not in (ROOT / "notebooks" / f"{name}.py").read_text(encoding="utf-8"), name


def test_the_notebook_for_a_borrowed_gpu_is_clean_and_current() -> None:
    """No one runs it here: no outputs, code that compiles, and the script that it starts is there."""
    notebook = json.loads((ROOT / "notebooks" / "colab" / "gpu.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    source = "\n".join("".join(cell["source"]) for cell in cells)
    plain = re.sub(r"^( *)[!%].*", r"\1pass", source, flags=re.MULTILINE)
    compile(plain, "gpu.ipynb", "exec")
    (script,) = re.findall(r"!python -m ([\w.]+)", source)
    assert (ROOT / script.replace(".", "/")).with_suffix(".py").is_file()


SCRIPT = """# %% [markdown]
# # A title
#
# Half of $x^2$.

# %%
print("\\x1b[1mhello\\x1b[0m")

# %% {alt}
from minicache_course import notebook as nb
nb.begin(0)
nb.bars({"free": 1_000, "in use": 7}, "a & b")
"""

CATALOGUE = """
msgid "free"
msgstr "libres, que no usa nadie"

msgid "in use"
msgstr "en uso"
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list:
    """The cells of SCRIPT, executed: a kernel takes a second to start."""
    script = tmp_path_factory.mktemp("executed") / "tiny.py"
    script.write_text(SCRIPT.replace("{alt}", ""), encoding="utf-8")
    return importlib.import_module("scripts.notebooks").run(script).cells


@pytest.fixture
def write(notebooks: ModuleType, tmp_path: Path, executed: list):
    import nbformat  # takes a while, for which no other test's worker should wait

    def write(alt: str = 'alt="two bars"') -> Path:
        script = tmp_path / "tiny.py"
        script.write_text(SCRIPT.replace("{alt}", alt), encoding="utf-8")
        notebook = notebooks.read(script)
        for cell, done in zip(notebook.cells, executed, strict=True):
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = done.outputs, done.execution_count
        nbformat.write(notebook, script.with_suffix(".ipynb"))
        return script

    return write


def test_rendered_page_has_text_output_and_a_described_picture(pages: ModuleType, write) -> None:
    files = pages.render(write().with_suffix(".ipynb"))
    page = files.pop("notebook.md")
    (picture,) = files
    assert set(words_of(files[picture])) >= {"free", "in use", "1,000", "a & b"}
    assert f"![two bars]({picture})" in page
    assert "\nhello\n```" in page  # without the terminal's colours
    assert "# A title\n" in page


def test_a_pages_first_screen_is_the_question_and_the_picture(pages: ModuleType, notebooks: ModuleType) -> None:
    page = pages.render(ROOT / "notebooks" / f"{NOTEBOOKS[0]}.ipynb")["notebook.md"]
    places = [page.index(part) for part in ("\n# Phase 0", "\n![", "This page is a notebook", "```python\nMINE")]
    assert places == sorted(places)


def test_a_picture_without_words_is_refused(pages: ModuleType, write) -> None:
    with pytest.raises(pages.NotebookError, match="alt"):
        pages.render(write(alt="").with_suffix(".ipynb"))


SPANISH = "---\nenglish: 0123\n---\n%% text\n# Un título\n\nLa mitad de $x^2$.\n\n%% alt\ndos barras\n"


@pytest.fixture
def catalogue(pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The words of the plot in Spanish."""
    (file := tmp_path / "figures.po").write_text(CATALOGUE, encoding="utf-8")
    monkeypatch.setattr(pages.labels, "CATALOGUE", file)
    monkeypatch.setattr(pages.labels, "seen", set())
    pages.labels.catalogue.cache_clear()
    yield file
    pages.labels.catalogue.cache_clear()


def test_a_page_in_spanish_has_the_code_and_the_outputs(pages: ModuleType, write, catalogue: Path) -> None:
    files = pages.render(write().with_suffix(".ipynb"), SPANISH)
    page = files.pop("notebook.md")
    assert "# Un título\n" in page
    assert "# A title" not in page
    assert "\nhello\n```" in page
    assert f"![dos barras]({next(iter(files))})" in page


def test_a_plot_on_a_page_in_spanish_has_spanish_words_and_room_for_them(
    pages: ModuleType, write, catalogue: Path
) -> None:
    notebook = write().with_suffix(".ipynb")
    (english,), (spanish,) = (
        [content for name, content in pages.render(notebook, words).items() if name.endswith(".svg")]
        for words in (None, SPANISH)
    )
    assert {"libres, que no usa nadie", "en uso", "1\u202f000", "a & b"} <= set(words_of(spanish))
    assert not {"free", "in use", "1,000"} & set(words_of(spanish))
    (_, _, before, _), (left, _, width, _) = map(view_of, (english, spanish))
    assert left < 0
    assert width == pytest.approx(before - left)


def test_a_plots_words_without_spanish_are_named(pages: ModuleType, write, catalogue: Path) -> None:
    notebook = write().with_suffix(".ipynb")
    catalogue.write_text(CATALOGUE.replace("en uso", ""), encoding="utf-8")
    with pytest.raises(pages.NotebookError, match=r'a plot has words .*figures\.po:\nmsgid "in use"$'):
        pages.render(notebook, SPANISH)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_plots_words_are_its_catalogues(pages: ModuleType, name: str) -> None:
    """Each is Spanish, or the same in both languages on purpose; and none of the pictures is heavy."""
    words = (ROOT / "docs" / "es" / name / "notebook.md").read_text(encoding="utf-8")
    pictures = pages.render(ROOT / "notebooks" / f"{name}.ipynb", words)
    assert pictures.pop("notebook.md")
    assert pictures
    for picture in pictures.values():
        assert len(picture) < 150_000
        assert min(map(float, re.findall(r"font-size: ([\d.]+)px", picture))) >= 9


def words_of(picture: str) -> list[str]:
    return [text.text for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def view_of(picture: str) -> list[float]:
    return [float(part) for part in ElementTree.fromstring(picture).attrib["viewBox"].split()]


@pytest.mark.parametrize("spanish", ["%% text\n# Un título\n", "%% alt\ndos barras\n\n%% text\n# Un título\n", ""])
def test_spanish_words_for_other_cells_are_refused(pages: ModuleType, write, spanish: str) -> None:
    with pytest.raises(pages.NotebookError, match="text alt; the Spanish ones are"):
        pages.render(write().with_suffix(".ipynb"), spanish)


def test_executing_twice_writes_the_same_file(notebooks: ModuleType, write) -> None:
    import nbformat

    notebook = (script := write()).with_suffix(".ipynb")
    first = notebook.read_bytes()
    nbformat.write(notebooks.run(script), notebook)
    assert notebook.read_bytes() == first


def test_a_stale_notebook_is_noticed(notebooks: ModuleType, write) -> None:
    script = write()
    notebooks.assert_current(script)
    script.write_text(script.read_text(encoding="utf-8").replace("hello", "bye"), encoding="utf-8")
    with pytest.raises(notebooks.NotebookError, match="execute"):
        notebooks.assert_current(script)
    script.with_suffix(".ipynb").unlink()
    with pytest.raises(notebooks.NotebookError, match="missing"):
        notebooks.assert_current(script)
