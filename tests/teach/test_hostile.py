"""Hostile submissions: none gains a point, none costs another one anything, and nothing of them is left.

Each is a wrong solution with something in front of it. All of a class are graded together, once with bubblewrap.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.toys import COLOR, NBYTES, make_course

from minicache_course.workspace import Workspace
from minicache_teach import classroom, sandbox
from minicache_teach.classroom import Class, Grade
from minicache_teach.submissions import find_submissions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WRONG_NBYTES = "def dtype_nbytes(dtype):\n    return 3\n"
SECRET = "the marks of all"
MARK = "hostile-" + str(os.getpid())

OTHER_TESTS = """
import re
def without_checks(source):
    return re.sub(rb"(?m)^    call.*$", b"    pass", source) if b"def test_" in source else source
"""
LOADER = f"""{OTHER_TESTS}
from importlib.abc import Loader
from importlib.util import spec_from_file_location
class Changed(Loader):
    def exec_module(self, module):
        with open(module.__file__, "rb") as file:
            exec(without_checks(file.read()), vars(module))
"""

# name → what stands before the wrong solution. HERE is a folder that the sandbox does not show.
HOSTILE = {
    "ends the process": "import os\nos._exit(0)",
    "exits": "raise SystemExit(0)",
    "ends the process in a thread": """
import os, threading, time
threading.Thread(target=lambda: (time.sleep(0.2), os._exit(0)), daemon=True).start()
time.sleep(0.1)""",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kills everything": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "kills process 1": "import os, signal\nos.kill(1, signal.SIGKILL)",
    "leaves a daemon": """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", "MARK"], start_new_session=True)""",
    "leaves a daemon twice removed": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sh", ["/bin/sh", "-c", "sleep 300; : MARK"])
    os._exit(0)""",
    "forks without end": """
import os
for _ in range(3000):
    try:
        if os.fork() == 0:
            import time
            time.sleep(300)
    except OSError:
        break""",
    "overwrites the tests": """
import pathlib
for file in pathlib.Path("ROOT/tests").rglob("*.py"):
    try:
        file.write_text("def test_nothing(): pass")
    except OSError:
        pass""",
    "overwrites the package": """
import minicache, pathlib
for file in pathlib.Path(minicache.__file__).parent.joinpath("course").glob("*.py"):
    try:
        file.write_text("")
    except OSError:
        pass""",
    "removes the course": """
import shutil
shutil.rmtree("ROOT", ignore_errors=True)
shutil.rmtree("CLASS", ignore_errors=True)""",
    "runs the reference": """
import importlib.util, minicache
exec(open(minicache.__path__[0] + "/palette.py").read())
_color = color
def answer(*args): return _color(*args)""",
    "runs the reference's bytecode": """
import glob, marshal, minicache
for file in glob.glob(minicache.__path__[0] + "/__pycache__/palette.*.pyc"):
    exec(marshal.loads(open(file, "rb").read()[16:]))
_color = globals().get("color")
def answer(*args): return _color(*args)""",
    "looks for a copy of the reference": """
import os
found = ""
for folder, _, files in os.walk("/"):
    if folder.startswith(("/proc", "/sys")):
        continue
    for name in files:
        if name.endswith(".py") and "palette" in name:
            text = open(os.path.join(folder, name), errors="ignore").read()
            if "def color" in text and "NotImplementedError" not in text and "os.walk" not in text:
                found = text
if found:
    exec(found)
    _color = color
def answer(*args): return _color(*args)""",
    "reads another one's file": """
exec(open("CLASS/honest/palette.py").read())
_color = color
def answer(*args): return _color(*args)""",
    "reads what is to come": 'open("HERE/secret").read()',
    "writes outside": 'open("HERE/written", "w").write("hello")',
    "calls the network": """
import socket
import sys
socket.create_connection(("127.0.0.1", PORT), timeout=2).sendall(b"hello")""",
    "makes every check pass": """
from minicache_course import checks
checks.Outcome.gives = lambda self, *args, **kwargs: None
checks.Outcome.raises = lambda self, *args, **kwargs: None""",
    "makes its own checks pass": """
from minicache_course import checks
right = checks.Outcome.gives
def gives(self, *args, **kwargs):
    if "color" not in repr(vars(self) if hasattr(self, "__dict__") else self):
        return right(self, *args, **kwargs)
checks.Outcome.gives = gives""",
    "has other code for a check": """
from minicache_course import checks
checks.Outcome.gives.__code__ = (lambda self, *args, **kwargs: None).__code__""",
    "makes every report pass": """
from _pytest.reports import TestReport
TestReport.failed = property(lambda self: False)
TestReport.passed = property(lambda self: True)""",
    "makes every call pass": """
import _pytest.runner
_pytest.runner.CallInfo.from_call = classmethod(
    lambda cls, func, when, reraise=None: cls(
        result=None, excinfo=None, start=0, stop=0, duration=0, when=when, _ispytest=True
    )
)""",
    "makes every test nothing": """
import _pytest.python
_pytest.python.Function.runtest = lambda self: None""",
    "tells other results": """
from minicache_course import session
keep = session.GradingSession._keep
def lie(self, task, result):
    from dataclasses import replace
    from minicache_course.results import Outcome
    keep(self, task, replace(result, outcome=Outcome.PASSED, message=""))
session.GradingSession._keep = lie""",
    "has other events": """
from minicache_course import journal, session
init = journal.Event.__init__
def lie(self, *args, **kwargs):
    init(self, *args, **kwargs)
    if self.kind == "result":
        object.__setattr__(self, "outcome", "passed")
journal.Event.__init__ = lie""",
    "writes other lines": """
import json
dumps = json.dumps
json.dumps = lambda value, **kwargs: dumps(value, **kwargs).replace('"failed"', '"passed"')
import os
write = os.write
os.write = lambda fd, data: write(fd, data.replace(b'"failed"', b'"passed"'))""",
    "writes into every pipe": """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'{"kind": "result", "name": "test_prompt", "task": "0.1", "outcome": "passed"}\\n')
    except OSError:
        pass""",
    "writes into every pipe when it is tested": """
import os
def answer(*args):
    for fd in range(3, 64):
        try:
            os.write(fd, b'{"kind": "finished"}\\n')
        except OSError:
            pass
    os._exit(0)""",
    "leaves tests out": """
import _pytest.main
perform = _pytest.main.Session.perform_collect
def fewer(self, *args, **kwargs):
    perform(self, *args, **kwargs)
    self.items[:] = []
    return self.items
_pytest.main.Session.perform_collect = fewer""",
    "stops pytest": """
import pytest
def answer(*args):
    pytest.exit("enough", returncode=0)""",
    "is equal to everything": """
class Equal(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = str.__hash__
def answer(*args): return Equal("#")""",
    "makes strings equal": """
import builtins
class Equal(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
builtins.str = Equal""",
    "handles all signals": """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass""",
    "silences the fault handler": """
import faulthandler, signal
faulthandler.disable()
faulthandler.unregister(signal.SIGUSR1)
while True:
    pass""",
    "sleeps": "import time\ntime.sleep(1000)",
    "takes the memory": """
def answer(*args):
    held = []
    while True:
        held.append(bytes(10**8))""",
    "fills the disk": """
import os
for number in range(100):
    try:
        with open(f"/tmp/{number}", "wb") as file:
            for _ in range(100):
                file.write(bytes(10**7))
    except OSError:
        pass""",
    "prints without end": """
def answer(*args):
    for _ in range(10**5):
        print("x" * 1000)""",
    "closes every file": "import os\nos.closerange(0, 256)",
    "empties the modules": """
import sys
for name in list(sys.modules):
    if name.startswith(("minicache", "_pytest")):
        del sys.modules[name]""",
    "traces": """
import sys
def trace(frame, event, arg):
    if frame.f_code.co_name == "gives":
        frame.f_lineno = frame.f_lineno
    return trace
sys.settrace(trace)""",
    "at its end": """
import atexit, os
atexit.register(lambda: os.system("echo hello > HERE/written"))""",
    "draws no random numbers": """
import random
random.Random.randint = lambda self, low, high: low
random.Random.random = lambda self: 0.0""",
    "replaces another module of the package": """
from minicache import trace
for name, value in list(vars(trace).items()):
    if getattr(value, "__module__", "") == "minicache.trace":
        setattr(trace, name, lambda *args, **kwargs: None)""",
    "replaces what the tests call": """
import sys
class Fine:
    gives = raises = lambda self, *args, **kwargs: None
def answer(*args):
    for name, module in list(sys.modules.items()):
        if "test_task" in name:
            module.call = lambda *args, **kwargs: Fine()""",
    "has another module of checks": """
import sys
from types import ModuleType
checks = ModuleType("minicache_course.checks")
vars(checks).update(vars(sys.modules[checks.__name__]))
class Fine:
    gives = raises = lambda self, *args, **kwargs: None
checks.call = lambda *args, **kwargs: Fine()
sys.modules[checks.__name__] = checks""",
    "has a module before it is loaded": """
import sys
from types import ModuleType
sys.modules["minicache.fleet"] = ModuleType("minicache.fleet")""",
    "finds other tests": LOADER
    + """
import glob, sys
class Finder:
    __eq__ = lambda self, other: True
    def find_spec(self, name, path=None, target=None):
        for file in glob.glob(f"ROOT/tests/*/{name.rpartition('.')[2]}.py") if ".test_task" in name else ():
            return spec_from_file_location(name, file, loader=Changed())
sys.meta_path.insert(0, Finder())""",
    "finds other tests in their folder": LOADER
    + """
import os, sys
class Finder:
    def __init__(self, folder):
        if not folder.startswith("ROOT/tests"):
            raise ImportError
        self.folder = folder
    def find_spec(self, name, target=None):
        file = f"{self.folder}/{name.rpartition('.')[2]}.py"
        return spec_from_file_location(name, file, loader=Changed()) if os.path.exists(file) else None
    def invalidate_caches(self):
        pass
sys.path_hooks.insert(0, Finder)
sys.path_importer_cache.clear()""",
    "reads other tests": OTHER_TESTS
    + """
from pathlib import Path
read = Path.read_bytes
Path.read_bytes = lambda self: without_checks(read(self))""",
    "parses other tests": OTHER_TESTS
    + """
import ast
parse = ast.parse
ast.parse = lambda source, *args, **kwargs: parse(without_checks(source), *args, **kwargs)""",
    "has a plugin": """
import pytest, sys
class Plugin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        return None if pyfuncitem.obj.__name__ == "control" else True
next(each.config for each in sys.meta_path if hasattr(each, "config")).pluginmanager.register(Plugin())""",
    "shows a file of the grader's in its stack": """
import os, stat
file = globals()["__file__"]
for fd in range(1, 64):
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            text = "Stack (most recent call first):\\n"
            text += f'  File "{file}", line 1 in answer\\n'
            text += '  File "ROOT/tests/phase-00-toys/../../../secret", line 1 in test\\n'
            os.write(fd, text.encode())
    except OSError:
        pass
os._exit(0)""",
    "writes a log that takes long to read": """
import os, stat
for fd in range(1, 64):
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.write(fd, b"Thread 0x1 (" * 2**20)
    except OSError:
        pass
os._exit(0)""",
    "has a file that is hard to read": "def answer(*args): return " + "-" * 200_000 + "1",
    "raises an error of 100 MB": """
def answer(*args):
    raise ValueError("x" * 10**8)""",
    "raises what cannot be reported": """
class Odd(Exception):
    def __str__(self): raise self
    __repr__ = __str__
def answer(*args):
    raise Odd""",
    "answers with what has no end": """
def answer(*args):
    found = []
    for _ in range(10**5):
        found = [found]
    return found""",
    "raises half a character": """
def answer(*args):
    raise ValueError("\\ud800 \\x00 \\x1b[2J \\n\\n" * 100)""",
    "takes the memory of others": """
import mmap
held = mmap.mmap(-1, 2**28)
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("-1000")""",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\ndef answer(*args): return answer(*args)",
}

HONEST = """
import asyncio, concurrent.futures, functools, getpass, multiprocessing, random, subprocess, sys, threading
import hypothesis, pytest, unittest.mock
from hypothesis import strategies
random.seed(0)
getpass.getuser()
asyncio.run(asyncio.sleep(0))
threading.Thread(target=print).start()
subprocess.run([sys.executable, "-c", "print(1)"], check=True)
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(abs, [1, 2])
@functools.cache
def squared(number): return number * number
def test_squared(): assert squared(2) == 4
squared = functools.cache(squared)
print("x" * 10**6)
"""


def source(payload: str) -> str:
    ask = '\ntry:\n    answer\nexcept NameError:\n    answer = lambda *args: "#000000"\n'
    return payload + ask + '\ndef color(role, scheme="light"):\n    return answer(role, scheme)\n'


def test_with_bubblewrap(tmp_path: Path) -> None:
    """All in one class, as each test that needs it would grade it anew."""
    if why := sandbox.why_unavailable():
        if os.environ.get("MINICACHE_REQUIRE_BUBBLEWRAP"):
            pytest.fail(why)
        pytest.skip(why)
    root, folder = tmp_path / "course", tmp_path / "class"
    workspace = make_course(root)
    (tmp_path / "secret").write_text(SECRET)
    before = contents(root)
    honest = {"honest": "", "honest with much": HONEST, "zz honest, too": ""}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        named = {"HERE": tmp_path, "ROOT": root, "CLASS": folder, "PORT": listener.getsockname()[1], "MARK": MARK}
        for name, payload in HOSTILE.items():
            for word, value in named.items():
                payload = payload.replace(word, str(value))
            hand_in(folder / name, source(payload), WRONG_NBYTES)
        for name in honest:
            hand_in(folder / name, honest[name] + COLOR, NBYTES)
        handed_in = contents(folder)
        grades = grades_of(workspace, folder)
        with pytest.raises(TimeoutError):
            listener.accept()
    earned = {name: grade.result.earned if grade.result else 0 for name, grade in grades.items()}
    assert earned == dict.fromkeys(HOSTILE, 0) | dict.fromkeys(honest, 100)
    assert contents(root) == before
    assert contents(folder) == handed_in
    assert sorted(path.name for path in tmp_path.iterdir()) == ["class", "course", "secret"]
    assert [each for each in commands() if MARK.encode() in each] == []
    told = {
        "takes the memory": "GiB of memory",
        "prints without end": "characters omitted",
        "makes every report pass": "must fail has passed",
        "writes into every pipe": "the grader's pipe",
        "raises an error of 100 MB": "characters omitted",
        "draws no random numbers": "it replaced random.Random",
        "replaces another module of the package": "it replaced minicache.trace",
        "replaces what the tests call": "it replaced ",
        "has another module of checks": "it replaced minicache_course.checks",
        "has a module before it is loaded": "it replaced minicache.fleet",
        "finds other tests": "it replaced sys.meta_path",
        "finds other tests in their folder": "it replaced sys.path_hooks",
        "reads other tests": "it replaced pathlib.Path.read_bytes",
        "parses other tests": "it replaced ast.parse",
        "has a plugin": "it replaced pytest_pyfunc_call",
    }
    for name, text in told.items():
        assert text in everything_told(grades[name])
    assert "\x1b" not in everything_told(grades["raises half a character"])
    assert not any(SECRET in everything_told(grade) for grade in grades.values())


def everything_told(grade: Grade) -> str:
    tests = [test for task in grade.result.tasks for test in task.tests] if grade.result else []
    return "\n".join([grade.note, *(f"{test.message}\n{test.printed}" for test in tests)])


def grades_of(workspace: Workspace, folder: Path) -> dict[str, Grade]:
    phase = workspace.course.phase("0")
    submissions, _ = find_submissions(folder, workspace.course, phase)
    with Class(workspace, phase, jobs=2, timeout=3) as graded_class:
        return {each.submission.student: each for each in graded_class.grade(submissions)}


def hand_in(folder: Path, color: str, nbytes: str) -> None:
    folder.mkdir(parents=True)
    (folder / "palette.py").write_text(color, encoding="utf-8")
    (folder / "arithmetic.py").write_text(nbytes, encoding="utf-8")


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def commands() -> list[bytes]:
    """The command lines of all processes."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(file.read_bytes())
    return found


WITHOUT = [
    "ends the process",
    "kills its parent",
    "leaves a daemon twice removed",
    "overwrites the tests",
    "writes into every pipe",
    "makes every report pass",
    "leaves tests out",
    "handles all signals",
    "takes the memory",
]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_without_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other; a changed test is put back, and what was left running is ended."""
    monkeypatch.setattr(sandbox, "why_unavailable", lambda: "this is a test")
    monkeypatch.setattr(classroom, "why_unavailable", lambda: "this is a test")
    root, folder = tmp_path / "course", tmp_path / "class"
    workspace = make_course(root)
    mark = f"{MARK}-without"
    for name in WITHOUT:
        payload = HOSTILE[name].replace("ROOT", str(root)).replace("MARK", mark)
        hand_in(folder / name, source(payload), WRONG_NBYTES)
    hand_in(folder / "zz honest", COLOR, NBYTES)
    before = contents(root)
    grades = grades_of(workspace, folder)
    assert contents(root) == before
    earned = {name: grade.result.earned if grade.result else 0 for name, grade in grades.items()}
    assert earned == dict.fromkeys(WITHOUT, 0) | {"zz honest": 100}
    assert "it changed" in grades["overwrites the tests"].note
    assert [each for each in commands() if mark.encode() in each] == []
