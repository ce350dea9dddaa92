"""How an exposing test is judged (phases 7, 12): it fails on a scheduler with the bug, and passes on right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

from minicache.errors import MinicacheError
from minicache_course.checks import CheckFailed, is_not_written, told

MAX_STEPS: Final = 5000
"""More than any exposing test needs. One that loops while `has_unfinished` never returns from a broken scheduler."""

Create = Callable[..., Any]
Expose = Callable[[Create], None]


class OutOfSteps(Exception):  # noqa: N818, a verdict rather than an error
    """A scheduler was asked for more than MAX_STEPS steps."""


def bounded(kind: type[Any], **usual: Any) -> Create:
    """`create(**options)` for schedulers of `kind`, which stop after MAX_STEPS steps. `usual` are default options."""

    class Bounded(kind):  # type: ignore[misc]  # whatever class it is
        def schedule(self) -> Any:
            self.__dict__["steps_taken"] = self.__dict__.get("steps_taken", 0) + 1
            if self.__dict__["steps_taken"] > MAX_STEPS:
                raise OutOfSteps(f"{MAX_STEPS} steps")
            return super().schedule()

    Bounded.__name__ = Bounded.__qualname__ = kind.__name__

    def create(**options: Any) -> Any:
        return Bounded(**usual | options)

    return create


class Judge:
    """Judges exposing tests and fixes.

    Attributes:
        right: of each incident, schedulers without its bug, and options that its test must not depend on.
        variants: of some incidents, schedulers with the same bug in other numbers. A test must not know the numbers.
    """

    right: ClassVar[dict[int, list[tuple[type[Any], dict[str, Any]]]]] = {}
    variants: ClassVar[dict[int, list[type[Any]]]] = {}

    def exposes(self, expose: Expose, broken: type[Any], incident: int | None = None) -> None:
        """The exposing test fails on the scheduler with the bug and on its variants, with a message."""
        __tracebackhide__ = True
        for kind in [broken, *(self.variants.get(incident, []) if incident is not None else [])]:
            self.exposes_one(expose, kind)

    def exposes_one(self, expose: Expose, broken: type[Any]) -> None:
        """The exposing test fails on this one."""
        __tracebackhide__ = True
        called, error = f"expose(create), of {broken.__name__}", _run(expose, bounded(broken))
        wanted = "an AssertionError whose message says what went wrong"
        if error is None:
            what = f"{broken.__name__}: {(broken.__doc__ or '').splitlines()[0]}"
            raise CheckFailed(called, f"it passed on a broken scheduler, {what}", wanted)
        if isinstance(error, OutOfSteps):
            got = f"it had not come back after {MAX_STEPS} steps of the broken scheduler"
            raise CheckFailed(called, got, wanted, "give drive() a max_steps, or count your loop's iterations")
        if not isinstance(error, AssertionError | MinicacheError):
            raise CheckFailed(called, f"it went wrong itself: {told(error)}", wanted) from error

    def passes(self, expose: Expose, incident: int) -> None:
        """The exposing test passes on right schedulers that differ in ways it must not depend on."""
        __tracebackhide__ = True
        for kind, usual in self.right[incident]:
            options = [f"{key} {value}" for key, value in usual.items()]
            name = f"{kind.__name__} with {options[0]}" if options else kind.__name__
            if (error := _run(expose, bounded(kind, **usual))) is not None:
                got = f"it failed on a right one: {_said(error)}"
                raise CheckFailed(f"expose(create), of {name}", got, "no error") from error

    def fixed(self, expose: Expose, fix: type[Any]) -> Create:
        """`create` for the learner's fix, once the learner's own test passes on it."""
        __tracebackhide__ = True
        if (error := _run(expose, bounded(fix))) is not None:
            got = f"not looked at: your own test fails on it: {_said(error)}"
            raise CheckFailed(f"expose(create), of {fix.__name__}", got, "no error") from error
        return bounded(fix)


def _run(expose: Expose, create: Create) -> Exception | None:
    """What an exposing test raised, None if it passed. "Not written yet" goes straight through."""
    try:
        expose(create)
    except Exception as error:
        if is_not_written(error):
            raise
        return error
    return None


def _said(error: Exception) -> str:
    """An error in a line, and what is missing in it."""
    bare = isinstance(error, AssertionError) and not str(error)
    return told(error) + (": your assert has no message" if bare else "")
