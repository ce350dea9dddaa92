"""Give an environment what a package requires, and nothing else, as links into `.venv`: seconds instead of minutes.

    .venv/bin/python -m scripts.link_requirements SITE_PACKAGES 'minicache-course[course]'

links the distributions that this would bring in if pip installed it. What pip has installed into SITE_PACKAGES
itself, such as minicache's wheel, stays. A package that is missing from pyproject.toml is missing there.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements(found: Distribution, extras: frozenset[str]) -> list[Requirement]:
    """What a distribution requires here, with these extras."""
    wanted = [Requirement(line) for line in found.requires or ()]
    return [
        each for each in wanted if not each.marker or any(each.marker.evaluate({"extra": x}) for x in extras | {""})
    ]


def closure(root: Distribution, extras: frozenset[str]) -> dict[str, Distribution]:
    """Name → every distribution that `root` brings in, itself left out."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(root, extras)]
    while waiting:
        for each in requirements(*waiting.pop()):
            name, its_extras = canonicalize_name(each.name), frozenset(each.extras)
            if (name, its_extras) in seen:
                continue
            seen.add((name, its_extras))
            if name == canonicalize_name(root.name):  # minicache-course[course] requires minicache-course[serve]
                waiting.append((root, its_extras))
            else:
                found[name] = distribution(name)
                waiting.append((found[name], its_extras))
    return found


def link(found: Distribution, site_packages: Path) -> None:
    """Link the folders and files of a distribution that lie at the top of its site-packages."""
    for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        target = site_packages / name
        if not target.exists():
            target.symlink_to(str(found.locate_file(name)))


if __name__ == "__main__":
    site_packages = Path(sys.argv[1])
    linked: dict[str, Distribution] = {}
    for wanted in map(Requirement, sys.argv[2:]):
        installed = [*distributions(name=wanted.name, path=[str(site_packages)])]
        root = installed[0] if installed else linked.setdefault(wanted.name, distribution(wanted.name))
        linked |= closure(root, frozenset(wanted.extras))
    for each in linked.values():
        link(each, site_packages)
    print(f"{len(linked)} packages linked")
