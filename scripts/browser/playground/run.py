"""One run of the playground: a scheduler, a workload and the sliders in, frames out."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from minicache.errors import InvariantError
from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache.scheduler.observe import Observer, Recorder, observe
from minicache.scheduler.output import SchedulerOutput
from minicache.simulator.serving import ServingSimulation
from minicache.verifier.explore import small_bound
from minicache.verifier.link import read
from minicache.verifier.world import World
from scripts.browser.playground.edited import file_of, importing, place_of
from scripts.browser.playground.frames import Frame, Frames
from scripts.browser.playground.schedulers import PACKAGE, SCHEDULERS
from scripts.browser.playground.workloads import EXAMPLE, REPLAY, WORKLOADS, Settings

MOST_STEPS: Final = 5000
"""Steps after which a run is stopped: a changed scheduler may generate nothing, forever."""

FRAMES_AT_ONCE: Final = 200
"""A message to the page for each frame would take longer than the run."""

Result = dict[str, Any]
"""How a run ended: `refused`, how many requests; `refusal`, the message of the first; `audit`, the first rule that a
changed scheduler broke; `error`: its `kind`, `message`, `module` and `line` in changed code, `traceback`. None
without."""


def play(asked: Mapping[str, Any], post: Callable[[Any], object]) -> None:
    """Serve a workload by several schedulers, one after the other, for a page.

    Args:
        asked: `workload`, `settings`, `actions`, and `panes`: of each `scheduler` and `sources`, as `run` takes them.
        post: is called with `{pane, frames}` now and then, and with `{pane, result}` at the end of each pane.
    """
    for number, pane in enumerate(asked["panes"]):
        batch: list[Frame] = []

        def collect(frame: Frame, number: int = number, batch: list[Frame] = batch) -> None:
            batch.append(frame)
            if len(batch) == FRAMES_AT_ONCE:
                post({"pane": number, "frames": batch})
                batch.clear()

        settings, actions = Settings(**asked["settings"]), asked.get("actions", "")
        result = run(asked["workload"], pane["scheduler"], settings, collect, pane["sources"], actions)
        post({"pane": number, "frames": batch, "result": result})


def run(
    workload: str,
    scheduler: str,
    settings: Settings,
    sink: Callable[[Frame], object],
    sources: Mapping[str, str] | None = None,
    actions: str = "",
) -> Result:
    """Serve a workload.

    Args:
        workload: a name in `WORKLOADS`.
        scheduler: a name in `SCHEDULERS`.
        settings: the sliders.
        sink: is called with the frame of each step as it is over.
        sources: modules of `minicache.scheduler` to load from changed code: name → code.
        actions: of the workload `REPLAY`, what happens, as `minicache.verifier.link` has it.

    Returns:
        How it ended. What the scheduler raises, or its changed code, is in there, and does not go through.
    """
    if workload == REPLAY:
        return _replay(actions or EXAMPLE, scheduler, settings, sink, sources or {})
    choice, chosen, frames = SCHEDULERS[scheduler], WORKLOADS[workload], Frames()
    try:
        with importing(sources or {}) as imported:
            created = choice.create(settings, imported)
            listeners = [Listener(imported(f"{PACKAGE}.audit_sharing").SharingAuditor())] if sources else []
    except Exception as error:
        return Result(refused=0, refusal=None, audit=None, error=explained(error, sources or ()))
    simulation = ServingSimulation(
        created,
        chosen.cost,
        chosen.requests(),
        observers=(frames, *listeners),
        trace=lambda step: sink(frames.frame(step)),
    )
    failed = None
    try:
        _serve(simulation)
    except Exception as error:
        failed = explained(error, sources or ())
    report = simulation.report()
    complaint = next((listener.complaint for listener in listeners), None)
    return Result(refused=report.num_refused, refusal=report.refusal, audit=complaint, error=failed)


def _replay(
    actions: str, scheduler: str, settings: Settings, sink: Callable[[Frame], object], sources: Mapping[str, str]
) -> Result:
    """Do what a link says, action by action. Each step is a frame, one that fails or is not computed too."""
    choice, frames = SCHEDULERS[scheduler], Frames()
    listeners: list[Listener] = []
    recorder = Recorder(lambda step: sink(frames.frame(step) | {"ttft": None, "tpot": None}))
    failed = None
    try:
        options, shapes, todo = read(actions)
        with importing(sources) as imported:
            created = choice.create(settings, imported, options)
            listeners += [Listener(imported(f"{PACKAGE}.audit_sharing").SharingAuditor())]
            world = World(observe(created, frames, *listeners, recorder), len(todo))
            with small_bound(1):
                for action in todo:
                    if action.kind in ("fail", "retry"):
                        _end(world.scheduler, recorder)
                    world.do(action, shapes)
                _end(world.scheduler, recorder)
    except Exception as error:
        failed = explained(error, sources)
    complaint = next((listener.complaint for listener in listeners), None)
    return Result(refused=0, refusal=None, audit=complaint, error=failed)


def _end(scheduler: Scheduler, recorder: Recorder) -> None:
    """Have a step that is not committed end, for the picture only."""
    if scheduler.outstanding is not None:
        recorder.on_update(scheduler, scheduler.outstanding, [])


def _serve(simulation: ServingSimulation) -> None:
    for _ in range(MOST_STEPS):
        if not simulation.step():
            return
    raise InvariantError(f"not done after {MOST_STEPS:,} steps: the run was stopped")


def explained(error: Exception, changed: Iterable[str]) -> dict[str, Any]:
    """What a page shows of an error: its class and message, its place in the changed modules, and their traceback."""
    told, files = traceback.TracebackException.from_exception(error), set(map(file_of, changed))
    within = [index for index, frame in enumerate(told.stack) if frame.filename in files]
    module, line = place_of(error, changed) or (None, None)
    # how the playground came there helps no one; where nothing is changed code's: the place that used what it gave
    first = within[0] if within else len(told.stack) - (module is None)
    told.stack = traceback.StackSummary.from_list(told.stack[first:])
    return {
        "kind": type(error).__name__,
        "message": error.msg if isinstance(error, SyntaxError) else str(error),
        "module": module,
        "line": line,
        "traceback": "".join(told.format()) if files else "",
    }


class Listener(Observer):
    """Listens to an auditor until its first complaint: a changed scheduler may go on, with its books wrong.

    Args:
        auditor: of the package that the scheduler is from.

    Attributes:
        complaint: the first; None without.
    """

    def __init__(self, auditor: Observer) -> None:
        self.complaint: str | None = None
        self._auditor = auditor

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        """As the auditor's."""
        self._listen(lambda: self._auditor.on_add(scheduler, request))

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """As the auditor's."""
        self._listen(lambda: self._auditor.on_schedule(scheduler, output))

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """As the auditor's."""
        self._listen(lambda: self._auditor.on_update(scheduler, output, finished))

    def on_recover(self, scheduler: Scheduler) -> None:
        """As the auditor's."""
        self._listen(lambda: self._auditor.on_recover(scheduler))

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        """As the auditor's."""
        self._listen(lambda: self._auditor.on_finish(scheduler, request))

    def on_fork(self, scheduler: Scheduler, parent: Request, child: Request) -> None:
        """As the auditor's."""
        self._listen(lambda: self._auditor.on_fork(scheduler, parent, child))

    def _listen(self, audit: Callable[[], None]) -> None:
        if self.complaint is None:
            try:
                audit()
            except InvariantError as error:
                self.complaint = str(error)
