"""The course's pages, as the site that a wheel carries or that `make docs` built in a clone."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from minicache_course.errors import CourseError
from minicache_course.install import source_folder
from minicache_course.language import in_use
from minicache_course.table import load_course
from minicache_course.workspace import CHECKOUT, TABLE

PORT = 8001
"""Where the pages are, unless something else is there: 8000 is `minicache serve`'s."""


def site_folder() -> Path:
    """The folder of the built site.

    Raises:
        CourseError: this installation has no pages.
    """
    source = source_folder()
    if not (source / "site" / "index.html").is_file():
        remedy = "build them with `make docs`" if source == CHECKOUT else "`make wheel` in a clone makes one with pages"
        raise CourseError(f"this installation has no pages: {remedy}, or read docs/en/ in the repository")
    return source / "site"


def address(name: str | None) -> str:
    """Where a page in the reader's language is, from the root of the site.

    Args:
        name: a task (`1.3`) for its lab page, a phase (`1`, `dense-cache`) for its first page, None for the home page.

    Raises:
        CourseError: there is no such phase or task.
    """
    root = "" if in_use() == "en" else f"{in_use()}/"
    if name is None:
        return root
    course = load_course(source_folder() / TABLE)
    phase, _, task = name.partition(".")
    if task.isdecimal():
        return root + course.phase(phase).task(int(task)).page.removeprefix("docs/en/").removesuffix(".md") + "/"
    return f"{root}{course.phase(name).folder}/"


def server(site: Path) -> ThreadingHTTPServer:
    """A server of the site on 127.0.0.1, at PORT or, if that is taken, at any free port. It listens already."""
    handler = partial(_Quiet, directory=str(site))
    try:
        return ThreadingHTTPServer(("127.0.0.1", PORT), handler)
    except OSError:
        return ThreadingHTTPServer(("127.0.0.1", 0), handler)


class _Quiet(SimpleHTTPRequestHandler):
    """Serves files, and prints no line for each."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
