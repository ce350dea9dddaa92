"""How long does a reader wait for the first graded run in the browser, and how much is fetched for it?

    make docs && python -m benchmarks.browser

Opens task 5.1's handout in headless Chromium with an empty cache, clicks "Open in the browser" and then, at once, "Run
tests" on the untouched starter; then runs it again. The site is served from this machine, so fetching takes no time.
"""

from __future__ import annotations

import functools
import gzip
import http.server
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from rich.progress import track
from tests.site.chromium import Chromium

from benchmarks._record import record

SITE = Path(__file__).resolve().parents[1] / "site"
PAGE = "phase-05-continuous-batching/lab/00-the-scheduler/"
REPEATS = 5

OPEN = "document.querySelector('.mc-open button').click()"
IS_OPEN = "document.querySelector('.mc-lab .cm-content')"
RUN = "document.querySelector('.mc-run').click()"
HAS_RUN = "!document.querySelector('.mc-run').disabled && document.querySelector('.mc-results table')"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing."""


def main() -> None:
    """Measure, and write down."""
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        runs = [measured(address) for _ in track(range(REPEATS), description="Opening")]
        server.shutdown()
    fetched = {urlsplit(url).path for url in runs[0][1] if url.startswith(f"{address}assets/browser/")}
    files = [SITE / path.removeprefix("/") for path in sorted(fetched)]
    seconds = {name: [each[0][name] for each in runs] for name in runs[0][0]}
    record(
        "browser",
        {
            "page": PAGE,
            "repeats": REPEATS,
            **{f"{name}_s": round(median(times), 2) for name, times in seconds.items()},
            **{f"{name}_s_all": [round(each, 2) for each in times] for name, times in seconds.items()},
            "files": len(files),
            "nbytes": sum(file.stat().st_size for file in files),
            "nbytes_compressed": sum(len(gzip.compress(file.read_bytes())) for file in files),
        },
    )


def measured(address: str) -> tuple[dict[str, float], list[str]]:
    """Seconds from the click to the editor, to the first result, and of a second run; and what was asked for."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Chromium(Path(profile)) as browser:
        browser.open(address + PAGE)
        browser.requests.clear()
        begin = time.monotonic()
        browser.evaluate(OPEN)
        browser.wait_for(IS_OPEN)
        editor = time.monotonic()
        browser.evaluate(RUN)
        browser.wait_for(HAS_RUN)
        result = time.monotonic()
        browser.evaluate("new Promise((resolve) => setTimeout(resolve, 8000))")  # the next Python is loaded
        again = time.monotonic()
        browser.evaluate(RUN)
        browser.wait_for(HAS_RUN)
        times = {"editor": editor - begin, "first_result": result - begin, "again": time.monotonic() - again}
        return times, browser.requests


if __name__ == "__main__":
    main()
