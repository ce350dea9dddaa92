"""Pages, opened in headless Chromium from a server on this machine: the math is rendered, and axe-core finds nothing.

axe-core 4.14.1 (Deque, MPL-2.0) lies in `axe/` as it was published.
"""

import functools
import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from tests.site.chromium import FLAGS, chromium

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the site may have to be built first

AXE = Path(__file__).with_name("axe") / "axe.min.js"
MATH_PAGE = "phase-00-decode-arithmetic/theory/01-bytes-per-token/"
TEN_PAGES = [
    "",
    "setup/",
    "course-map/",
    "phase-00-decode-arithmetic/theory/04-the-roofline/",
    "phase-02-fragmentation/lab/00-padding-and-buddies/",
    "phase-03-paged-cache/notebook/",
    "reference/cli/",
    "glossary/",
    "teaching/",
    "es/",
]
LOOK = b"""<script src="/axe.min.js"></script><script>
addEventListener("load", () => setTimeout(() => axe.run({resultTypes: ["violations"]}).then((found) => {
  const told = document.createElement("pre");
  told.id = "axe";
  told.textContent = JSON.stringify(found.violations);
  document.body.append(told);
}), 500));
</script></body>"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and with `?axe` a page that examines itself."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/axe.min.js":
            self.answer("text/javascript", AXE.read_bytes())
        elif query == "axe":
            page = Path(self.translate_path(path), "index.html").read_bytes()
            self.answer("text/html", page.replace(b"</body>", LOOK))
        else:
            super().do_GET()

    def answer(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def address(site) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site.root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def opened(address: str, folder: Path, *flags: str) -> BeautifulSoup:
    """The page as it is once its scripts have run."""
    usual = [*FLAGS, f"--user-data-dir={folder}", "--virtual-time-budget=15000"]
    command = [chromium(), *usual, *flags, "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return BeautifulSoup(done.stdout, "html.parser")


def test_math_is_rendered(address: str, tmp_path: Path) -> None:
    page = opened(address + MATH_PAGE, tmp_path)
    formulas = page.select(".arithmatex")
    assert formulas, f"{MATH_PAGE} has no math"
    assert all(formula.select(".katex") for formula in formulas)
    assert not page.select(".katex-error")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_ten_pages_have_no_serious_fault_of_accessibility(address: str, tmp_path: Path, scheme: str) -> None:
    found = []
    for path in TEN_PAGES:
        scheme_flag = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
        page = opened(f"{address}{path}?axe", tmp_path, scheme_flag, "--window-size=1300,900")
        violations = json.loads(page.select_one("#axe").text)
        assert violations is not None
        found += [
            (path or "home", fault["id"], fault["nodes"][0]["html"][:200])
            for fault in violations
            if fault["impact"] in ("serious", "critical") or fault["id"] == "empty-table-header"
        ]
    assert not found
