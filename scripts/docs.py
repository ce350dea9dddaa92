"""Build the site, both languages at the same time: `python -m scripts.docs site`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.browser.build import BuildError
from scripts.browser.build import build as build_browser
from scripts.browser.playground.site import build as build_playground

ROOT = Path(__file__).resolve().parents[1]


def build(site: Path) -> int:
    """Build into `site`, whatever was there before; 0, or the exit status of the build that failed.

    Raises:
        BuildError: what the browser needs could not be fetched; the message says what to do.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        spanish = Path(folder) / "es"  # MkDocs empties a folder before it builds there, so this one joins at the end
        browser = Path(folder) / "browser"  # both languages use it: it joins the English site's assets
        playground = Path(folder) / "playground"
        browsers = pool.submit(_build_assets, browser, playground)
        statuses = list(pool.map(_build, ("mkdocs.yml", "mkdocs.es.yml"), (site.absolute(), spanish)))
        browsers.result()
        if not any(statuses):
            shutil.move(spanish, site / "es")
            for made in (browser, playground):
                shutil.move(made, site / "assets" / made.name)
    return next(filter(None, statuses), 0)


def _build_assets(browser: Path, playground: Path) -> None:
    """What runs in the reader's browser. One after the other: both need what the first may have to fetch."""
    build_browser(browser)
    build_playground(playground)


def _build(config: str, target: Path) -> int:
    """Build one language; what MkDocs said is printed at its end, so the two do not mix."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", str(target)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout, end="", flush=True)
    return done.returncode


if __name__ == "__main__":
    try:
        sys.exit(build(Path(sys.argv[1])))
    except BuildError as error:
        sys.exit(f"scripts.docs: {error}")
