"""The process that forks a run for each job, and its owner's end: the right process is ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from minicache.kernels import runtime
from minicache_course.journal import Job
from minicache_course.server import Child, PytestServer

ARGUMENTS = ["-q", "-p", "no:cacheprovider"]


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert False\n")
    (tmp_path / "test_spin.py").write_text("def test_spin():\n    while True: pass\n")
    (tmp_path / "test_start.py").write_text(
        "import subprocess\n\ndef test_start():\n    print('started', subprocess.Popen(['sleep', '60']).pid)\n"
    )
    return tmp_path


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or before it was read
        return False


def wait_for_the_end(pid: int) -> None:
    until = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


def run(server: PytestServer, folder: Path, name: str) -> Child:
    return server.start(Job([*ARGUMENTS, name], str(folder), log=str(folder / "log")))


def test_a_run_that_ends_between_the_look_and_the_signal(tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code, 1, must not be taken for the process id of the next run: that would be a signal to process 1."""
    with PytestServer() as server:
        child = run(server, tests, "test_it.py")
        wait_for_the_end(child.pid)
        monkeypatch.setattr(child, "poll", lambda: None)  # as if asked just before it ended
        assert child.stop() == 1
        following = run(server, tests, "test_spin.py")
        assert following.pid not in (0, 1, child.pid)
        assert following.stop() == -9


def test_a_run_that_nobody_waited_for(tests: Path) -> None:
    with PytestServer() as server:
        forgotten = run(server, tests, "test_it.py")
        following = run(server, tests, "test_spin.py")
        assert following.pid not in (0, 1, forgotten.pid)
        assert following.poll() is None
        assert following.stop() == -9


def test_what_a_run_has_started_ends_with_it(tests: Path) -> None:
    with PytestServer() as server:
        child = server.start(Job([*ARGUMENTS, "-s", "test_start.py"], str(tests), log=str(tests / "log")))
        wait_for_the_end(child.pid)
        assert child.stop() == 0
        started = int((tests / "log").read_text().split("started")[1].split()[0])
        wait_for_the_end(started)


def test_a_run_tells_where_it_is_and_goes_on(tests: Path) -> None:
    with PytestServer() as server:
        (tests / "log").touch()
        child = run(server, tests, "test_spin.py")
        while "test_spin.py" not in (tests / "log").read_text():
            child.ask()
            time.sleep(0.01)
        assert child.poll() is None
        assert child.stop() == -9


def test_a_signal_goes_to_the_run_alone(tests: Path) -> None:
    with PytestServer() as server:
        assert run(server, tests, "test_spin.py").stop() == -9
        assert run(server, tests, "test_it.py").stop() in (1, -9)


OWNER = """
import sys, time
from pathlib import Path
from minicache_course.journal import Job
from minicache_course.server import PytestServer

with PytestServer() as server:
    folder = Path(sys.argv[1])
    child = server.start(Job(["test_spin.py"], str(folder), log=str(folder / "log")))
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a process's parent is read from /proc")
def test_no_process_outlives_an_owner_that_is_killed(tests: Path) -> None:
    """The run loops forever: neither it nor the process that forked it would end by itself."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tests)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        run_pid = int(owner.stdout.readline())
        server_pid = int(Path(f"/proc/{run_pid}/stat").read_text().split(")")[-1].split()[1])
        owner.kill()
    wait_for_the_end(run_pid)
    wait_for_the_end(server_pid)


@pytest.mark.slow
def test_the_interpreter_is_asked_for_before_anything_imports_triton(
    tests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton is built for the interpreter or not when it is imported, and torch's first dispatch mode imports it."""
    pytest.importorskip("triton")
    if runtime.has_gpu():
        pytest.skip("with a GPU nothing is interpreted")
    monkeypatch.delenv(runtime.INTERPRET, raising=False)
    code = "from minicache.kernels import runtime\n\ndef test_interpreting():\n    assert runtime.interpreting()\n"
    (tests / "test_interpreting.py").write_text(code)
    with PytestServer(["torch"]) as server:
        child = run(server, tests, "test_interpreting.py")
        wait_for_the_end(child.pid)
        assert child.stop() == 0, (tests / "log").read_text()
