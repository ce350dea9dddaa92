"""How pages are laid out and what they load, in headless Chromium."""

import functools
import gzip
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.site.chromium import Chromium
from tests.site.conftest import Quiet, Site

from minicache_course.table import load_course

ROOT = Path(__file__).resolve().parents[2]
PHASES = [phase for phase in load_course(ROOT / "labs" / "course.toml") if phase.tasks]
PAGES = [
    "",
    "course-map/",
    "glossary/",
    "reference/one-iteration/",
    *(f"{phase.folder}/" for phase in PHASES),
    *(phase.tasks[0].page.removeprefix("docs/en/").removesuffix(".md") + "/" for phase in PHASES),
]
CROPPED = """[...document.querySelectorAll(".md-content pre > code")]
  .filter((code) => code.scrollWidth > code.clientWidth + 1).map((code) => code.innerText.slice(0, 80))"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the site may have to be built first


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile"), "--window-size=1440,900") as browser:
        yield browser


def test_no_code_is_cropped_and_no_page_scrolls_sideways(browser: Chromium, address: str) -> None:
    browser.resize(1440, 900)
    assert {page: cut for page in PAGES if (browser.open(address + page), cut := browser.evaluate(CROPPED))[1]} == {}
    browser.resize(390, 844)
    wide = "document.documentElement.scrollWidth > 390"
    assert [page for page in PAGES if (browser.open(address + page), browser.evaluate(wide))[1]] == []


def test_the_home_page_loads_little(site: Site, browser: Chromium, address: str) -> None:
    browser.requests.clear()
    browser.open(address)
    browser.wait_for("document.querySelector('.md-search__input')")
    asked = {unquote(urlsplit(url).path).lstrip("/") for url in browser.requests if url.startswith(address)}
    sizes = {path: len(gzip.compress((site.root / (path or "index.html")).read_bytes())) for path in asked}
    assert len(sizes) > 5
    assert sum(sizes.values()) <= 400_000, sizes
    assert not [path for path in sizes if "katex" in path]


def test_the_404_page_leads_home_below_a_path(site: Site, browser: Chromium, tmp_path: Path) -> None:
    (tmp_path / "course").symlink_to(site.root)

    class Elsewhere(Quiet):
        def send_error(self, *args: object) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write((site.root / "404.html").read_bytes())

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Elsewhere, directory=str(tmp_path))
    ) as server:
        threading.Thread(target=server.serve_forever).start()
        here = f"http://127.0.0.1:{server.server_port}/course/"
        for page in ("no/such/page/", "es/no/such/page/", "no"):
            browser.open(here + page)
            browser.wait_for("document.links[0].pathname === '/course/'", 10)
            assert browser.evaluate("[...document.links].map((link) => link.href)") == [here, here + "es/"]
        server.shutdown()
