"""A submission's runs, each in a sandbox: bubblewrap shows it what it needs, and nothing else.

What a run sees is a list: Python and its packages, the system's libraries, minicache, this phase's tests and the
submission's own files, all to be read only; an empty /tmp of bounded size; no network but its own loopback; no process
but its own. Where the submission has a module, the starter is in the place of the reference, and no copy of it is left.
When a run ends, its sandbox ends with it and everything in it.

Where bubblewrap cannot be used, a run is a plain process with the same limits, and what it must not change is compared
with a copy afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import cache
from itertools import count
from pathlib import Path
from threading import Lock

from minicache_course.errors import CourseError, TamperingError
from minicache_course.journal import Job
from minicache_course.server import preload_for
from minicache_course.starters import starter
from minicache_course.table import Phase
from minicache_course.workspace import INSTALLED, PACKAGES, RECORD, SOURCES, TABLE, Workspace, reference_file

_SOURCES = SOURCES.resolve()
_TMP_NBYTES = 2**28
_LIMITS = {"CPU": 600, "NPROC": 512, "NOFILE": 1024}
_USERS = range(61184, 65520)  # systemd's for services: a user's number of processes is counted over all sandboxes
_counter = count(os.getpid())
_PATIENCE = 20.0  # seconds for a sandbox to be made: milliseconds, on a machine that is not busy
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@cache
def why_unavailable() -> str:
    """Why submissions cannot be isolated on this machine, and what to do about it; "" if they can."""
    if not sys.platform.startswith("linux"):
        return "bubblewrap requires Linux: grade in a container or a virtual machine"
    if not shutil.which("bwrap"):
        return "bubblewrap is not installed: apt install bubblewrap"
    tried = subprocess.run(
        ["bwrap", *_ISOLATION, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        return (
            f"bubblewrap cannot create a sandbox here ({tried.stderr.strip()}): allow user namespaces on this machine"
        )
    return ""


@cache
def _size() -> list[str]:
    """What bounds a folder in memory: nothing did before bubblewrap 0.8."""
    printed = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False)
    return ["--size", str(_TMP_NBYTES)] if "--size" in printed.stdout + printed.stderr else []


def _is_root() -> bool:
    return os.geteuid() == 0


# Root becomes another user in each sandbox, as the number of its own processes knows no limit. Others need a namespace.
_ISOLATION = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--die-with-parent", "--new-session"]
_ISOLATION += ["--cap-drop", "ALL", *(["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if _is_root() else [])]
_ISOLATION += [] if _is_root() else ["--unshare-user"]


def isolated(command: Sequence[str], *shown: Path) -> list[str]:
    """A command in a sandbox that shows Python, minicache and these files, to be read only.

    Where bubblewrap cannot be used (`why_unavailable`), it is the command itself.
    """
    if why_unavailable():
        return list(command)
    view = _View()
    view.system()
    view.python()
    for path in (*shown, *(_SOURCES / name for name in PACKAGES)):
        view.show(path)
    return ["bwrap", *_ISOLATION, *view.options, *command]


class SandboxedRun:
    """One run, to the one who follows it.

    Args:
        process: bubblewrap's, or the run's own.
        pid: of the run itself.
        status: closes what bubblewrap writes to until its end.
    """

    def __init__(self, process: subprocess.Popen[str], pid: int, status: ExitStack) -> None:
        self.pid = pid
        self._process = process
        self._status = status

    def poll(self) -> int | None:
        """The exit code, −N if signal N ended it, or None while it runs."""
        code = self._process.poll()
        # Of a process that a signal has ended, bubblewrap and the shell tell 128 more than the signal.
        return 128 - code if code is not None and 128 < code < 128 + signal.NSIG else code

    def ask(self) -> None:
        """Have it write to the log where it is."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def stop(self) -> int:
        """End it, and all that it has started; the exit code."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with the one who made the sandbox, all in it ends
        self._process.wait()
        self._status.close()
        code = self.poll()
        assert code is not None
        return code


class Sandbox:
    """Starts the runs that grade one submission. A context manager: nothing of it is left running at its end.

    Args:
        workspace: the course, and in its `labs` a copy of the submission's files, which becomes readable for all.
        phase: what is graded.
    """

    def __init__(self, workspace: Workspace, phase: Phase) -> None:
        self._workspace, self._phase = workspace, phase
        self._lock = Lock()
        self._run: SandboxedRun | None = None
        self._ended = False
        self._stack = ExitStack()
        self.hides_reference = not why_unavailable()

    def __enter__(self) -> Sandbox:
        self._starters = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="minicache-starters-")))
        self._starters.chmod(0o755)
        for path in (self._workspace.labs, *self._workspace.labs.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        if not self.hides_reference:
            self._stack.enter_context(_watched(self._workspace, self._phase))
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.end()
        self._stack.close()

    def end(self) -> None:
        """End what runs, from whatever thread; no other run is started."""
        with self._lock:
            self._ended = True
            if self._run:
                self._run.stop()

    def start(self, job: Job) -> SandboxedRun:
        """Begin a run.

        Raises:
            CourseError: it could not be begun, or `end` was called.
        """
        with self._lock:
            if self._ended:
                raise CourseError("interrupted")
            isolated = self.hides_reference
            user = _USERS[next(_counter) % len(_USERS)] if isolated and _is_root() else -1
            with open(job.log, "wb") as log:
                confined = replace(job, log="", user=user, limits=_LIMITS, preload=list(preload_for(self._phase)))
                command = [*self._prefix(job), sys.executable, "-P", "-m", "minicache_course.run"]
                run = _start(command, confined, log.fileno(), isolated=isolated)
            self._run = run
        return run

    def _prefix(self, job: Job) -> list[str]:
        """What makes the sandbox around the command, or else a parent that is not this process."""
        if not self.hides_reference:
            return ["/bin/sh", "-c", '"$@"; exit $?', "sh"] if sys.platform.startswith("linux") else []
        view = _View()
        view.system()
        view.python()
        root = self._workspace.root
        for name in (TABLE, f"labs/{RECORD}", INSTALLED, "pyproject.toml", "pytest.ini", "tests/conftest.py"):
            view.show(root / name)
        view.show(root / "tests" / "scheduler" / "golden")
        for tests in sorted((root / "tests").glob("phase-*")):  # some use what another phase's conftest.py has
            view.show(tests)
            view.blank(tests / "wrong.toml")
        view.show(self._workspace.labs)
        for name in PACKAGES:
            view.show(_SOURCES / name)
        view.empty(_SOURCES / "minicache_course" / "files")
        for module, file in self._workspace.lab_files(self._phase).items():
            if file.is_file() and module not in job.unusable:
                reference = reference_file(module)
                view.replace(reference, self._starter(module))
                view.empty(reference.parent / "__pycache__")
        view.write(Path(job.events))
        return ["bwrap", *_ISOLATION, *view.options]

    def _starter(self, module: str) -> Path:
        file = self._starters / module
        if not file.is_file():
            file.write_text(starter(self._phase, module), encoding="utf-8")
        return file


class _View:
    """What a sandbox shows, as bubblewrap's options; later ones cover earlier ones."""

    def __init__(self) -> None:
        self.options = ["--clearenv"]
        environment = {"HOME": "/tmp", "TMPDIR": "/tmp", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "USER": "nobody"}
        environment |= {"PYTHONPATH": str(_SOURCES), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
        for name, value in environment.items():
            self.options += ["--setenv", name, value]
        self._made = {Path("/"), Path("/tmp"), Path("/proc"), Path("/dev")}
        self._shown: list[Path] = []

    def system(self) -> None:
        """The system's libraries, its devices, /proc and an empty /tmp."""
        for name in ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin"):
            if os.path.islink(name):
                self.options += ["--symlink", os.readlink(name), name]
            else:
                self.show(Path(name))
        for name in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/hosts"):
            self.show(Path(name))
        self.options += ["--proc", "/proc", "--dev", "/dev"]
        for name in ("/dev/shm", "/tmp"):
            self.options += ["--perms", "1777", *_size(), "--tmpfs", name]
        self.options += ["--remount-ro", "/dev"]
        self.show(Path("/sys/devices/system/cpu"))

    def python(self) -> None:
        """Python, and the packages that are installed for it, but for another copy of these."""
        prefixes = [Path(each) for each in (sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix)]
        packages = [Path(each) for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
        for each in (*prefixes, Path(os.path.realpath(sys.executable)).parents[1], *packages):
            if not any(each.is_relative_to(shown) for shown in ("/usr/lib", "/usr/local")) and each != Path("/usr"):
                self.show(each)
        for each in packages:
            if each != _SOURCES:
                for name in PACKAGES:
                    self.empty(each / name)

    def show(self, path: Path) -> None:
        """A file or folder that is there, to be read only."""
        if path.exists():
            self._make_way(path)
            self.options += ["--ro-bind", str(path), str(path)]
            self._shown.append(path)

    def write(self, pipe: Path) -> None:
        """A named pipe to write into."""
        self._make_way(pipe)
        self.options += ["--bind", str(pipe), str(pipe)]

    def replace(self, path: Path, by: Path) -> None:
        """A file, with another's content."""
        self.options += ["--ro-bind", str(by), str(path)]

    def blank(self, path: Path) -> None:
        """A file that is shown, without its content."""
        if path.exists():
            self.replace(path, Path("/dev/null"))

    def empty(self, folder: Path) -> None:
        """A folder that is shown, without its content."""
        if folder.is_dir():
            self.options += ["--perms", "0755", "--tmpfs", str(folder), "--remount-ro", str(folder)]

    def _make_way(self, path: Path) -> None:
        """The folders above, which only root could enter as bubblewrap makes them."""
        for folder in reversed(path.parents):
            if folder not in self._made and not any(folder.is_relative_to(each) for each in self._shown):
                self.options += ["--perms", "0755", "--dir", str(folder)]
                self._made.add(folder)


def _start(command: Sequence[str], job: Job, log: int, *, isolated: bool) -> SandboxedRun:
    """Start a run, and give it its job."""
    status, status_end = os.pipe() if isolated else (-1, -1)
    options = ["--json-status-fd", str(status_end)] if isolated else []
    environment = None if isolated else _environment()
    process = subprocess.Popen(
        [*command[:1], *options, *command[1:]],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        pass_fds=(status_end,) if isolated else (),
        start_new_session=True,
    )
    pid, stack = process.pid, ExitStack()
    if isolated:
        os.close(status_end)
        answers = stack.enter_context(os.fdopen(status, encoding="utf-8"))
        line = answers.readline()
        pid = _child_of(json.loads(line)["child-pid"], process) if line else pid
    elif sys.platform.startswith("linux"):
        pid = _child_of(pid, process)
    assert process.stdin
    with suppress(BrokenPipeError), process.stdin as stdin:  # it has ended already: its exit code tells
        json.dump(asdict(job), stdin)
    return SandboxedRun(process, pid, stack)


def _child_of(parent: int, process: subprocess.Popen[str]) -> int:
    """The first process in a sandbox, which the sandbox's own process 1 starts; that one itself if there is none."""
    until = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < until:
        if children := _children(parent):
            return min(children)
        time.sleep(0.002)
    return parent


def _children(parent: int) -> list[int]:
    """The processes that a process has started and that run."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(file.parent.name))
    return found


# --- without bubblewrap ---------------------------------------------------------------------------------------------


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "LD_LIBRARY_PATH")}
    kept |= {"PYTHONPATH": str(_SOURCES), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HOME": tempfile.gettempdir()}


@contextlib.contextmanager
def _watched(workspace: Workspace, phase: Phase) -> Iterator[None]:
    """End what a submission leaves running, and put back what it has changed of the grader's files.

    Raises:
        TamperingError: it changed some.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # what loses its parent becomes this process's child
    others = set(_children(os.getpid()))
    files = _contents(workspace, phase)
    try:
        yield
    finally:
        while left := set(_children(os.getpid())) - others:
            for pid in left:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        changed = [file for file, content in files.items() if not file.is_file() or file.read_bytes() != content]
        changed += [file for file in _graders(workspace, phase) if file not in files]
        for file in changed:
            if file in files:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(files[file])
            else:
                file.unlink()
        if changed:
            raise TamperingError(f"it changed {', '.join(map(str, changed[:5]))}: restored")


def _contents(workspace: Workspace, phase: Phase) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in _graders(workspace, phase)}


def _graders(workspace: Workspace, phase: Phase) -> list[Path]:
    """The files that judge: the packages, the phase's tests, the table."""
    tests = workspace.tests(phase)
    modules = [file for name in PACKAGES for file in (_SOURCES / name).rglob("*.py")]
    return [*modules, *tests.rglob("*.py"), workspace.root / TABLE, *tests.parent.glob("conftest.py")]
