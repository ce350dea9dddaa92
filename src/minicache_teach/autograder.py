"""Gradescope's autograder for a phase: a zip of two scripts, the package, and the tests.

Gradescope unpacks it into `/autograder/source`, runs `setup.sh` once and `run_autograder` for each submission, which
lies in `/autograder/submission`; the result is read from `/autograder/results/results.json`
(https://gradescope-autograders.readthedocs.io/en/latest/specs/).
"""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import PackageNotFoundError, requires, version
from io import BytesIO
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from minicache_course.errors import CourseError
from minicache_course.files import replace_file
from minicache_course.install import CARRIED, PYTEST_INI
from minicache_course.table import Phase
from minicache_course.workspace import INSTALLED, PACKAGES, SOURCES, Workspace, phase_imports

_NOT_FOR_GRADING = {"jupyterlab", "numba", "watchfiles"}

_SETUP = """\
#!/usr/bin/env bash
# Gradescope runs this once, as root, when it builds the image.
set -euo pipefail
root=${AUTOGRADER_ROOT:-/autograder}
apt-get update
apt-get install -y bubblewrap python3-venv
# uv brings the Python that this autograder was made with: the image's own may be too old.
python3 -m venv "$root/tools"
"$root/tools/bin/pip" install uv
export UV_PYTHON_INSTALL_DIR=$root/python
uv=$root/tools/bin/uv python=$root/venv/bin/python
"$uv" venv --python @PYTHON@ "$root/venv"
cd "$root/source"
install=("$uv" pip install --python "$python")
"${install[@]}" --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' constraints.txt)"
"${install[@]}" -c constraints.txt -r requirements.txt
echo "$root/source/package" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/minicache.pth"
"$python" -m compileall -q "$root/source/package"
"""

_RUN = """\
#!/usr/bin/env bash
# Gradescope runs this for each submission.
root=${AUTOGRADER_ROOT:-/autograder}
results=$root/results/results.json
export MINICACHE_ROOT=$root/source/course
"$root/venv/bin/python" -c 'from minicache_cli import main; main()' \\
  grade-submission "$root/submission" @OPTIONS@ --gradescope "$results"
[ -f "$results" ] ||
  echo '{"score": 0, "output": "Grading ended without a result. Submit again, or ask your teacher."}' >"$results"
exit 0 # a failed task is a result, not a failure of the autograder
"""


def write_autograder(workspace: Workspace, phase: Phase, file: Path, seed: int | None = None) -> None:
    """Write the zip. It has the tests and points of `workspace`, and this installation's package and versions.

    Args:
        workspace: the course.
        phase: what is graded.
        file: the zip.
        seed: draws the random cases of the tests anew; the usual ones by default.

    Raises:
        CourseError: the phase has no tests, or the zip cannot be written.
    """
    if not workspace.tests(phase).is_dir():
        raise CourseError(f"phase {phase.number} has no tests: {workspace.tests(phase)} is not there")
    options = f"--phase {phase.number}" + (f" --seed {seed}" if seed is not None else "")
    needed = requirements(phase)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    contents = {
        "setup.sh": _SETUP.replace("@PYTHON@", python).encode(),
        "run_autograder": _RUN.replace("@OPTIONS@", options).encode(),
        "requirements.txt": "".join(f"{name}\n" for name in sorted(needed)).encode(),
        "constraints.txt": "".join(f"{name}=={of}\n" for name, of in sorted(_versions(needed).items())).encode(),
        "course/pytest.ini": PYTEST_INI.encode(),
    }
    for pattern in (*CARRIED, INSTALLED):
        for each in sorted(workspace.root.glob(pattern)):
            name = each.relative_to(workspace.root)
            if name.parts[0] != "notebooks":  # all tests: some phases use another one's conftest.py
                contents[f"course/{name.as_posix()}"] = each.read_bytes()
    for each in sorted(file for name in PACKAGES for file in (SOURCES / name).rglob("*")):
        inside = each.relative_to(SOURCES)
        if each.is_file() and "__pycache__" not in inside.parts and inside.parts[:2] != ("minicache_course", "files"):
            contents[f"package/{inside.as_posix()}"] = each.read_bytes()
    whole = BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, content in contents.items():
            member = zipfile.ZipInfo(place, date_time=(2020, 1, 1, 0, 0, 0))  # the same course makes the same zip
            member.create_system = 3  # Unix: the mode counts
            member.external_attr = (0o755 if content.startswith(b"#!") else 0o644) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, content)
    replace_file(file, whole.getvalue())


def requirements(phase: Phase) -> set[str]:
    """The packages that grading a phase needs, without versions."""
    kernels = _required("minicache-course", "triton") if phase_imports(phase, "triton") else set()
    return (_required("minicache-course", "course") | kernels) - _NOT_FOR_GRADING


def _versions(needed: set[str]) -> dict[str, str]:
    """The version of each of these packages here, and of what they need."""
    versions: dict[str, str] = {}
    left = set(needed)
    while left:
        name = left.pop()
        try:
            # torch's `2.9.0+cpu` says where a build is from, and is no part of what is asked for.
            versions[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
        left |= _required(name) - versions.keys()
    return versions


def _required(name: str, extra: str = "") -> set[str]:
    """What an installed package requires on this machine."""
    needed = map(Requirement, requires(name) or ())
    return {
        canonicalize_name(each.name) for each in needed if not each.marker or each.marker.evaluate({"extra": extra})
    }
