"""`minicache python` and `minicache ipython`: an interpreter in which the learner's files are loaded, finished or not.

`python -m minicache_course.interpreter` takes what Python takes: a script, `-c CODE`, `-m MODULE`, each with arguments,
or nothing for a prompt. `ipython` before them is IPython's, which has its own options.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable

from minicache.errors import MinicacheError, MissingExtraError
from minicache_course.errors import CourseError
from minicache_course.finder import import_labs, install, show
from minicache_course.language import translated
from minicache_course.workspace import find_workspace, is_edited, phase_imports


def load_labs(tell: Callable[[str], None]) -> None:
    """Load every file that the learner has begun; the reference stands in for a starter, and where one fails to load.

    Args:
        tell: called with each line of whose files are loaded, and why one is not.

    Raises:
        CourseError: there is no course.
    """
    workspace = find_workspace()
    begun = {
        module: file
        for phase in workspace.course
        for module, file in workspace.lab_files(phase).items()
        if is_edited(workspace, phase, module)
    }
    if any(phase_imports(phase, "triton") for phase in workspace.course if begun.keys() & phase.files.keys()):
        from minicache.kernels import runtime  # of no phase, and imports nothing that is

        runtime.interpret_without_gpu()
    finder = install(begun)
    failures = import_labs(finder, {})
    for module, file in begun.items():
        if error := failures.get(module):
            tell(f"reference, not {show(file)}, which cannot be imported: {type(error).__name__}: {error}")
        else:
            tell(f"yours: {show(file)}")
    if not begun:
        tell("You have not started any file: everything comes from the reference")


def run(arguments: list[str]) -> None:
    """Run what Python's command line would: a script, `-c CODE` or `-m MODULE`, or nothing (a prompt follows).

    Raises:
        CourseError: other options are given.
    """
    namespace = vars(sys.modules["__main__"])
    match arguments:
        case ["ipython", *options]:
            try:
                from IPython import start_ipython
            except ModuleNotFoundError as error:
                raise MissingExtraError("IPython is not installed: pip install ipython") from error
            sys.exit(start_ipython(argv=options))
        case []:
            for name in [name for name in namespace if not name.startswith("__")]:
                del namespace[name]
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *_] if not script.startswith("-"):
            sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
        case _:
            raise CourseError(f"{arguments[0]} is unknown: give a script, -c CODE, -m MODULE, or nothing")


def main() -> None:
    """Load the learner's files, say so on stderr, and run what the command line asks for."""
    try:
        load_labs(lambda line: print(translated(line), file=sys.stderr))
        run(sys.argv[1:])
    except MinicacheError as error:
        sys.exit(f"minicache: {translated(str(error))}")


if __name__ == "__main__":
    main()
