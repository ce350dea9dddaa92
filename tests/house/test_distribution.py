"""What `pip install` installs: the name `minicache` on PyPI is that of another package."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_OURS = re.compile(r"""(?<![\w/.-])minicache(?:-course)?\[[\w,]+\]|pip install(?: -\S+)* ["']?minicache(?!\.)[\w-]*""")


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
