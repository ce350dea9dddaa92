"""The import finder: a learner's file, loaded *as* the module of the package that it stands in for.

`install({"minicache.cache.dense": Path("labs/phase-01-dense-cache/cache/dense.py")})` puts a finder before Python's
own, so every `import minicache.cache.dense` gets the learner's. The rest of the package stays the reference.
Errors show the learner's path and line.
"""

from __future__ import annotations

import importlib
import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from minicache_course.errors import CourseError
from minicache_course.progress import Progress
from minicache_course.workspace import find_workspace, is_edited


class LabLoader(SourceFileLoader):
    """Loads a learner's file: from its source each time, leaving no bytecode in the learner's folder."""

    def path_stats(self, path: str) -> Mapping[str, float]:
        """Without a source date Python neither reads nor writes a `.pyc`."""
        raise OSError("a learner's file is never cached")


class LabFinder(MetaPathFinder):
    """Answers for the modules in `files` only.

    Attributes:
        files: module name → the learner's file.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(files)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The learner's file as `name`, or None for Python to look further."""
        if name not in self.files:
            return None
        file = self.files[name]
        return spec_from_file_location(name, file, loader=LabLoader(name, str(file)))


def install(files: Mapping[str, Path]) -> LabFinder:
    """Let learners' files stand in for modules from now on.

    Args:
        files: module name → the learner's file.

    Raises:
        CourseError: one of the modules is already imported: its importers would keep the reference.
    """
    if early := [name for name in files if name in sys.modules]:
        raise CourseError(f"{', '.join(early)} was imported before the learner's file could take its place")
    finder = LabFinder(files)
    sys.meta_path.insert(0, finder)
    return finder


def uninstall(finder: LabFinder) -> None:
    """Take `finder` away again, and forget the modules that it loaded."""
    sys.meta_path.remove(finder)
    for name in finder.files:
        _forget(name)


def import_labs(
    finder: LabFinder,
    needs: Mapping[str, Iterable[str]],
    entering: Callable[[str], None] = lambda name: None,
) -> dict[str, BaseException]:
    """Import every learner's module; where one cannot be, put the reference back in its place.

    Args:
        finder: an installed finder. Modules that cannot be imported are taken out of its `files`.
        needs: module name → the names that it has to define.
        entering: called with the module's name before each import, to recognise a crash there.

    Returns:
        Module name → what its import raised, for those that failed. Whatever a file may raise is here, `SystemExit`
        included; only `KeyboardInterrupt` goes through.
    """
    failures: dict[str, BaseException] = {}
    for name in list(finder.files):
        while name in finder.files:
            entering(name)
            try:
                module = importlib.import_module(name)
                if missing := [each for each in needs.get(name, ()) if not hasattr(module, each)]:
                    raise ImportError(f"{show(finder.files[name])} does not define {', '.join(missing)}", name=name)
                break
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # A file that imports a broken one fails too: blame the innermost, then try the outer one again.
                culprit = _culprit(error, finder.files) or name
                failures[culprit] = error
                del finder.files[culprit]
                _forget(culprit)
                for other in finder.files:
                    _forget(other)
    return failures


@dataclass(frozen=True, slots=True)
class Lab:
    """One module of the course, and whose it is in this process.

    Attributes:
        module: `minicache.cache.dense`.
        file: the learner's file.
        missing: why the reference is used instead, in words; "" if the learner's file stands in for it.
        begun: whether the learner's file is no longer the starter.
    """

    module: str
    file: Path
    missing: str
    begun: bool


class _Announcer(MetaPathFinder):
    """Finds nothing, and tells of each module of the course once, just before it is loaded."""

    def __init__(self, labs: Iterable[Lab], tell: Callable[[Lab], None]) -> None:
        self._labs = {lab.module: lab for lab in labs}
        self._tell = tell

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """None: Python continues with the next finder."""
        if lab := self._labs.pop(name, None):
            self._tell(lab)


def install_finished_labs(loading: Callable[[Lab], None] = lambda lab: None) -> list[Lab]:
    """Let the learner's finished files stand in, for `--mine` on commands other than `grade`.

    A file is finished when all tasks in it passed and it has not changed since. The reference is used for the rest.

    Args:
        loading: called with each module that has tasks, just before it is loaded: a command runs only what it loads.

    Returns:
        Every module that has tasks, in the order of the course.

    Raises:
        CourseError: there is no course, or one of the modules is already imported.
    """
    labs = find_labs()
    install({lab.module: lab.file for lab in labs if not lab.missing})
    sys.meta_path.insert(0, _Announcer(labs, loading))
    return labs


def find_labs() -> list[Lab]:
    """Every module that has tasks, in the order of the course, and what keeps each file from being finished.

    Raises:
        CourseError: there is no course.
    """
    workspace = find_workspace()
    progress = Progress.load(workspace)
    return [
        Lab(module, file, progress.missing(phase, module, file), is_edited(workspace, phase, module))
        for phase in workspace.course
        for module, file in workspace.lab_files(phase).items()
    ]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file, as a person reads it: `labs/phase-01-dense-cache/cache/dense.py:41: the code`.

    Attributes:
        place: `labs/phase-01-dense-cache/cache/dense.py:41`.
        code: the source, "" if it cannot be read.
    """

    place: str
    code: str

    def __str__(self) -> str:
        return f"{self.place}: {self.code}" if self.code else self.place


def learners_line(error: BaseException) -> Line | None:
    """The deepest line of a learner's file that `error` passed through, or None."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return line_of(error.filename, error.lineno, error.text)
    found = None
    for frame, lineno in traceback.walk_tb(error.__traceback__):
        if isinstance(frame.f_globals.get("__loader__"), LabLoader):
            found = line_of(frame.f_code.co_filename, lineno)
    return found


def show(file: Path | str) -> str:
    """A file's path as a person reads it: from the working directory, else its last folder and name."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(Path(path.parent.name, path.name))


def learners_function(error: BaseException) -> str | None:
    """The deepest function of a learner's file that `error` passed through, such as `KVCache.append`, or None."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [each.f_code.co_qualname for each in frames if isinstance(each.f_globals.get("__loader__"), LabLoader)]
    return names[-1] if names else None


def line_of(file: str, lineno: int, code: str | None = None) -> Line:
    """The line `lineno` of `file`, and its source unless that is given."""
    return Line(f"{show(file)}:{lineno}", (code or linecache.getline(file, lineno)).strip())


def _culprit(error: BaseException, files: Mapping[str, Path]) -> str | None:
    """The module of the innermost learner's file whose loading `error` ended."""
    names = {str(file): name for name, file in files.items()}
    if isinstance(error, SyntaxError | OSError) and error.filename in names:
        return names[str(error.filename)]
    if isinstance(error, ImportError) and error.name in files and error.__traceback__ is not None:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not any(frame.f_code.co_filename in names for frame in frames):
            return error.name
    culprit = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Only a module's top level: a function of another file that it calls while loading is not being loaded.
        if frame.f_code.co_name == "<module>":
            culprit = names.get(frame.f_code.co_filename, culprit)
    return culprit


def _forget(name: str) -> None:
    """Drop a module, and its parent package's attribute, so the next import loads it anew."""
    sys.modules.pop(name, None)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        vars(sys.modules[parent]).pop(child, None)
