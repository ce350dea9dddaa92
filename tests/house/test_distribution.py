"""What `pip install` installs: the name `minicache` on PyPI is that of another package."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_OURS = re.compile(
    r"""(?:pip install(?: -\S+)* ["']?|(?<![\w/.-])(?=minicache(?:-course)?\[\w))minicache(?!\.)[\w-]*(?:\[[\w,]+\])?"""
)


def named() -> dict[str, list[str]]:
    """What the project's files have pip install of its own: the requirement → the files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    for name in filter(None, listed.split("\0")):
        file = ROOT / name
        if file == Path(__file__) or not file.is_file() or file.suffix in (".svg", ".mo", ".npz", ".safetensors"):
            continue
        for match in _OURS.finditer(file.read_text(encoding="utf-8", errors="ignore")):
            found.setdefault(match[0].split()[-1].lstrip("\"'"), []).append(name)
    return found


def test_every_text_names_our_distribution_and_an_extra_that_it_has() -> None:
    found = {Requirement(text): files for text, files in named().items()}
    assert len(found) >= 5
    wrong = {str(each): files for each, files in found.items() if each.name != PROJECT["name"]}
    assert not wrong, f"pip would install another's package: {wrong}"
    extras = PROJECT["optional-dependencies"].keys()
    assert {extra for each in found for extra in each.extras} <= extras


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index for pip: our distribution, as this environment has it, and a `minicache` that fails."""
    folder = tmp_path_factory.mktemp("index")
    ours = distribution(PROJECT["name"])
    stem = f"{ours.name.replace('-', '_')}-{ours.version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", str(ours.read_text("METADATA")))
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    decoy = {
        "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'decoy'\nbackend-path = ['.']\n",
        "decoy.py": "raise SystemExit('another package is built')\n",
    }
    with tarfile.open(folder / "minicache-0.0.1.tar.gz", "w:gz") as source:
        for name, text in decoy.items():
            member = tarfile.TarInfo(f"minicache-0.0.1/{name}")
            member.size = len(text)
            source.addfile(member, BytesIO(text.encode()))
    return folder


def installed(index: Path, *requirements: str) -> subprocess.CompletedProcess[str]:
    """What pip would install for these requirements, if this index were all there is."""
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install"]
    alone = ["--dry-run", "--ignore-installed", "--no-deps", "--no-index", "--find-links", str(index)]
    return subprocess.run([*pip, *alone, *requirements], capture_output=True, text=True, check=False)


def test_pip_resolves_every_text_to_our_distribution(index: Path) -> None:
    done = installed(index, *named())
    assert done.stdout.splitlines()[-1] == f"Would install {PROJECT['name']}-{distribution(PROJECT['name']).version}"
    assert "does not provide the extra" not in done.stderr


def test_the_other_package_would_be_noticed(index: Path) -> None:
    done = installed(index, "minicache")
    assert done.returncode != 0
    assert "another package is built" in done.stdout + done.stderr
