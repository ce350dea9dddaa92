"""One pytest run inside a course: which tests belong to which task, whose code they run, how failures are reported."""

from __future__ import annotations

import re
import sys
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

from minicache.errors import InvariantError, KernelUnavailableError
from minicache_course import checks, finder, scenario, seeds
from minicache_course.checks import PLACES, CheckFailed, named, told, unwrapped, unwritten_task
from minicache_course.encoding import encoding_fault
from minicache_course.errors import CourseError
from minicache_course.journal import Event, Job, Journal
from minicache_course.language import combined, in_use, joined, labelled, remember, translated, translations
from minicache_course.results import Outcome, TestResult, by_task, pointers
from minicache_course.table import Phase, Task
from minicache_course.templates import mark
from minicache_course.workspace import Workspace, needs_torch, open_workspace, phase_imports

_TEST_FILE = re.compile(r"test_task_(\d+)_\w+\.py")
_PRINTED_LIMIT = 2000  # characters of a learner's output that a result keeps
_MESSAGE_LIMIT = 20_000  # characters of what a result tells: an error may have any text

# What Hypothesis writes to an error, and what it adds to the arguments there.
_EXAMPLE = re.compile(r"(?:Failing test case|Falsifying example): \w+\((.*)\)", re.DOTALL)
_EXAMPLE_COMMENT = re.compile(r"^ *#.*|  # or any other generated value$", re.MULTILINE)


class GradingSession:
    """A pytest plugin, registered for runs inside a course.

    Args:
        root: the course's root.
        options: pytest's options.
        paths: the files and folders that pytest was asked to run.
        journal: of a run that is followed.
    """

    def __init__(self, root: Path, options: Namespace, paths: Sequence[Path], journal: Journal | None) -> None:
        self._mine: bool = options.mine
        self._task: int | None = options.task
        self._short: bool = options.mine and options.verbose < 2
        try:
            self._workspace: Workspace = open_workspace(root, options.labs)
        except CourseError as error:
            raise pytest.UsageError(str(error)) from error
        self._phases = [phase for phase in self._workspace.course if phase.tasks and self._asked_for(phase, paths)]
        self._theirs = {name for phase in self._phases for name in phase.files}
        if self._mine and not self._phases:
            raise pytest.UsageError("--mine: none of these are tests of a phase; try tests/phase-01-dense-cache")
        seeds.use(options.course_seed)
        self._job = journal.job if journal else Job([], "")
        self._journal = journal
        remember(self._job.shown)
        self._no_triton = _prepare_triton() if any(phase_imports(phase, "triton") for phase in self._phases) else ""
        self._finder: finder.LabFinder | None = None
        self._remembered: Any = None  # of a submission: the grader as it is before that is loaded
        self._unusable: dict[str, str] = {}
        self._patches = pytest.MonkeyPatch()
        if self._mine:
            if in_use() != "en":
                compiled = rewrite.rewrite_asserts
                self._patches.setattr(rewrite, "rewrite_asserts", lambda module, *rest: compiled(mark(module), *rest))
                self._patches.setattr(rewrite, "PYC_TAIL", f".said{rewrite.PYC_TAIL}")
            if any(map(needs_torch, self._phases)):
                # Not every machine has numba, and loading its kernels takes longer than a task's tests.
                self._patches.setattr("minicache.kernels.cpu.why_unavailable", lambda: "grading runs without numba")
                checks.tensors()  # torch's own functions, before a learner's file can replace them
            if self._job.guard:
                self._guard = import_module(self._job.guard)
                self._remembered = self._guard.Remembered(self._theirs)
                sys.meta_path.insert(0, self._remembered)
            self._install()
        self._num_collected: Counter[str] = Counter()  # task id → its tests, those included that will not run
        self._results: dict[str, dict[str, TestResult]] = {}  # task id → node id → result

    def _tell(self, event: Event) -> None:
        if self._journal:
            self._journal.tell(replace(event, shown=translations(event.title, event.message)))

    # Whose code

    def _asked_for(self, phase: Phase, paths: Sequence[Path]) -> bool:
        folder = self._workspace.tests(phase)
        return folder.is_dir() and any(
            folder == path or folder in path.parents or path in folder.parents for path in paths
        )

    def _install(self) -> None:
        """Put the learner's modules in place; where one cannot be used, remember why."""
        phases = [phase for phase in self._phases if not self._cannot_run(phase)]
        files = {name: file for phase in phases for name, file in self._workspace.lab_files(phase).items()}
        needs: dict[str, dict[str, None]] = {}
        for phase in self._phases:
            for task in phase.tasks:
                needs.setdefault(task.module, {}).update((target.split(".")[0], None) for target in task.targets)
        for name in list(files):
            if name in self._job.unusable:
                del files[name]
                self._unusable[name] = self._job.unusable[name]
        self._finder = finder.install(files)
        failures = finder.import_labs(self._finder, needs, entering=lambda name: self._tell(Event("import", name)))
        for name, error in failures.items():
            phase = next(phase for phase in self._phases if name in phase.files)
            # Another person's files are graded from a separate folder, where there is nothing to put back.
            restoring = phase.restoring(name) if self._workspace.labs == self._workspace.root / "labs" else ""
            self._unusable[name] = _unusable(files[name], error, restoring)
            self._tell(Event("unimportable", name, message=self._unusable[name]))

    def _cannot_run(self, phase: Phase) -> str:
        """Why no code for this phase can run on this machine; "" if it can."""
        return self._no_triton if phase_imports(phase, "triton") else ""

    def pytest_unconfigure(self) -> None:
        """Leave the process as it was found."""
        if self._finder:
            finder.uninstall(self._finder)
            self._finder = None
        if self._remembered:
            sys.meta_path.remove(self._remembered)
        self._patches.undo()
        seeds.use(None)

    def pytest_configure(self, config: pytest.Config) -> None:
        """One broken test file must not stop the others; a learner gets short tracebacks."""
        self._plugins = config.pluginmanager
        if self._mine:
            config.option.continue_on_collection_errors = True
        if self._short and config.option.tbstyle == "auto":
            config.option.tbstyle = "short"

    def pytest_report_header(self) -> list[str]:
        """Say whose code is graded, where it is, and what cannot be graded here."""
        if not self._phases:
            return []
        idle = [phase for phase in self._phases if self._cannot_run(phase)]
        not_graded = [f"  phase {phase.number} is not graded here: {self._cannot_run(phase)}" for phase in idle]
        drawn = "" if seeds.in_use() is None else f", with random cases from seed {seeds.in_use()}"
        if not self._mine:
            lines = [f"minicache: grading the reference (your own files: --mine){drawn}", *not_graded]
            return [*map(translated, lines)]
        lines = [f"minicache: grading YOUR files in {finder.show(self._workspace.labs)}{drawn}", *not_graded]
        for phase in self._phases:
            for name, file in self._workspace.lab_files(phase).items():
                broken = name in self._unusable
                note = "   CANNOT BE IMPORTED: its tasks fail; the reference stands in for other tasks" * broken
                lines.append(f"  {name:<26} {finder.show(file)}{translated(note)}")
        return [*map(translated, lines)]

    # Which tests

    def _task_of(self, path: Path) -> Task | None:
        """The task that the tests in the file `path` grade."""
        name = _TEST_FILE.fullmatch(path.name)
        for phase in self._phases:
            if name and path.parent == self._workspace.tests(phase):
                return next((task for task in phase.tasks if task.number == int(name[1])), None)
        return None

    def _task_by_id(self, task_id: str) -> Task | None:
        return next((task for phase in self._phases for task in phase.tasks if task.id == task_id), None)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out other tasks, and a task in which an earlier child was lost: its points are, too."""
        task = self._task_of(collection_path)
        unwanted = task and (self._task not in (None, task.number) or task.id in self._job.lost_tasks)
        return True if unwanted else None

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """A test file runs the learner's code as soon as it is imported: note it first."""
        if isinstance(collector, pytest.Module) and (task := self._task_of(collector.path)):
            self._tell(Event("file", collector.nodeid, task.id))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """A test file that cannot be imported with the learner's code fails its task."""
        report = yield
        task = self._task_of(collector.path) if isinstance(collector, pytest.Module) else None
        if task and report.failed:
            result = TestResult(collector.nodeid, "the tests can be imported", Outcome.FAILED, report.longreprtext)
            self._keep(task, result)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Count the tests of each task; with --mine, keep those only, and of them what is not yet graded."""
        tasks = {item: self._task_of(item.path) for item in items}
        if seeds.in_use() is not None:
            _draw_anew([item for item in items if tasks[item] and _is_hypothesis_test(item)])
        self._num_collected.update(task.id for task in tasks.values() if task)
        if self._mine:
            done = set(self._job.done)
            wanted = [item for item in items if tasks[item] and item.nodeid not in done]
            config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
            items[:] = wanted
            if self._job.events and config.option.maxfail == 1:
                _broadest_first(items)
            if self._remembered:
                self._guard.remember_tests(self._remembered, self._workspace.root / "tests")
                self._guard.add_controls(items, tasks, self._tell)
        for task_id, count in self._num_collected.items():
            self._tell(Event("task", task=task_id, total=count))
        self._tell(Event("collected", total=len(items)))

    # What came of them

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note a test before it runs, and its result after it."""
        task = self._task_of(item.path)
        if task:
            self._tell(Event("test", item.nodeid, task.id, _title(item)))
        with scenario.telling():  # what fixtures record is shown for this test only
            done = yield
        if task and (result := self._results.get(task.id, {}).get(item.nodeid)):
            self._keep(task, result)
        return done

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fail the tasks of a file that cannot be imported, each for that reason and no other.

        Where no file could be, nothing is graded.
        """
        task = self._task_of(item.path)
        if task and (reason := self._cannot_run(self._workspace.course.phase(task.phase))):
            pytest.skip(reason)
        if task and task.module in self._unusable:
            pytest.fail(self._unusable[task.module], pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Have an error that leaves the test, or an example of it, tell what was set up and done before."""
        found_by_hypothesis = getattr(getattr(item, "obj", None), "hypothesis", None)
        with scenario.telling(), ExitStack() as stack:
            if found_by_hypothesis:
                inner = found_by_hypothesis.inner_test
                stack.callback(setattr, found_by_hypothesis, "inner_test", inner)
                found_by_hypothesis.inner_test = scenario.telling()(inner)
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Tell a failure in a learner's terms instead of as a traceback; `-vv` shows the traceback."""
        task = self._task_of(item.path)
        error = _first(call.excinfo.value) if task and call.excinfo else None
        lines = _lines(error, getattr(item, "fixturenames", ())) if error else []
        unwritten = unwritten_task(error) if error else None
        needs = unwritten if task and unwritten and unwritten != task.id else ""
        if needs:
            lines.append(labelled("needs", f"task {needs} first"))
        if lines and self._short:
            # pytest parses a whole file for each frame of a traceback that would not be shown.
            vars(item)["repr_failure"] = lambda excinfo: ""
        report = yield
        if not task:
            return report
        outcome = Outcome.FAILED if report.failed else Outcome.NOT_GRADED if report.skipped else Outcome.PASSED
        message = _reason(report) if report.skipped else ""
        if report.failed and error:
            outcome = Outcome.NOT_WRITTEN if unwritten else Outcome.FAILED
            lines += [labelled("again", again)] if lines and (again := seeds.again(task.phase)) else []
            message = joined("\n", [labelled("checks", _title(item)), *lines]) if lines else report.longreprtext
            if lines and self._short:
                head = f"phase {task.phase}, task {task.number}: {task.title}"
                report.longrepr = translated(joined("\n", [head, message, pointers(self._task_by_id(needs) or task)]))
        # Reports carry extra attributes from process to process, so this works under xdist too.
        distance = 2 * (not _is_telling(error)) + _is_hypothesis_test(item)
        told_of = (task.id, _title(item), outcome.value, message, needs, distance)
        report.minicache = told_of  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Make one result of a test's setup, call and teardown: the first that is no pass counts."""
        if not hasattr(report, "minicache"):
            return
        task_id, title, outcome, message, needs, distance = report.minicache
        results = self._results.setdefault(task_id, {})
        earlier = results.get(report.nodeid)
        if earlier is None or earlier.outcome is Outcome.PASSED:
            printed = report.capstdout[-_PRINTED_LIMIT:]
            if left_out := len(report.capstdout) - len(printed):
                printed = f"… ({left_out:,} characters omitted)\n{printed}"
            result = TestResult(report.nodeid, title, Outcome(outcome), message, printed, needs, distance)
            results[report.nodeid] = result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Asking for a phase and getting no test is a failure, as it is for pytest as a whole."""
        if self._empty(session.config) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        self._tell(Event("finished"))

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """The points, a line a task."""
        for phase in self._empty(config):
            terminalreporter.write_line(translated(f"phase {phase.number}: no tests were collected"), red=True)
        if not self._mine:
            return
        terminalreporter.section(translated("minicache: points"))
        tests = {task_id: list(results.values()) for task_id, results in self._results.items()}
        for phase in self._phases:
            graded = by_task([task for task in phase.tasks if task.id in tests], tests, self._num_collected)
            for result in graded:
                title, outcome = translated(result.task.title), translated(result.outcome)
                counts = translated(f"{result.num_passed} of {result.num_tests} tests")
                line = f"{result.task.id:<5} {title:<40} {result.earned:>3} / {result.task.points:<3}  {counts:<16}"
                passed = result.outcome is Outcome.PASSED
                terminalreporter.write_line(f"{line}  {outcome}", green=passed, red=not passed)

    def _empty(self, config: pytest.Config) -> list[Phase]:
        """The phases that were asked for and have no test. Under xdist each worker collects, this process does not."""
        if config.pluginmanager.hasplugin("dsession"):
            return []
        return [phase for phase in self._phases if not any(self._num_collected[task.id] for task in phase.tasks)]

    # The journal

    def _keep(self, task: Task, result: TestResult) -> None:
        if self._remembered:
            name = self._remembered.replaced() or self._guard.foreign_hook(self._plugins, self._theirs)
            if name:
                self._tell(Event("tampered", name))
        self._results.setdefault(task.id, {})[result.id] = result
        message = combined(_cut, result.message)
        told_of = (result.title, result.outcome, message, result.printed, result.needs, result.distance)
        self._tell(Event("result", result.id, task.id, *told_of))


def _cut(message: str) -> str:
    """What a result keeps of a message."""
    left_out = len(message) - _MESSAGE_LIMIT
    return message if left_out <= 0 else f"{message[:_MESSAGE_LIMIT]} … ({left_out:,} characters omitted)"


def _broadest_first(items: list[pytest.Item]) -> None:
    """For a run that ends at its first failure: a case of each test, then a second of each; Hypothesis's tests last."""
    num_cases: Counter[str] = Counter()
    places = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        places[item] = (_is_hypothesis_test(item), num_cases[test])
        num_cases[test] += 1
    items.sort(key=places.__getitem__)


def _draw_anew(items: list[pytest.Item]) -> None:
    """Have Hypothesis draw other examples for these tests, under the secret seed."""
    from hypothesis import seed

    for item in items:
        seed(seeds.fresh(zlib.crc32(item.name.encode())))(item.obj)  # type: ignore[attr-defined]


def _is_hypothesis_test(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def _is_verdict(error: BaseException | None) -> bool:
    """Whether a check says what is wrong with what a call gave: no error raised on the way there."""
    return isinstance(error, CheckFailed) or (isinstance(error, pytest.fail.Exception) and not error.pytrace)


def _is_telling(error: BaseException | None) -> bool:
    """Whether it is a verdict, or the rule that a `check()` found broken."""
    return _is_verdict(error) or isinstance(error, InvariantError)


def _prepare_triton() -> str:
    """Have Triton run on the GPU if there is one and in its interpreter if not, and say why it cannot, or ""."""
    from minicache.kernels import runtime

    runtime.interpret_without_gpu()
    try:
        runtime.require_triton(runtime.usual_device())
    except KernelUnavailableError as error:
        return str(error)
    return ""


def _title(item: pytest.Item) -> str:
    """What a test checks: the first line of its docstring, else its name; and with which parameters."""
    doc = getattr(getattr(item, "function", None), "__doc__", None)
    if not doc or not doc.strip():
        return item.name  # which has the parameters in it
    title = str(doc).strip().splitlines()[0]
    return f"{title} [{joined('-', item.callspec._idlist)}]" if hasattr(item, "callspec") else title


def _unusable(file: Path, error: BaseException, restoring: str) -> str:
    """Why a learner's file cannot be used, and what to do about it."""
    if not file.is_file():
        there = f"{finder.show(file)} is not there"
        return f"{there}: rename it back, or `{restoring}`" if restoring else there
    if not file.read_bytes().strip():
        return f"{finder.show(file)} is empty"
    if fault := encoding_fault(file):
        return fault
    lines = [f"{finder.show(file)} cannot be imported", labelled("raised", named(error))]
    if line := finder.learners_line(error):
        lines += [labelled("at", line.place), labelled("", line.code)]
    return joined("\n", lines)


def _lines(error: BaseException, fixtures: Sequence[str]) -> list[str]:
    """The failure in a learner's terms, or nothing where pytest tells it better."""
    if unwritten_task(error):
        return [labelled("missing", f"{finder.learners_function(error) or 'a function'} is not written yet")]
    if _is_verdict(error):
        lines = [str(error)]
    elif isinstance(error, AssertionError | pytest.fail.Exception | pytest.skip.Exception):
        return []
    else:
        lines = [labelled("raised", told(error))]
    return [*_setting(error), *lines, *_notes(error, fixtures)]


def _setting(error: BaseException) -> list[str]:
    """What was set up and done before it came to the error."""
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if note.startswith(scenario.SETTING)]


def _notes(error: BaseException, fixtures: Sequence[str]) -> list[str]:
    """The notes on an error; of Hypothesis's, the example alone, without the grader's fixtures."""
    lines: list[str] = []
    for note in getattr(error, "__notes__", ()):
        if example := _EXAMPLE.fullmatch(note):
            arguments = (line.strip() for line in _EXAMPLE_COMMENT.sub("", example[1]).splitlines())
            shown = [line for line in arguments if line and line.partition("=")[0] not in fixtures]
            lines.append(labelled("example", " ".join(shown).rstrip(",")))
        # `told` tells places. Those that explain name lines of the grader; those on reproducing, on CI, want it edited.
        elif not note.startswith((*PLACES, *scenario.SETTING, "Explanation:", "    ", "\nYou can reproduce")):
            lines.append(note)
    return lines


def _first(error: BaseException) -> BaseException:
    """The first error of a group: Hypothesis groups those that it found. Of a kernel's, what the kernel raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return unwrapped(error)


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped."""
    skipped = report.longrepr
    return f"skipped: {skipped[2].removeprefix('Skipped: ')}" if isinstance(skipped, tuple) else "expected to fail"
