"""Make `assets/browser/` of the site: Python for the browser, the editor, and the course as archives.

Pyodide and CodeMirror come from npm, pytest and Hypothesis from PyPI, both at the versions and hashes that are
committed here (`package-lock.json`, `wheels.txt`). They are kept in `.cache/browser/`, so only the first build needs a
network. Everything else is made from the source at every build, the same bytes each time.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from babel.messages import pofile

from minicache_course.language import languages
from scripts.browser import course, first

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "browser"
CATALOGUE = ROOT / "docs" / "es" / "browser.po"

PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""What a page needs of the npm package."""

MODULES = (
    *("worker.js", "python.js", "grader.js", "store.js", "account.js", "lab.js", "arena.js", "say.js"),
    *("first.js", "here.js"),
    "browser.css",
)
"""What is served as it is."""

_DATE = (1980, 1, 1, 0, 0, 0)  # of every archived file: an archive depends on its files only


class BuildError(Exception):
    """The browser's part of the site cannot be built; the message says what to do."""


def build(target: Path) -> None:
    """Write everything into `target`, an empty or missing folder.

    Raises:
        BuildError: npm or pip is missing, or could not fetch what is not in the cache yet.
    """
    target.mkdir(parents=True, exist_ok=True)
    packages = node_modules()
    for name in PYODIDE:
        shutil.copy(packages / "pyodide" / name, target / name)
    for name in MODULES:
        shutil.copy(HERE / name, target / name)
    bundle(HERE / "editor.js", target / "editor.js")
    (target / "spanish.json").write_text(json.dumps(spanish(), ensure_ascii=False), encoding="utf-8")
    (target / "arena.json").write_text(json.dumps(course.policies()), encoding="utf-8")
    (target / "first.json").write_text(json.dumps(first.line_to_write()), encoding="utf-8")
    for language in languages():
        route = json.dumps(course.route(language), ensure_ascii=False)
        (target / f"route.{language}.json").write_text(route, encoding="utf-8")
    (target / "minicache.zip").write_bytes(archive(course.package_files(course.PURE)))
    (target / "grading.zip").write_bytes(archive(course.grading_files()))
    (target / "packages.zip").write_bytes(archive(_wheel_files(wheels())))
    (target / "spanish.zip").write_bytes(archive(course.spanish_files()))
    for phase, tasks in course.pure_tasks().items():
        for language in languages():
            (target / f"{phase.folder}.{language}.json").write_bytes(course.sheet(phase, tasks, language))


# What is fetched


def node_modules() -> Path:
    """The packages of package-lock.json, installed when that file has changed since."""
    folder = CACHE / "npm"
    wanted = _fingerprint(HERE / "package.json", HERE / "package-lock.json")
    if not _is_current(folder, wanted):
        npm = shutil.which("npm")
        if npm is None:
            raise BuildError(
                "the site's editor and Python come from npm, which is not installed: "
                "install Node.js 18 or later with npm (Debian: apt-get install npm), then run this again"
            )
        _start_anew(folder)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, folder / name)
        _fetch([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder, "npm")
        _finish(folder, wanted)
    return folder / "node_modules"


def wheels() -> list[Path]:
    """The wheels of wheels.txt, downloaded when that file has changed since."""
    folder = CACHE / "wheels"
    wanted = _fingerprint(HERE / "wheels.txt")
    if not _is_current(folder, wanted):
        _start_anew(folder)
        python = json.loads((node_modules() / "pyodide" / "pyodide-lock.json").read_text(encoding="utf-8"))["info"]
        major, minor, _ = python["python"].split(".")
        platform = f"pyemscripten_{python['abi_version']}_wasm32"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        pip += ["--require-hashes", "-r", str(HERE / "wheels.txt"), "--dest", str(folder)]
        pip += ["--python-version", f"{major}.{minor}", "--implementation", "cp", "--platform", platform]
        pip += ["--platform", "any", "--abi", f"cp{major}{minor}", "--abi", "none"]
        _fetch(pip, folder, "pip")
        _finish(folder, wanted)
    return sorted(folder.glob("*.whl"))


def _fetch(command: list[str], folder: Path, what: str) -> None:
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise BuildError(
            f"{what} could not fetch what the labs in the browser are made of. The first build needs a network, "
            f"those after it do not ({CACHE.relative_to(ROOT)}/ keeps it). {what} says:\n{last}"
        )


def _fingerprint(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _is_current(folder: Path, wanted: str) -> bool:
    stamp = folder / "fetched"
    return stamp.is_file() and stamp.read_text() == wanted


def _start_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _finish(folder: Path, wanted: str) -> None:
    (folder / "fetched").write_text(wanted)


# What is made


def bundle(source: Path, target: Path) -> None:
    """A script and all that it imports, as one module.

    Raises:
        BuildError: an import leads nowhere, or the script is no JavaScript.
    """
    packages = node_modules()
    command = [str(packages / ".bin" / "esbuild"), str(source), f"--outfile={target}", "--allow-overwrite"]
    command += ["--bundle", "--minify", "--format=esm", "--target=es2022", "--log-level=warning"]
    environment = os.environ | {"NODE_PATH": str(packages)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"esbuild could not bundle {source.name}:\n{done.stderr}")


def spanish() -> dict[str, str]:
    """What the scripts say, English → Spanish; what is not translated is left out."""
    with CATALOGUE.open("rb") as file:
        catalogue = pofile.read_po(file, locale="es")
    return {str(message.id): str(message.string) for message in catalogue if message.id and message.string}


def archive(files: Iterable[tuple[str, bytes]]) -> bytes:
    """A zip of the files, by their paths in it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archived:
        for path, content in sorted(files):
            info = zipfile.ZipInfo(path, _DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            archived.writestr(info, content)
    return made.getvalue()


def _wheel_files(wheels: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """What the wheels install."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archived:
            for info in archived.infolist():
                if not info.is_dir() and _is_used(info.filename):
                    yield f"packages/{info.filename}", archived.read(info)


def _is_used(path: str) -> bool:
    """Leaves out Pygments' lexers of other languages, three quarters of all that there is to download."""
    lexer = path.removeprefix("pygments/lexers/")
    return lexer == path or lexer in ("__init__.py", "_mapping.py", "diff.py", "python.py")
