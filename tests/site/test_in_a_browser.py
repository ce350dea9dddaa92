"""One page, opened in headless Chromium from a server on this machine: the math is rendered."""

import functools
import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the site may have to be built first

MATH_PAGE = "phase-00-decode-arithmetic/theory/01-bytes-per-token/"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def address(site) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site.root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if path := shutil.which(name):
            return path
    if os.environ.get("MINICACHE_REQUIRE_CHROMIUM") == "1":
        pytest.fail("no browser: install the package `chromium`")
    pytest.skip("no browser: install the package `chromium` to have the math looked at")


def test_math_is_rendered(address: str, tmp_path: Path) -> None:
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=10000",
    ]
    command = [chromium(), *flags, "--dump-dom", address + MATH_PAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    page = BeautifulSoup(done.stdout, "html.parser")
    formulas = page.select(".arithmatex")
    assert formulas, f"{MATH_PAGE} has no math"
    assert all(formula.select(".katex") for formula in formulas)
    assert not page.select(".katex-error")
