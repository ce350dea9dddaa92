"""The server that stays between commands: found again, replaced, done without; it and its runs end when they should."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.toys import Toys

from minicache_course import resident
from minicache_course.journal import Job
from minicache_course.resident import ResidentServer
from minicache_course.server import Child

from .test_server import is_alive, wait_for_the_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is a resident server on Linux only")

TELL = """
import os
from pathlib import Path

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[1])

def test_tell():
    Path("told").write_text(f"{parent(os.getppid())} {os.environ.get('FLAVOUR')} {os.environ.get('OMP_DYNAMIC')}")

def test_spin():
    while True: pass
"""


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch, runtime_folder: Path) -> Iterator[Path]:
    """The folder of the sockets, for one test."""
    folder = runtime_folder / str(time.monotonic_ns())
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder / "minicache"
    shutil.rmtree(folder)  # which ends the servers


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "test_tell.py").write_text(TELL)
    return tmp_path


def start(server: ResidentServer, folder: Path, test: str) -> Child:
    return server.start(
        Job(["-q", "-p", "no:cacheprovider", f"test_tell.py::{test}"], str(folder), log=str(folder / "log"))
    )


@pytest.fixture
def tell(tests: Path) -> Callable[[], list[str]]:
    """What a run tells: the process that its server was forked from, and two environment variables."""

    def tell() -> list[str]:
        with ResidentServer() as server:
            child = start(server, tests, "test_tell")
            wait_for_the_end(child.pid)
            assert child.stop() == 0, (tests / "log").read_text()
        return (tests / "told").read_text().split()

    return tell


def test_the_second_grading_finds_the_first_ones_server(sockets: Path, tell) -> None:
    assert tell()[0] == tell()[0] != str(os.getpid())
    assert len(list(sockets.iterdir())) == 1
    assert sockets.stat().st_mode & 0o777 == 0o700


def test_a_run_has_its_clients_environment(sockets: Path, tell, monkeypatch: pytest.MonkeyPatch) -> None:
    first, flavour, _ = tell()
    assert flavour == "None"
    monkeypatch.setenv("FLAVOUR", "salt")
    assert tell() == [first, "salt", "None"]
    monkeypatch.setenv("OMP_DYNAMIC", "true")  # read when torch is loaded: that server cannot be used
    other, _, dynamic = tell()
    assert dynamic == "true"
    assert other != first


def test_an_edit_of_the_package_replaces_the_server(
    sockets: Path, tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "SOURCES", tmp_path)
    first, *_ = tell()
    (tmp_path / "minicache_course").mkdir()
    (tmp_path / "minicache_course" / "module.py").write_text("")
    second, *_ = tell()
    assert second != first
    wait_for_the_end(int(first))
    assert len(list(sockets.iterdir())) == 1


def test_a_folder_that_is_open_to_others_is_not_used(sockets: Path, tell) -> None:
    sockets.mkdir(mode=0o755)
    assert tell()[0] == str(os.getpid())
    assert not list(sockets.iterdir())


def test_a_server_that_was_killed_is_replaced(sockets: Path, tell) -> None:
    first, *_ = tell()
    os.kill(int(first), signal.SIGKILL)
    wait_for_the_end(int(first))
    assert tell()[0] != first


def test_a_server_that_does_not_answer_is_replaced(sockets: Path, tell, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = tell()
    (path,) = sockets.iterdir()
    path.unlink()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        monkeypatch.setattr(resident, "_PATIENCE", 0.2)
        threading.Timer(0.3, monkeypatch.setattr, (resident, "_PATIENCE", 30.0)).start()
        assert tell()[0] not in (first, str(os.getpid()))


def test_a_server_that_cannot_be_started_is_done_without(sockets: Path, tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_name", lambda *_: "x" * 200)  # longer than the path of a socket can be
    assert tell()[0] == str(os.getpid())


def test_two_gradings_at_once(sockets: Path, tests: Path) -> None:
    with ResidentServer() as one, ResidentServer() as other:
        first, second = start(one, tests, "test_spin"), start(other, tests, "test_spin")
        assert first.stop() == -signal.SIGKILL
        assert second.poll() is None
        assert second.stop() == -signal.SIGKILL


def test_a_server_that_has_no_clients_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    monkeypatch.setattr(resident, "IDLE", 0.05)
    monkeypatch.setattr(resident, "_LOOK", 0.02)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("it.sock")
        listener.listen()
        resident._listen(listener, Path("it.sock"), {})
    assert not Path("it.sock").exists()


def test_a_server_whose_socket_is_gone_ends(sockets: Path, tell) -> None:
    first, *_ = tell()
    next(sockets.iterdir()).unlink()
    wait_for_the_end(int(first))


GRADE = "from minicache_cli import main; main()"
SPIN = """
import os
from pathlib import Path

def color(role, scheme="light"):
    Path("run.unfinished").write_text(str(os.getpid()))
    Path("run.unfinished").rename("run")
    while True: pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_ends_with_its_client(sockets: Path, toys: Toys, number: signal.Signals) -> None:
    toys.write(color=SPIN)
    command = [sys.executable, "-c", GRADE, "grade", "0"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=toys.workspace.root, stdout=quiet, stderr=quiet) as client:
        told = toys.workspace.root / "run"
        until = time.monotonic() + 30
        while not told.exists():
            assert client.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        pid = int(told.read_text())
        assert is_alive(pid)
        client.send_signal(number)
    wait_for_the_end(pid)
    assert client.returncode in (-number, 128 + number, 1)
