"""The server that stays between commands: `minicache grade` then starts without importing torch again.

The first grading on Linux starts it in the background. It listens on a Unix socket in a folder that is closed to other
users, and forks for each client a process that serves runs as `server.py` does: one client's end is not felt by the
others.

The name of the socket is a hash of the interpreter, the package's files, and whatever else is read when the libraries
are loaded. After an edit of the package there is no socket of the new name, so another server is started, which removes
the old socket. A server ends when its socket or its Python is gone, and after `IDLE` seconds without a client.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import NoReturn

from minicache_course.server import PytestServer, load_kept, serve
from minicache_course.workspace import PACKAGES, SOURCES

IDLE = 15 * 60.0
"""Seconds without a new client after which a server ends."""

_LOOK = 1.0  # seconds between two looks at its socket
_PATIENCE = 5.0  # seconds for the answer of a server that is there; forking takes milliseconds

# Variables that begin so are read when Python starts or a library is loaded. All others are the run's own.
_READ_AT_START: tuple[str, ...] = ("PYTHON", "LANG", "LC_", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
_READ_AT_START += ("TORCH", "PYTORCH", "ATEN_", "CUDA", "NVIDIA_", "TRITON", "NUMBA", "HYPOTHESIS")


class ResidentServer(PytestServer):
    """The owner's end of the user's resident server, which is started if there is none.

    Where there can be none (not on Linux, no folder for its socket), this is a `PytestServer`.
    """

    def _connect(self) -> None:
        connection = self._open_resident() if sys.platform == "linux" else None
        if connection is None:
            super()._connect()
            return
        self._process = None
        with connection:  # the two files keep it open
            self._jobs = connection.makefile("w", encoding="utf-8")
            self._answers = connection.makefile("r", encoding="utf-8")

    def _open_resident(self) -> socket.socket | None:
        """A connection to the server, or None if there is none and none can be started."""
        try:
            path = _folder() / _name(self._preload, self._environment)
            if connection := _open(path):
                return connection
            command = [sys.executable, "-P", "-m", "minicache_course.resident", str(path), *self._preload]
            devnull = subprocess.DEVNULL  # `minicache grade 1 | tee log` must not wait for the server's end
            started = subprocess.run(
                command,
                env=self._environment,
                stdin=devnull,
                stdout=devnull,
                stderr=devnull,
                start_new_session=True,
                check=False,
            )
            return _open(path) if started.returncode == 0 else None
        except OSError:
            return None


def _folder() -> Path:
    """The folder of the sockets.

    Raises:
        PermissionError: another user could put a server of their own there.
    """
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(given, "minicache") if os.path.isdir(given) else Path(gettempdir(), f"minicache-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to others")
    return folder


def _name(preload: Sequence[str], environment: dict[str, str]) -> str:
    """The socket's file name: which installation's server it is, and in which state that was loaded."""
    # Process ids and paths mean the same to both ends only where they share these.
    spaces = [os.readlink(f"/proc/self/ns/{each}") for each in ("pid", "mnt")]
    installation = (sys.executable, sys.prefix, str(SOURCES), *preload, *spaces)
    modules = (file for name in PACKAGES for file in (SOURCES / name).rglob("*.py"))
    files = sorted((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in modules)
    libraries = os.stat(sysconfig.get_path("purelib")).st_mtime_ns  # changes when a package comes or goes
    read = sorted(item for item in environment.items() if item[0].startswith(_READ_AT_START))
    state = (sys.version, libraries, files, read)
    return "-".join(hashlib.sha256(repr(each).encode()).hexdigest()[:12] for each in (installation, state)) + ".sock"


def _open(path: Path) -> socket.socket | None:
    """A connection to the server at `path` that has answered, or None."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with suppress(OSError):
        connection.settimeout(_PATIENCE)
        connection.connect(str(path))
        if connection.recv(1):
            connection.settimeout(None)
            return connection
    connection.close()
    return None


# --- the process ----------------------------------------------------------------------------------------------------


def reside(path: Path, preload: Sequence[str]) -> None:
    """Load everything, listen, and go on in the background; this process ends once a client can connect."""
    loaded = load_kept(preload)
    os.chdir("/")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unfinished = path.with_suffix(f".{os.getpid()}")
    listener.bind(str(unfinished))
    listener.listen()
    unfinished.rename(path)  # in place of a server that was started at the same time, which will notice
    installation = path.name.partition("-")[0]
    for other in path.parent.glob(f"{installation}-*.sock"):
        if other != path:
            other.unlink(missing_ok=True)
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes that serve clients are not waited for
        _listen(listener, path, loaded)
    os._exit(0)


def _listen(listener: socket.socket, path: Path, loaded: dict[str, str]) -> None:
    """Fork a process for each client, until none has connected for long, or the socket or Python is gone."""
    mine = _identity(path)
    listener.settimeout(_LOOK)
    until = time.monotonic() + IDLE
    while time.monotonic() < until:
        with suppress(TimeoutError):
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _receive(client, loaded)
            client.close()
            until = time.monotonic() + IDLE
        if _identity(path) != mine:
            return
        if not os.path.exists(sys.executable):
            break
    path.unlink(missing_ok=True)


def _receive(client: socket.socket, loaded: dict[str, str]) -> NoReturn:
    """Serve one client to its end, as a process that was started for it alone would."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        client.setblocking(True)
        client.sendall(b"\n")
        for standard in (0, 1):  # a run replaces them, so no run holds the connection
            os.dup2(client.fileno(), standard)
        client.close()
        with open(0, encoding="utf-8") as jobs, open(1, "w", encoding="utf-8") as answers:
            serve(jobs, answers, loaded)
    finally:
        os._exit(0)


def _identity(path: Path) -> tuple[int, int] | None:
    """Of the file at `path`: a number is used again once its file is gone, but not with the same time."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


if __name__ == "__main__":
    reside(Path(sys.argv[1]), sys.argv[2:])
