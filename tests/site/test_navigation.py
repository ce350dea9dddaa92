"""The footer's Next leads to what comes next in the work: the navigation has the order that the pages give."""

import re
from itertools import pairwise
from pathlib import Path, PurePosixPath
from posixpath import normpath

import pytest
import yaml
from tests.site.conftest import leaves

from minicache_course.table import Phase, load_course

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "en"
LINK = re.compile(r"\]\(([^)#]+\.md)[^)]*\)")
NAV = list(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
COURSE = load_course(ROOT / "labs" / "course.toml")
each_phase = pytest.mark.parametrize("phase", COURSE.phases, ids=lambda phase: phase.folder)


def linked(page: str, text: str) -> list[str]:
    """The pages that a text on `page` links to, each once, in their order."""
    folder = PurePosixPath(page).parent
    return list(dict.fromkeys(normpath(str(folder / link)) for link in LINK.findall(text)))


def order(phase: Phase) -> list[str]:
    """A phase's pages in the order to go in, as its first page has it."""
    first = f"{phase.folder}/index.md"
    text = (PAGES / first).read_text("utf-8")
    section = text.split("\n## The order to go in\n")[1].split("\n## ")[0]
    return [first, *(page for page in linked(first, section) if page in NAV)]


def pages_of(phase: Phase) -> list[str]:
    return [page for page in NAV if page.startswith(f"{phase.folder}/")]


@each_phase
def test_the_navigation_has_the_order_to_go_in(phase: Phase) -> None:
    assert pages_of(phase) == order(phase)


@each_phase
def test_the_labs_stand_in_the_order_of_their_tasks(phase: Phase) -> None:
    of_tasks = list(dict.fromkeys(task.page.removeprefix("docs/en/") for task in phase.tasks))
    assert [page for page in pages_of(phase) if page in of_tasks] == of_tasks


def test_what_a_page_calls_next_is_next_in_the_navigation() -> None:
    wrong = []
    for page, following in pairwise(NAV):
        if not (PAGES / page).is_file():  # a notebook's page is rendered
            continue
        said = re.findall(r"^Next\b.*?(?=\n\n|\Z)", (PAGES / page).read_text("utf-8"), re.M | re.S)
        if said and following not in linked(page, said[-1]):
            wrong.append(f"{page}: {said[-1]} The navigation has {following}")
    assert wrong == []
