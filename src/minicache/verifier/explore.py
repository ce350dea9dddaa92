"""Every state that a scheduler can reach within bounds, the nearest first, and the shortest way to one that is wrong.

Breadth first: all states after one action, then all after two. States that are the same but for names are one. So the
search ends, and the first violation that it meets is one of the shortest. Pure standard library.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import process_time
from typing import Any, Final

from minicache.scheduler.base import Scheduler
from minicache.verifier.rules import INVARIANTS, PROPERTIES
from minicache.verifier.saving import Saver
from minicache.verifier.world import KINDS, Action, Moment, Property, Shape, World

LOOK_EVERY: Final = 256
"""States between two reports of progress."""
ERROR: Final = "error"
"""The rule of a violation that is an error which a call of the scheduler raised."""
_NEVER: Final = 2**32 - 1


@dataclass(frozen=True)
class Case:
    """What is explored.

    Attributes:
        name: what is special about it, in words.
        make: makes the scheduler.
        shapes: the requests that may arrive, each as often as there are requests left.
        num_requests: how many requests arrive at most, forks included.
        bound: what STARVATION_BOUND is set to: with few requests, its own is out of reach.
    """

    name: str
    make: Callable[[], Scheduler]
    shapes: Sequence[Shape]
    num_requests: int
    bound: int = 1


@dataclass(frozen=True)
class Violation:
    """A property that does not hold, and how to get there.

    Attributes:
        actions: from the empty server to the action after which the property did not hold.
        rule: the property's name.
        message: what is wrong.
        loop: for a livelock, how many of `actions` come before the part that repeats forever; else None.
    """

    actions: tuple[Action, ...]
    rule: str
    message: str
    loop: int | None = None


@dataclass(frozen=True)
class Report:
    """What an exploration has found.

    Attributes:
        case: the name of the case.
        num_states: different states that were reached.
        num_actions: actions that were done, from all of them.
        depth: actions to the farthest state.
        seconds: of the processor.
        is_complete: whether all that can happen was done; False if the search ended at its limit or at a violation.
        violation: the first that was met.
    """

    case: str
    num_states: int
    num_actions: int
    depth: int
    seconds: float
    is_complete: bool
    violation: Violation | None


def explore(
    case: Case,
    properties: Sequence[Property] = PROPERTIES,
    invariants: Sequence[Property] = INVARIANTS,
    *,
    limit: int = sys.maxsize,
    tell: Callable[[int], None] = lambda num_states: None,
) -> Report:
    """Do everything that can happen, in every order, and see whether the properties hold.

    Args:
        case: what is explored.
        properties: what must hold of every action.
        invariants: what must hold in every state; asked once for each, after the first action that leads there.
        limit: the most states; the search then ends.
        tell: called with the states found so far, now and then.
    """
    with small_bound(case.bound):
        return _Search(case, properties, invariants, limit, tell).run()


class _Search:
    """One exploration: the states met so far, by number, and how each was reached."""

    def __init__(
        self,
        case: Case,
        properties: Sequence[Property],
        invariants: Sequence[Property],
        limit: int,
        tell: Callable[[int], None],
    ) -> None:
        self.case, self.invariants = case, invariants
        self.properties = {
            kind: [each for each in properties if kind in getattr(each, "kinds", KINDS)] for kind in KINDS
        }
        self.limit, self.tell = limit, tell
        self.seen: dict[int, int] = {}
        self.parents, self.actions = array("I"), array("H")  # of each state: from which other, by its how manyth action
        self.quiet = array("I")  # of each state: the one after it if nothing comes in between
        self.num_actions = 0

    def run(self) -> Report:
        begun, depth, violation = process_time(), 0, None
        world = World(self.case.make(), self.case.num_requests)
        own = own_state(world.scheduler)
        self.note(world.key((), own), 0, 0)
        saver = Saver(world)
        level = [saver.save(world)]
        number = 0
        while level and violation is None and len(self.seen) < self.limit:
            found: list[bytes] = []
            for saved in level:
                violation = self.expand(number, saved, saver, own, found)
                if violation is not None or len(self.seen) >= self.limit:
                    break
                number += 1
                if not number % LOOK_EVERY:
                    self.tell(len(self.seen))
            level = found
            depth += bool(found)
        is_complete = violation is None and not level
        if is_complete:
            violation = self.livelock()
        seconds = process_time() - begun
        return Report(self.case.name, len(self.seen), self.num_actions, depth, seconds, is_complete, violation)

    def note(self, key: int, parent: int, action: int) -> int:
        """The number of a new state."""
        number = self.seen[key] = len(self.seen)
        self.parents.append(parent)
        self.actions.append(action)
        self.quiet.append(_NEVER)
        return number

    def expand(
        self, number: int, saved: bytes, saver: Saver, own: Sequence[str], found: list[bytes]
    ) -> Violation | None:
        """Do all that can happen in a state."""
        world = saver.load(saved)
        shapes, seen, start = self.case.shapes, self.seen, world.start()
        for index, action in enumerate(list(world.actions(shapes))):
            if index and (again := saver.load(saved)) is not world:
                world = again
                start = world.start()
            self.num_actions += 1
            try:
                moment = world.do(action, shapes, start)
                key = 0 if moment is None else world.key(moment.after, own)
            except Exception as error:  # whatever a scheduler raises, it is at fault
                return Violation((*self.way_to(number), action), ERROR, f"{type(error).__name__}: {error}")
            if moment is None:
                continue
            wrong = broken(self.properties[action.kind], moment)
            if key not in seen:
                self.note(key, number, index)
                wrong = wrong or broken(self.invariants, moment)
                found.append(saver.save(world))
            if wrong is not None:
                return Violation((*self.way_to(number), action), *wrong)
            if not index and action.kind in ("schedule", "commit"):
                self.quiet[number] = seen[key]
        return None

    def way_to(self, number: int) -> list[Action]:
        """The actions to a state, from the empty server."""
        indices = []
        while number:
            indices.append(self.actions[number])
            number = self.parents[number]
        world = World(self.case.make(), self.case.num_requests)
        way = []
        for index in reversed(indices):
            way.append(list(world.actions(self.case.shapes))[index])
            world.do(way[-1], self.case.shapes)
        return way

    def livelock(self) -> Violation | None:
        """A state from which nothing ever finishes, though nothing arrives, leaves or fails; the nearest such one."""
        quiet = self.quiet
        ends = bytearray(len(quiet))  # 1: a run from here ends; 2: it is being followed
        for start in range(len(quiet)):
            run, number = [], start
            while number != _NEVER and not ends[number]:
                ends[number] = 2
                run.append(number)
                number = quiet[number]
            if number != _NEVER and ends[number] == 2:
                loop = [*run[run.index(number) :], number]
                steps = [self.quiet_action(each) for each in loop[:-1]]
                way = self.way_to(start)
                before = [self.quiet_action(each) for each in run[: run.index(number)]]
                message = "these requests are scheduled forever, and never finish"
                return Violation((*way, *before, *steps), "livelock", message, len(way) + len(before))
            for each in run:
                ends[each] = 1
        return None

    def quiet_action(self, number: int) -> Action:
        world = World(self.case.make(), self.case.num_requests)
        for action in self.way_to(number):
            world.do(action, self.case.shapes)
        return next(iter(world.actions(self.case.shapes)))


def broken(properties: Sequence[Property], moment: Moment) -> tuple[str, str] | None:
    """The first property that does not hold, if any: its name, and what is wrong."""
    for each in properties:
        if message := each(moment):
            return each.__name__, message
    return None


def replay(case: Case, actions: Iterable[Action]) -> Iterator[Moment | None]:
    """Do these actions one after the other; each is yielded after it was done."""
    with small_bound(case.bound):
        world = World(case.make(), case.num_requests)
        for action in actions:
            yield world.do(action, case.shapes)


@contextmanager
def small_bound(bound: int) -> Iterator[None]:
    """Set STARVATION_BOUND in the schedulers' modules for a while."""
    modules: list[Any] = [
        module
        for name, module in sys.modules.items()
        if name.startswith("minicache.scheduler.") and hasattr(module, "STARVATION_BOUND")
    ]
    before = [module.STARVATION_BOUND for module in modules]
    try:
        for module in modules:
            module.STARVATION_BOUND = bound
        yield
    finally:
        for module, its in zip(modules, before, strict=True):
            module.STARVATION_BOUND = its


def own_state(scheduler: Scheduler) -> list[str]:
    """The names of a scheduler's attributes that belong to its state, beyond those that every scheduler has.

    Statistics, which only grow, do not; the prefix cache is the pool.
    """
    known = set(_COMMON) | set(type(scheduler).Options.__annotations__)
    return [name for name in vars(scheduler) if name not in known]


_COMMON: Final = (
    *("pool", "host_pool", "waiting", "running", "outstanding", "token_budget", "_requests", "_num_added"),
    *("_cache", "_stats", "_num_forks"),
)
