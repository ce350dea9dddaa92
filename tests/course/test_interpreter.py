"""`minicache python`: whose files are loaded, and what Python's command line does there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.toys import COLOR, NBYTES, Toys

from minicache_course.starters import write_all

YOURS = ["yours: labs/phase-00-toys/palette.py", "yours: labs/phase-00-toys/arithmetic/arithmetic.py"]
FILE = "import minicache.palette as p; print(p.__file__)"


MINICACHE = ("-c", "from minicache_cli import main; main()")
ITSELF = ("-m", "minicache_course.interpreter")  # what the command becomes


def python(
    *arguments: str, typed: str = "", status: int = 0, by: tuple[str, ...] = ITSELF
) -> tuple[list[str], list[str]]:
    """What `minicache python` prints, and what it says about whose files are loaded."""
    line = [sys.executable, *by, *arguments]
    done = subprocess.run(line, input=typed, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_code_runs_on_the_learners_files(toys: Toys) -> None:
    code = f"{FILE}; import sys; print(sys.argv, __name__)"
    printed, said = python("python", "-c", code, "--help", "-x", by=MINICACHE)
    assert printed == [str(toys.color), "['-c', '--help', '-x'] __main__"]
    assert said == YOURS


def test_a_starter_leaves_the_reference_and_an_unfinished_file_does_not(toys: Toys) -> None:
    toys.color.unlink()
    toys.nbytes.unlink()
    write_all(toys.workspace)
    assert python("-c", "from minicache.palette import color; print(color('end'))")[1] == [
        "You have not started any file: everything comes from the reference"
    ]
    toys.color.write_text(toys.color.read_text() + "# begun\n")
    _, said = python("-c", "from minicache.palette import color; color('end')", status=1)
    assert said[0] == YOURS[0]
    assert said[-1].startswith("NotImplementedError: phase 0, task 1")


def test_what_cannot_be_imported_is_told_and_the_reference_stands_in(toys: Toys) -> None:
    toys.write(color=f"import nothing_of_that_name\n{COLOR}", nbytes=f"from minicache.palette import color\n{NBYTES}")
    printed, said = python("-c", FILE)
    assert printed != [str(toys.color)]
    assert said == [
        "reference, not labs/phase-00-toys/palette.py, which cannot be imported: "
        "ModuleNotFoundError: No module named 'nothing_of_that_name'",
        YOURS[1],
    ]


def test_a_script_and_a_module(toys: Toys, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("value = 7\n")
    script = tmp_path / "script.py"
    script.write_text(f"import sys, neighbour\n{FILE}\nprint(sys.argv[1:], neighbour.value, __name__)\n")
    assert python(str(script), "-c", "x")[0] == [str(toys.color), "['-c', 'x'] 7 __main__"]
    assert "usage" in python("-m", "json.tool", "--help")[0][0]


def test_a_prompt(toys: Toys) -> None:
    printed, _ = python("python", by=MINICACHE, typed=f"{FILE}\n[name for name in dir() if name[0] != '_']\n")
    assert printed == [str(toys.color), "['p']"]


def test_another_option_is_refused(toys: Toys) -> None:
    assert python("-V", status=1)[1][-1].startswith("minicache: -V is unknown")


def test_ipython_gets_the_arguments(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "IPython.py"
    fake.write_text(f"def start_ipython(argv):\n    print(argv)\n    {FILE}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert python("ipython", "--pylab", "x.py", by=MINICACHE)[0] == ["['--pylab', 'x.py']", str(toys.color)]
    fake.write_text("raise ModuleNotFoundError\n")
    assert "pip install ipython" in python("ipython", status=1)[1][-1]
