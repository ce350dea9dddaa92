"""Builds the site once, both languages, strictly, and hands the tests its pages."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import yaml
from bs4 import BeautifulSoup
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Page:
    """One built page: its file, its way from the site's root, and its parsed HTML."""

    file: Path
    path: str

    @cached_property
    def html(self) -> str:
        return self.file.read_text(encoding="utf-8")

    @cached_property
    def soup(self) -> BeautifulSoup:
        return BeautifulSoup(self.html, "html.parser")

    @cached_property
    def ids(self) -> set[str]:
        return {tag["id"] for tag in self.soup.find_all(id=True)}

    def __str__(self) -> str:
        return self.path


@dataclass
class Site:
    """The built site: English at the root, Spanish in es/."""

    root: Path

    @cached_property
    def pages(self) -> dict[str, Page]:
        """Path → page, of every page of both languages but the two 404 pages, whose links are absolute."""
        files = [file for file in sorted(self.root.rglob("*.html")) if file.name != "404.html"]
        return {path: Page(file, path) for file in files for path in [file.relative_to(self.root).as_posix()]}

    @cached_property
    def english(self) -> list[Page]:
        return [page for path, page in self.pages.items() if not path.startswith("es/")]

    @cached_property
    def nav(self) -> dict[str, str]:
        """Markdown file → path of its page, of everything that the nav of mkdocs.yml names."""
        nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
        return {source: self.built(source) for source in leaves(nav)}

    @staticmethod
    def built(source: str) -> str:
        """Where the build puts the page of a Markdown file."""
        stem = source.removesuffix(".md").removesuffix("index").rstrip("/")
        return f"{stem}/index.html" if stem else "index.html"

    @cached_property
    def spanish(self) -> list[Page]:
        return [page for path, page in self.pages.items() if path.startswith("es/")]


def leaves(item: object) -> Iterator[str]:
    """The pages of a part of the nav, in their order."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, dict | list):
        for inner in item.values() if isinstance(item, dict) else item:
            yield from leaves(inner)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The built site: $MINICACHE_SITE, or else the first worker builds it and the others wait for it."""
    if given := os.environ.get("MINICACHE_SITE"):
        return Site((ROOT / given).absolute())
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # what the workers of one run have in common
    root = folder / "site"
    with FileLock(folder / "site.lock"):
        if not root.exists():
            _build(folder / "unfinished").rename(root)
    return Site(root)


def _build(root: Path) -> Path:
    command = [sys.executable, "-m", "scripts.docs", str(root)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"the site does not build:\n{done.stdout[-4000:]}"
    return root


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site and says nothing."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    """Where the built site is served, on this machine."""
    handler = functools.partial(Quiet, directory=str(site.root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()
