"""The playground in headless Chromium, on the built site: runs, steps, links, saved pictures, changed code.

One browser is used by all tests; each opens the page anew. What runs is real: Python in the page's worker.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
from tests.site.chromium import Chromium

from minicache_course.workspace import reference_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the site may have to be built first

AXE = Path(__file__).with_name("axe") / "axe.min.js"
THRASH = "workload=thrash&a=fair&b=none"
FOLLOW = """new Promise((done) => {  // hashchange comes later, and not for the address that is there
    if (location.hash === %s) return done();
    addEventListener("hashchange", () => done(), { once: true });
    location.hash = %s;
})"""
FAIR = "labs/phase-07-fairness/scheduler/fair.py"
KEY = "return request.priority, request.arrival_time"
SHORTEST_FIRST = KEY.replace("priority", "max_tokens")
SVG = "{http://www.w3.org/2000/svg}"


class Playground:
    """The page in a browser: what a reader would press, and what there is to see."""

    def __init__(self, browser: Chromium, address: str) -> None:
        self.browser, self.address = browser, address

    def open(self, link: str = "") -> None:
        """Come from elsewhere."""
        self.browser.open("about:blank")
        self.browser.requests.clear()
        self.browser.open(f"{self.address}playground/{link and '#'}{link}")
        self.wait_until_ready()

    def follow(self, link: str = "workload=six&a=static&b=continuous") -> None:
        """As `open`, without loading the page, and Python, again if they are there."""
        if "playground/" not in str(self.browser.evaluate("location.href")):
            return self.open(link)
        self.browser.evaluate(FOLLOW.replace("%s", json.dumps(f"#{link}")))
        self.wait_until_ready()
        return None

    def wait_until_ready(self) -> None:
        self.browser.wait_for("document.getElementById('playground')?.dataset.state === 'ready'", 150)

    def js(self, script: str) -> object:
        return self.browser.evaluate(
            f"(() => {{ const pg = (name) => document.querySelector(`[data-pg='${{name}}']`); {script} }})()"
        )

    def link(self) -> str:
        """What the address says, once it follows."""
        self.click("copy")
        return str(self.js("return location.hash")).removeprefix("#")

    def click(self, *names: str) -> None:
        for name in names:
            self.js(f"pg('{name}').click()")

    def text(self, name: str) -> str:
        return str(self.js(f"return pg('{name}').textContent"))

    def wait(self, condition: str) -> None:
        self.browser.wait_for(
            f"(() => {{ const pg = (name) => document.querySelector(`[data-pg='${{name}}']`); return {condition} }})()"
        )

    def run(self) -> None:
        """Run, wait for the end of the run, and go to its last step."""
        self.click("run")
        self.wait_until_ready()
        self.click("end")

    def changed(self) -> list[bool]:
        return [not self.js(f"return pg('pane-{pane}').querySelector('.pg-changed').hidden") for pane in "ab"]

    def offered(self) -> list[str]:
        """The schedulers of the reader's own files."""
        names = self.js("return [...pg('scheduler-a').querySelectorAll('optgroup option')].map(({ value }) => value)")
        return list(names)

    def keep(self, path: str, text: str | None) -> None:
        """What the lab of a handout's page does with a learner's file."""
        change = (
            f"removeItem('minicache/{path}')" if text is None else f"setItem('minicache/{path}', {json.dumps(text)})"
        )
        self.js(f"localStorage.{change}")

    def kept(self, path: str) -> str:
        return str(self.js(f"return localStorage.getItem('minicache/{path}')"))

    def choose(self, name: str, text: str) -> None:
        """Open a file of the disk."""
        file = f"new File([{json.dumps(text)}], '{name}')"
        self.js(f"""
            const chosen = new DataTransfer();
            chosen.items.add({file});
            pg('upload').files = chosen.files;
            pg('upload').dispatchEvent(new Event('change'));
        """)

    def pictures(self) -> list[str]:
        return [str(self.js(f"return pg('canvas-{pane}').toDataURL()")) for pane in "ab"]

    def number(self, name: str, pane: str = "a") -> str:
        found = f"[...pg('numbers-{pane}').children].find((entry) => entry.firstElementChild.textContent === '{name}')"
        return str(self.js(f"return {found}.lastElementChild.textContent"))

    def edit(self, find: str, replace: str) -> int:
        """Change the code in the editor; the number of the changed line."""
        self.js("pg('code').open = true")
        self.wait("pg('editor').querySelector('.cm-content') !== null && pg('file').textContent.endsWith('.py')")
        self.wait("pg('editor').querySelector('.cm-content').textContent.length > 100")
        change = """
            const view = pg('editor').querySelector('.cm-content').cmTile.view, doc = view.state.doc.toString();
            const from = doc.indexOf(%s);
            if (from < 0) throw Error('not there');
            view.dispatch({ changes: { from, to: from + %s.length, insert: %s } });
            return view.state.doc.lineAt(from).number;
        """
        return int(str(self.js(change % (json.dumps(find), json.dumps(find), json.dumps(replace)))))


@pytest.fixture(scope="module")
def page(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    with Chromium(tmp_path_factory.mktemp("profile"), "--window-size=1280,900") as browser:
        yield Playground(browser, address)


def test_nothing_is_loaded_before_the_first_run_and_no_other_host_is_asked(page: Playground) -> None:
    page.open()
    assert page.number("step") == "13 of 0–13"
    assert page.number("step", "b") == "10 of 0–10"
    asked = page.browser.requests
    assert not [url for url in asked if "pyodide" in url or "editor.js" in url or ".zip" in url]
    page.run()
    assert [url for url in asked if "pyodide" in url]
    hosts = {urlsplit(url).netloc for url in asked if not url.startswith(("data:", "blob:", "about:"))}
    assert hosts == {urlsplit(page.address).netloc}


def test_a_run_is_what_was_recorded_when_the_site_was_built(page: Playground) -> None:
    page.follow()
    before = page.pictures()
    page.run()
    assert page.pictures() == before


@pytest.mark.parametrize("link", ["workload=burst&a=paged&b=paged+swap", "workload=prefix&a=fair&b=fair+prefix"])
def test_steps_forward_and_back_give_the_same_pictures(page: Playground, link: str) -> None:
    page.follow(f"{link}&step=40")
    assert page.link() == f"{link}&step=40"
    pictures = page.pictures()
    page.click(*["forward"] * 60)
    later = page.pictures()
    assert all(one != other for one, other in zip(pictures, later, strict=True))
    page.click(*["back"] * 60)
    assert page.pictures() == pictures
    page.click("end", "start", *["forward"] * 100)
    assert page.pictures() == later
    assert page.link() == f"{link}&step=100"
    page.open(page.link())
    assert page.pictures() == later


def test_a_step_costs_a_column_however_many_are_shown(page: Playground) -> None:
    page.follow("workload=chats&a=static&b=none&slots=8&step=10")
    page.js("""
        const fill = CanvasRenderingContext2D.prototype.fillRect;
        CanvasRenderingContext2D.prototype.fillRect = function (...area) { window.filled++; fill.apply(this, area); };
    """)
    counts = []
    for step in (10, 700):  # the second in the middle of columns that move to the left
        page.js(f"pg('position').value = {step}; pg('position').dispatchEvent(new Event('input'))")
        page.js("window.filled = 0")
        page.click("forward", "forward", "back", "forward")
        counts.append(page.js("return window.filled"))
    assert max(counts) < 4 * 80, counts  # cells of 8 slots, twice; a strip or two; blocks that change


def test_a_link_has_the_settings_that_are_not_the_workloads_own(page: Playground) -> None:
    link = "workload=chats&a=static&b=none&blocks=32&slots=4&step=100"
    page.follow(link)
    assert page.link() == link
    assert page.text("blocks-value") == "32"
    assert page.number("blocks").endswith(" of 32")
    assert page.js("return pg('pane-b').hidden")
    page.js("pg('slots').value = 0; pg('slots').dispatchEvent(new Event('input'))")
    page.wait("location.hash.includes('slots=1&')")


def test_a_counterexample_opens_at_its_last_step(page: Playground) -> None:
    """The link that `minicache verify` prints."""
    link = "workload=replay&a=paged&b=none&blocks=3&block_size=2&slots=2&budget=6"
    actions = "do=o:preemption.swap,o:num_host_blocks.3,a00.3.0,a003.2.0,s,c,s"
    page.follow(f"{link}&{actions}")
    assert page.number("step") == "1 of 0–1"
    assert page.text("told-a") == ""
    assert "preempted: 1" in page.text("summary")
    assert actions in page.link()


def test_keys_step_and_the_step_is_told(page: Playground) -> None:
    page.follow("workload=six&a=static&b=continuous&step=3")
    assert "static batching (phase 5), step 3 of 0 to 13. computes B decode; C decode" in page.text("summary")
    assert "admitted: D" in page.text("summary")
    for key, step in {"ArrowRight": "4", "ArrowLeft": "3", "End": "13", "Home": "0"}.items():
        event = f"new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}})"
        page.js(f"document.querySelector('.pg-panes').dispatchEvent({event})")
        assert page.number("step") == f"{step} of 0–13"


def test_a_saved_picture_is_well_formed_and_has_both_schemes(page: Playground) -> None:
    page.follow("workload=burst&a=continuous&b=paged&step=90")
    page.js("URL.createObjectURL = (blob) => { blob.text().then((text) => (window.saved = text)); return '#'; }")
    page.click("save")
    page.browser.wait_for("window.saved !== undefined")
    svg = ElementTree.fromstring(str(page.browser.evaluate("window.saved")))
    assert svg.tag == f"{SVG}svg"
    assert "prefers-color-scheme: dark" in svg.find(f"{SVG}style").text
    assert svg.find(f"{SVG}desc").text == page.text("summary")
    words = [text.text for text in svg.iter(f"{SVG}text")]
    assert "continuous batching (phase 5)" in words
    assert "paged, recompute (phase 6)" in words
    styled = svg.find(f"{SVG}style").text
    assert all(f".{shape.get('class')} " in styled for shape in svg.iter() if shape.get("class"))


def test_light_and_dark_follow_the_switch(page: Playground) -> None:
    page.follow()
    scheme = page.js("return document.body.dataset.mdColorScheme")
    other = "slate" if scheme == "default" else "default"
    before = page.pictures()
    page.js(f"document.body.dataset.mdColorScheme = '{other}'")
    assert page.pictures()[0] != before[0]
    page.js(f"document.body.dataset.mdColorScheme = '{scheme}'")
    page.browser.evaluate("Promise.all(document.getAnimations().map((fade) => fade.finished)).then(() => 0)")
    assert page.pictures() == before


def test_a_prompt_larger_than_the_pool_is_the_schedulers_error(page: Playground) -> None:
    page.follow(f"{THRASH}&blocks=4")
    assert "RequestTooLargeError: request 'A' needs 8 blocks and the whole pool has 4" in page.text("told-a")


def test_changed_code_runs_and_errors_are_shown_at_their_line(page: Playground) -> None:
    page.follow("workload=six&a=fair&b=fair")
    page.edit("return request.priority, request.arrival_time", "return request.max_tokens, request.arrival_time")
    page.run()
    page.click("start")
    assert "computes D prefill, 5 tokens; A prefill" in page.text("summary")
    assert "fair (phase 7), step 0 of 0 to 10. computes A prefill" in page.text("summary")
    line = page.edit("return request.max_tokens,", "return request.max_tokns,")
    page.run()
    assert f"AttributeError: 'Request' object has no attribute 'max_tokns' fair.py, line {line}" in page.text("told-a")
    assert page.text("told-b") == ""
    page.wait("pg('editor').querySelector('.cm-lint-marker-error') !== null")
    assert page.edit("return request.max_tokns,", "return request.,") == line
    page.run()
    assert f"SyntaxError: invalid syntax fair.py, line {line}" in page.text("told-a")
    page.click("undo")
    page.edit(
        "        return request.priority, request",
        "        print('asked', request.request_id)\n        return request.priority, request",
    )
    page.run()
    assert page.text("told-a") == ""
    assert page.text("output").startswith("asked A\nasked ")
    page.edit("print('asked', request.request_id)", "[print(n) for n in range(10_000)]")
    page.run()
    assert page.text("output").endswith("998\n…\n")
    page.click("undo")
    page.run()
    assert page.text("output") == ""
    assert not page.js("return pg('output').checkVisibility()")


def test_changed_code_is_there_after_a_reload_until_it_is_taken_back(page: Playground) -> None:
    page.follow("workload=six&a=fair&b=fair&step=0")
    page.edit(KEY, SHORTEST_FIRST)
    page.open("workload=six&a=fair&b=fair&step=0")
    assert "fair (phase 7), changed, step 0 of 0 to 11. computes D prefill" in page.text("summary")
    assert page.changed() == [True, False]
    page.edit(SHORTEST_FIRST, SHORTEST_FIRST)
    page.click("undo")
    page.open("workload=six&a=fair&b=fair&step=0")
    assert page.changed() == [False, False]
    assert page.text("summary").count("computes A prefill") == 2


def test_the_files_of_the_labs_are_offered_and_run(page: Playground) -> None:
    page.open()
    assert page.offered() == []
    own = reference_file("minicache.scheduler.fair").read_text(encoding="utf-8").replace(KEY, SHORTEST_FIRST)
    page.keep(FAIR, own)
    page.open("workload=six&a=fair&b=fair&step=0")
    assert [name for name in page.offered() if "prefix" not in name] == ["my-fair", "my-chunked"]
    page.js("pg('scheduler-a').value = 'my-fair'; pg('scheduler-a').dispatchEvent(new Event('change'))")
    page.wait_until_ready()
    assert "fair (phase 7), yours, step 0 of 0 to 11. computes D prefill" in page.text("summary")
    assert "fair (phase 7), step 0 of 0 to 10. computes A prefill" in page.text("summary")
    assert page.link() == "workload=six&a=my-fair&b=fair&step=0"
    page.open(page.link())
    line = page.edit("return request.max_tokens,", "return request.max_tokns,")
    assert page.text("file") == FAIR
    assert page.kept(FAIR) == own.replace("max_tokens,", "max_tokns,")
    page.run()
    assert page.text("told-a").startswith(
        f"AttributeError: 'Request' object has no attribute 'max_tokns' fair.py, line {line}"
    )
    assert page.text("told-b") == ""
    page.keep(FAIR, None)
    page.open(page.link())
    assert page.text("told-a").startswith("This browser has no scheduler file of yours")
    assert page.text("summary").count("fair (phase 7), step") == 2


def test_a_file_of_ones_own_is_opened_and_kept(page: Playground) -> None:
    page.open("workload=six&a=static&b=continuous&step=0")
    page.choose("mine.py", "")
    assert page.text("status").startswith("mine.py is none of the course's scheduler files: base.py, static.py, ")
    page.choose("fair.py", "def broken(:\n")
    page.wait("pg('told-a').textContent !== ''")
    page.wait_until_ready()
    assert page.text("told-a").startswith("SyntaxError: invalid syntax fair.py, line 1")
    assert page.link() == "workload=six&a=my-fair&b=continuous&step=0"
    page.js("pg('told-a').querySelector('button').click()")
    page.wait("pg('editor').querySelector('.cm-lint-marker-error') !== null")
    page.js("window.confirm = (question) => { window.asked = question; return false; }")
    page.choose("fair.py", "x = 1\n")
    page.browser.wait_for("window.asked !== undefined")
    assert page.browser.evaluate("window.asked") == f"Replace {FAIR}, which this browser keeps?"
    assert page.kept(FAIR) == "def broken(:\n"
    page.js("window.confirm = () => true")
    page.choose("fair.py", "x = 1\n")
    page.wait("pg('told-a').textContent.startsWith('ImportError')")
    assert page.text("told-a").endswith("(fair.py) fair.py does not define it.")
    page.keep(FAIR, None)
    base = reference_file("minicache.scheduler.base").read_text(encoding="utf-8")
    page.open("workload=six&a=continuous&b=none")
    page.choose("base.py", base)
    page.wait("pg('scheduler-a').value === 'my-continuous'")
    page.wait_until_ready()
    assert page.number("step") == "10 of 0–10"
    page.keep("labs/phase-05-continuous-batching/scheduler/base.py", None)
    page.open()


def test_code_that_the_browser_does_not_keep_runs_and_the_reader_is_told(page: Playground) -> None:
    page.open()
    page.keep(FAIR, reference_file("minicache.scheduler.fair").read_text(encoding="utf-8"))
    page.open("workload=six&a=my-fair&b=none")
    page.js("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    page.edit(KEY, SHORTEST_FIRST)
    page.run()
    assert page.text("status") == "This browser does not keep your code: copy it before you leave."
    page.click("start")
    assert "step 0 of 0 to 11. computes D prefill" in page.text("summary")
    page.open()
    page.keep(FAIR, None)


def test_what_another_tab_writes_is_in_the_editor(page: Playground) -> None:
    page.open()
    page.keep(FAIR, "x = 1\n" * 40)
    page.open("workload=six&a=my-fair&b=none")
    page.edit("x = 1", "x = 2")
    page.js(f"""
        const frame = document.body.appendChild(document.createElement("iframe"));
        frame.contentWindow.localStorage.setItem("minicache/{FAIR}", "y = 1\\n".repeat(40));
    """)
    page.wait("pg('editor').querySelector('.cm-content').textContent.startsWith('y')")
    page.edit("y = 1", "y = 2")
    assert page.kept(FAIR) == "y = 2\n" + "y = 1\n" * 39
    page.keep(FAIR, None)
    page.open()


def test_a_code_that_is_asked_for_twice_is_in_one_editor(page: Playground) -> None:
    page.open("workload=six&a=static&b=continuous")
    page.js("pg('code').open = true; pg('code-of').value = 'b'; pg('code-of').dispatchEvent(new Event('change'))")
    page.wait("pg('editor').querySelector('.cm-content')?.textContent.startsWith('\"\"\"Continuous batching')")
    assert page.js("return pg('editor').children.length") == 1


def test_a_link_with_words_that_mean_nothing_shows_what_is_usual(page: Playground) -> None:
    page.open("workload=constructor&a=toString&b=valueOf&slots=many&step=soon")
    assert page.link() == "workload=six&a=static&b=continuous&step=13"


def test_control_and_enter_run_the_code(page: Playground) -> None:
    page.follow("workload=six&a=fair&b=none&step=0")
    page.edit(KEY, SHORTEST_FIRST)
    page.js("pg('editor').querySelector('.cm-content').focus()")
    page.browser.press("Enter", control=True)
    page.wait_until_ready()
    page.click("start")
    assert "computes D prefill" in page.text("summary")
    page.click("undo")
    page.open()  # its cursor blinks as long as the editor has the focus


def test_an_endless_loop_is_stopped_and_the_next_run_works(page: Playground) -> None:
    page.follow("workload=six&a=fair&b=none")
    page.edit(
        "if self.num_bypasses < STARVATION_BOUND:", "while True: pass\n        if self.num_bypasses < STARVATION_BOUND:"
    )
    page.click("run")
    page.wait("pg('status').textContent.startsWith('Still running')")
    page.click("run")
    page.wait("pg('run').textContent === 'Run'")
    assert page.text("status").startswith("Stopped")
    page.click("undo")
    page.run()
    assert page.number("finished") == "6"


def test_a_pane_that_is_closed_during_a_run_does_not_stop_the_next(page: Playground) -> None:
    page.open("workload=six&a=fair&b=fair")
    page.edit(KEY, f"[0 for n in iter(int, 1) if n]; {KEY}")
    page.click("run")
    page.wait("pg('status').textContent.startsWith('Still running')")
    page.js("pg('scheduler-b').value = 'none'; pg('scheduler-b').dispatchEvent(new Event('change'))")
    page.click("undo")
    page.browser.evaluate("new Promise((done) => setTimeout(done, 400))")
    page.click("run")
    page.wait_until_ready()
    page.click("end")
    assert page.number("finished") == "6"


def test_all_changes_that_are_taken_back_can_be_had_again(page: Playground) -> None:
    page.open("workload=six&a=fair&b=none")
    page.edit(KEY, SHORTEST_FIRST)
    page.click("undo")
    assert page.changed() == [False, False]
    page.js("pg('editor').querySelector('.cm-content').focus()")
    page.browser.press("z", control=True)
    assert page.changed() == [True, False]
    page.click("undo")
    page.open()


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_no_serious_fault_of_accessibility(page: Playground, scheme: str) -> None:
    page.follow(f"{THRASH}&blocks=4")
    page.edit("STARVATION_BOUND: Final = 64", "STARVATION_BOUND: Final = 63")
    page.js(f"document.body.dataset.mdColorScheme = '{scheme}'")
    page.browser.evaluate("Promise.all(document.getAnimations().map((fade) => fade.finished)).then(() => 0)")
    page.browser.evaluate(AXE.read_text(encoding="utf-8") + "; 0")
    found = page.browser.evaluate(
        "axe.run('#playground', {resultTypes: ['violations']}).then((found) => found.violations)"
    )
    serious = [
        (fault["id"], fault["nodes"][0]["html"][:200]) for fault in found if fault["impact"] in ("serious", "critical")
    ]
    page.click("undo")
    assert not serious


def test_it_fits_a_phone(page: Playground) -> None:
    page.browser._call(
        "Emulation.setDeviceMetricsOverride",
        page.browser._page,
        width=360,
        height=740,
        deviceScaleFactor=2,
        mobile=True,
    )
    try:
        page.follow("workload=burst")
        assert page.browser.evaluate("document.documentElement.scrollWidth") == 360
    finally:
        page.browser._call("Emulation.clearDeviceMetricsOverride", page.browser._page)
