"""The first minute, in headless Chromium: the home page's button, one line, its verdict, and what comes next."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.browser import first
from tests.site.chromium import Chromium

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the site may have to be built first

AXE = Path(__file__).with_name("axe") / "axe.min.js"
WRONG = "self.block_ids[position // block_size]"
RIGHT = f"{WRONG} * block_size + position % block_size"
MAX_WORDS = 60
ABOVE_THE_FOLD = """(() => {
  const texts = document.createTreeWalker(document.querySelector(".md-content"), NodeFilter.SHOW_TEXT);
  const words = [];
  while (texts.nextNode()) {
    const place = document.createRange();
    place.selectNodeContents(texts.currentNode);
    const { height, top } = place.getBoundingClientRect();
    const isSeen = height && top < innerHeight && !texts.currentNode.parentElement.closest("script, .headerlink");
    if (isSeen) words.push(...texts.currentNode.textContent.split(/\\s+/).filter(Boolean));
  }
  const inSight = (each) => each.checkVisibility() && each.getBoundingClientRect().top < innerHeight;
  const buttons = [...document.querySelectorAll(".md-content :is(button, .md-button)")].filter(inSight);
  return [words, buttons.length];
})()"""

PLACES = """JSON.stringify([...document.querySelectorAll(".first .token")].map((token) => {
  const { x, y } = token.getBoundingClientRect();
  const under = (each) => Math.hypot(each.getBoundingClientRect().x - x, each.getBoundingClientRect().y - y) < 2;
  const slot = [...document.querySelectorAll(".first rect.slot")].find(under);
  return Number(slot?.nextElementSibling?.textContent);
}))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile"), "--window-size=1440,900") as browser:
        yield browser


def text(browser: Chromium, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector('{selector}').innerText"))


def answer(browser: Chromium, line: str) -> str:
    """Write the line in the place of what is there, press Enter; the verdict."""
    browser.wait_for("!document.querySelector('.first form .md-button').disabled")
    browser.evaluate("document.querySelector('.first input').select()")
    browser.type(line)
    browser.press("Enter")
    browser.wait_for("document.querySelector('.first form .md-button').disabled")
    browser.wait_for("/ 30 /.test(document.querySelector('.first .mc-status').innerText)", 120)
    return text(browser, ".first .mc-status")


@pytest.mark.parametrize(
    ("language", "verdict", "expected"),
    [
        ("", "{} of 30 tests pass.", "expected"),
        ("es/", "Pasan {} de 30 tests.", "esperado"),
    ],
    ids=["English", "Spanish"],
)
def test_a_visitor_writes_a_line(browser: Chromium, address: str, language: str, verdict: str, expected: str) -> None:
    browser.open(address + language)
    browser.evaluate("localStorage.clear()")
    browser.requests.clear()
    browser.open(address + language)
    words, num_buttons = browser.evaluate(ABOVE_THE_FOLD)
    assert len(words) <= MAX_WORDS
    assert num_buttons == 1
    assert not [url for url in browser.requests if "pyodide" in url or ".zip" in url or "route." in url]

    browser.evaluate("document.querySelector('.first .opener button').click()")
    assert answer(browser, WRONG) == verdict.format(27)
    assert browser.evaluate("document.activeElement.matches('.first input')")  # to write the line again
    shown = text(browser, ".first .mc-results").split()
    assert shown[-3:] == ["7", expected, "28"]
    assert not browser.evaluate("document.querySelector('.first .next').checkVisibility()")

    assert answer(browser, f"return {RIGHT}") == verdict.format(30)  # the word that stands before the line
    assert browser.evaluate("document.querySelector('.first form .md-button').disabled")  # there is nothing left to run
    slots = [28, 29, 30, 31, 8, 9, 10, 11, 20, 21]
    browser.wait_for(f"{PLACES} === '{json.dumps(slots, separators=(',', ':'))}'", 10)
    assert browser.evaluate("document.querySelector('.first .next').checkVisibility()")
    link = "document.querySelector('.first .next a').href"
    assert browser.evaluate(link) == f"{address}{language}phase-00-decode-arithmetic/lab/00-derive-cache-size/"


def test_the_line_is_the_references() -> None:
    task = first.line_to_write()
    assert task["file"] == "labs/phase-03-paged-cache/memory/blocks.py"
    source = task["before"] + RIGHT + task["after"]
    assert source == (first.ROOT / "src" / "minicache" / "memory" / "blocks.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "here", "following"),
    [("", "You are here: 0.6", "Next: 1.1"), ("es/course-map/", "Estás aquí: 0.6", "Sigue: 1.1")],
)
def test_who_comes_back_is_told_where_they_are(
    browser: Chromium, address: str, page: str, here: str, following: str
) -> None:
    browser.open(address + page)
    passed = {f"minicache/passed/{task}": when for task, when in [("5.1", "2026-01-01"), ("0.6", "2026-02-01")]}
    browser.evaluate(f"localStorage.clear(); Object.assign(localStorage, {json.dumps(passed)})")
    browser.open(address + page)
    browser.wait_for("!document.querySelector('#here').hidden")
    told = text(browser, "#here")
    assert told.startswith(here)
    assert following in told
    language = "es/" if page.startswith("es/") else ""
    link = "document.querySelectorAll('#here a')[1].href"
    assert browser.evaluate(link) == f"{address}{language}phase-01-dense-cache/lab/00-attention/"


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_the_open_task_has_no_serious_fault_of_accessibility(
    browser: Chromium, address: str, scheme: str, width: int
) -> None:
    browser.open(address)
    browser.resize(width, 844)
    browser.evaluate(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
    browser.evaluate("document.querySelector('.first .opener button').click()")
    browser.wait_for("!document.querySelector('.first form .md-button').disabled")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.evaluate(AXE.read_text(encoding="utf-8") + "; undefined")
    run = "axe.run('.first', { resultTypes: ['violations'] }).then((all) => all.violations)"
    faults = browser.evaluate(run)
    assert [fault["id"] for fault in faults if fault["impact"] in ("serious", "critical")] == []
