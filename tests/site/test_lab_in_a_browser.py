"""The lab on a handout's page, in headless Chromium: tasks are written, run and told as on the command line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.browser.command_line import ROOT, on_the_command_line
from tests.site.chromium import Chromium

from minicache_course.server import PytestServer
from minicache_course.table import load_course
from minicache_course.workspace import reference_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the site may have to be built first

AXE = Path(__file__).with_name("axe") / "axe.min.js"
BATCHING = "phase-05-continuous-batching/lab/00-the-scheduler/"
STAGES = "phase-05-continuous-batching/lab/02-two-stages/"
PADDING = "phase-02-fragmentation/lab/00-padding-and-buddies/"
BASE = "labs/phase-05-continuous-batching/scheduler/base.py"
PHASE_2 = load_course(ROOT / "labs" / "course.toml").phase(2)
RESERVATION = "labs/phase-02-fragmentation/memory/reservation.py"
ROWS = "    return len(lengths) * max(lengths)\n"
SOLVED = reference_file("minicache.memory.reservation").read_text(encoding="utf-8")
TOLD = """(() => {
  const texts = (within, selector) => [...within.querySelectorAll(selector)].map((each) => each.textContent);
  const results = document.querySelector(".mc-results");
  const lines = (within) => texts(within, ":scope > .mc-line").map((text) => text.replace("\\u00a0", ""));
  return {
    rows: [...results.querySelectorAll("tbody tr")].map((row) => texts(row, "td")),
    problems: [...results.querySelectorAll(".mc-problem")].map((each) => [texts(each, "h3")[0], ...lines(each)]),
    end: lines(results),
  };
})()"""


class Lab:
    """The panel: what a learner would press, and what it says."""

    def __init__(self, browser: Chromium, address: str) -> None:
        self.browser, self.address = browser, address

    def open(self, page: str, *, anew: bool = True) -> None:
        self.browser.open(self.address + page)
        if anew:
            self.browser.evaluate("localStorage.clear()")
        self.browser.requests.clear()
        self.browser.open(self.address + page)
        assert not [url for url in self.browser.requests if "/assets/browser/" in url]
        self.browser.evaluate("document.querySelector('.mc-open button').click()")
        self.browser.wait_for("document.querySelector('.mc-lab .cm-content')")

    def click(self, name: str) -> None:
        find = f"[...document.querySelectorAll('.mc-lab button')].find((each) => each.textContent === '{name}')"
        self.browser.evaluate(f"{find}.click()")

    def write(self, text: str) -> None:
        """Put a text in the place of all that the editor has."""
        self.browser.evaluate("document.querySelector('.cm-content').focus()")
        self.browser.press("a", control=True)
        self.browser.type(text)

    def run(self) -> dict[str, Any]:
        """What the page shows of a run."""
        self.click("Run tests")
        self.browser.wait_for("!document.querySelector('.mc-run').disabled", 120)
        return dict(self.browser.evaluate(TOLD))

    def says(self) -> str:
        return str(self.browser.evaluate("document.querySelector('.mc-status').textContent"))

    def stored(self, path: str) -> str | None:
        kept = self.browser.evaluate(f"localStorage.getItem('minicache/{path}')")
        return None if kept is None else str(kept)


@pytest.fixture(scope="module")
def lab(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Chromium(tmp_path_factory.mktemp("profile"), "--window-size=1400,950") as browser:
        yield Lab(browser, address)


@pytest.fixture(scope="module")
def server() -> Iterator[PytestServer]:
    with PytestServer(["hypothesis"]) as server:
        yield server


def as_shown(account: dict[str, Any]) -> dict[str, Any]:
    """An account as the panel has it."""
    return {
        "rows": [
            [
                row["id"],
                row["title"],
                f"{row['num_passed']}/{row['num_tests']}",
                f"{row['earned']}/{row['points']}",
                row["told"],
            ]
            for row in account["rows"]
        ],
        "problems": [
            [problem["title"], *(line["label"] + line["text"] for line in problem["lines"])]
            for problem in account["problems"]
        ],
        "end": [line["text"] for line in account["end"]],
    }


def test_from_the_untouched_starter_to_all_points(lab: Lab, server: PytestServer, tmp_path: Path) -> None:
    lab.open(BATCHING)
    starter = (ROOT / BASE).read_text(encoding="utf-8")
    solved = reference_file("minicache.scheduler.base").read_text(encoding="utf-8")
    for name, text in (("starter", starter), ("solved", solved)):
        if name == "solved":
            lab.write(text)
            assert lab.stored(BASE) == text
        (folder := tmp_path / name).mkdir()
        assert lab.run() == as_shown(on_the_command_line(folder, server, 5, 1, {BASE: text}))
    assert lab.says() == "Task 5.1 has passed."
    hosts = {urlsplit(url).netloc for url in lab.browser.requests if not url.startswith(("data:", "blob:"))}
    assert hosts == {urlsplit(lab.address).netloc}


def test_mistakes_are_told_as_on_the_command_line(lab: Lab, server: PytestServer, tmp_path: Path) -> None:
    lab.open(PADDING)
    mistakes = {
        "wrong value": "    return sum(lengths)\n",
        "exception": "    print('here')\n    return lengths[99]\n",
        "syntax error": "    return (\n",
        "endless loop": "    while True: pass\n",
    }
    for name, mistake in mistakes.items():
        files = {RESERVATION: SOLVED.replace(ROWS, mistake, 1)}
        lab.write(files[RESERVATION])
        (folder := tmp_path / name).mkdir()
        assert lab.run() == as_shown(on_the_command_line(folder, server, 2, 1, files)), name
        if name == "wrong value":
            read = lab.browser.evaluate("document.querySelector('.mc-problem a').href")
            assert read.startswith(lab.address + "phase-02-fragmentation/")
        else:
            lab.browser.evaluate("document.querySelector('.mc-problem .mc-line button').click()")
            lab.browser.wait_for("document.querySelectorAll('.cm-lint-marker-error').length === 1", 5)


def test_undo_does_not_bring_the_text_of_another_file(lab: Lab) -> None:
    lab.open(STAGES)
    static, continuous = (BASE.replace("base.py", name) for name in ("static.py", "continuous.py"))
    lab.write("x = 1")
    assert lab.stored(static) == "x = 1"
    lab.click(continuous)
    lab.browser.evaluate("document.querySelector('.cm-content').focus()")
    lab.browser.press("z", control=True)
    assert lab.stored(continuous) is None
    lab.browser.type("y")
    lab.browser.press("z", control=True)
    assert lab.stored(continuous) is None
    assert lab.stored(static) == "x = 1"


def test_a_task_stands_on_the_files_of_the_tasks_before_it(lab: Lab) -> None:
    lab.open(STAGES)
    static = reference_file("minicache.scheduler.static").read_text(encoding="utf-8")
    lab.write(static)
    assert lab.run()["rows"][0][-1] == "needs 5.1 first"
    base = reference_file("minicache.scheduler.base").read_text(encoding="utf-8")
    lab.browser.evaluate(f"localStorage.setItem('minicache/{BASE}', {json.dumps(base)})")
    assert lab.run()["rows"][0][-1] == "passed"


def test_a_run_can_be_stopped(lab: Lab) -> None:
    lab.open(PADDING)
    lab.write(SOLVED.replace(ROWS, "    while True: pass\n", 1))
    lab.click("Run tests")
    lab.browser.wait_for("/^1 of /.test(document.querySelector('.mc-status').textContent)")
    lab.click("Stop")
    lab.browser.wait_for("document.querySelector('.mc-status').textContent === 'Stopped.'", 5)
    lab.write(SOLVED)
    assert lab.run()["rows"][0][-1] == "passed"


def test_work_is_kept_exported_imported_and_put_back(lab: Lab) -> None:
    lab.open(PADDING)
    lab.write("mine = 1\n")
    lab.open(PADDING, anew=False)
    lab.browser.evaluate("""
      globalThis.exported = {};
      URL.createObjectURL = (blob) => (blob.text().then((text) => (exported.text = text)), "about:blank#");
      HTMLAnchorElement.prototype.click = function () { exported.name = this.download; };
    """)
    lab.click("Download")
    lab.browser.wait_for("exported.text")
    assert lab.browser.evaluate("exported") == {"name": "reservation.py", "text": "mine = 1\n"}
    chosen = """(() => {
      const files = new DataTransfer(), input = document.querySelector(".mc-lab input[type=file]");
      files.items.add(new File([%s], %s));
      input.files = files.files;
      input.dispatchEvent(new Event("change"));
    })()"""
    lab.browser.evaluate(chosen % (json.dumps("other = 2\n"), json.dumps("other.py")))
    lab.browser.wait_for("document.querySelector('.mc-status').textContent.startsWith('other.py is not one of')")
    assert lab.stored(RESERVATION) == "mine = 1\n"
    lab.browser.evaluate("globalThis.confirm = (question) => ((globalThis.asked = question), false)")
    lab.browser.evaluate(chosen % (json.dumps("theirs = 3\n"), json.dumps("reservation.py")))
    lab.browser.wait_for("globalThis.asked")
    assert lab.browser.evaluate("asked") == f"Replace {RESERVATION}, which this browser keeps?"
    assert lab.stored(RESERVATION) == "mine = 1\n"
    lab.browser.evaluate("globalThis.confirm = () => true")
    lab.browser.evaluate(chosen % (json.dumps("theirs = 3\n"), json.dumps("reservation.py")))
    lab.browser.wait_for("document.querySelector('.mc-status').textContent.endsWith('has been imported.')")
    assert lab.stored(RESERVATION) == "theirs = 3\n"
    lab.click("Reset")
    assert lab.stored(RESERVATION) is None
    assert "not written" in lab.run()["rows"][0]


def test_what_a_full_browser_does_not_keep_is_what_runs(lab: Lab) -> None:
    lab.open(PADDING)
    lab.write("mine = 1\n")
    lab.browser.evaluate("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    lab.write(SOLVED)
    assert lab.run()["rows"][0][-1] == "passed"
    assert lab.says().endswith("This browser keeps nothing: download your file before you leave.")


def test_what_another_tab_writes_is_in_the_editor(lab: Lab) -> None:
    lab.open(PADDING)
    lab.write("mine = 1\n")
    lab.browser.evaluate(f"""
      document.body.appendChild(document.createElement("iframe"))
        .contentWindow.localStorage.setItem("minicache/{RESERVATION}", "theirs = 2");
    """)
    lab.browser.wait_for("document.querySelector('.cm-content').textContent === 'theirs = 2'", 5)


def test_after_a_pass_it_leads_on(lab: Lab) -> None:
    lab.open(PADDING)
    ways = []
    for _ in range(5):
        lab.write(SOLVED)
        lab.run()
        way = "(({ href, textContent }) => [href ?? null, textContent])(document.querySelector('.mc-next'))"
        ways.append(lab.browser.evaluate(way))
        if ways[-1][0]:
            break
        lab.browser.evaluate("document.querySelector('.mc-next').click()")
    tasks = [task for task in PHASE_2.tasks if task.page.endswith("/00-padding-and-buddies.md")]
    following = PHASE_2.tasks[len(tasks)]
    assert [text for _, text in ways] == [
        f"Next: {task.id} {task.title} →" for task in PHASE_2.tasks[1 : len(tasks) + 1]
    ]
    assert ways[-1][0] == lab.address + following.page.removeprefix("docs/en/").removesuffix(".md") + "/"


def test_control_and_enter_run_the_tests(lab: Lab) -> None:
    lab.open(PADDING)
    lab.write(SOLVED)
    lab.browser.press("Enter", control=True)
    lab.browser.wait_for("document.querySelector('.mc-status').textContent.endsWith('has passed.')", 120)
    assert lab.stored(RESERVATION) == SOLVED


def test_the_panel_leaves_room_for_the_handout(lab: Lab) -> None:
    lab.open(PADDING)
    for width in (960, 1024, 1200, 1400):
        lab.browser.resize(width, 800)
        text, panel = (
            lab.browser.evaluate(f"document.querySelector('{each}').getBoundingClientRect().{side}")
            for each, side in (("article", "right"), (".mc-lab", "left"))
        )
        assert text <= panel, f"{width} pixels"


def test_hints_come_one_by_one(lab: Lab) -> None:
    lab.open(PADDING)
    shown = []
    for _ in range(4):
        lab.click("Hint")
        shown.append(lab.browser.evaluate("document.querySelectorAll('.mc-results li').length"))
    assert shown == [1, 2, 3, 4]


def test_the_keyboard_leaves_the_editor(lab: Lab) -> None:
    lab.open(PADDING)
    is_inside = "document.activeElement.closest('.cm-editor') !== null"
    lab.browser.evaluate("document.querySelector('.cm-content').focus()")
    lab.browser.press("Tab")
    assert lab.browser.evaluate(is_inside)
    lab.browser.press("Escape")
    lab.browser.press("Tab")
    assert not lab.browser.evaluate(is_inside)
    assert lab.browser.evaluate("document.activeElement.closest('.mc-lab') !== null")
    lab.click("Close")
    assert lab.browser.evaluate("document.activeElement.textContent") == "Open in the browser"


def test_the_panel_has_no_serious_fault_of_accessibility(lab: Lab) -> None:
    lab.open(PADDING)
    lab.write(SOLVED.replace(ROWS, "    return sum(lengths)\n", 1))
    lab.run()
    lab.browser.evaluate(AXE.read_text(encoding="utf-8") + "; undefined")
    for width in (1400, 360):
        lab.browser.resize(width, 800)
        edges = "(({ left, right }) => [left, right])(document.querySelector('.mc-lab').getBoundingClientRect())"
        left, right = lab.browser.evaluate(edges)
        assert left >= 0
        assert right <= width
        assert lab.browser.evaluate("document.querySelector('.mc-lab').scrollWidth") <= right - left
        for scheme in ("default", "slate"):
            lab.browser.evaluate(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
            run = "axe.run('.mc-lab', { resultTypes: ['violations'] }).then((all) => all.violations)"
            assert [
                (fault["id"], fault["nodes"][0]["html"][:200], scheme, width)
                for fault in lab.browser.evaluate(run)
                if fault["impact"] in ("serious", "critical")
            ] == []
