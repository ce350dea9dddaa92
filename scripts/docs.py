"""Build the site, both languages at the same time: `python -m scripts.docs site`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build(site: Path) -> int:
    """Build into `site`, whatever was there before; 0, or the exit status of the build that failed."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        spanish = Path(folder) / "es"  # MkDocs empties a folder before it builds there, so this one joins at the end
        statuses = list(pool.map(_build, ("mkdocs.yml", "mkdocs.es.yml"), (site.absolute(), spanish)))
        if not any(statuses):
            shutil.move(spanish, site / "es")
    return next(filter(None, statuses), 0)


def _build(config: str, target: Path) -> int:
    """Build one language; what MkDocs said is printed at its end, so that the two do not mix."""
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
    sys.exit(build(Path(sys.argv[1])))
