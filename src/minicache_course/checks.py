"""What the tests of the phases say: `call(f, …).gives(x)`, `.is_close(t)`, `.raises(E)`, `that("what", got).gives(x)`.

A bare `assert` shows a learner the grader's variables. A check shows what was called, what came back, what was
expected and the first place where the two differ. What came back may be an object that claims to be equal to anything:
`values.py` and `tensors.py` judge it. Pure standard library; a tensor is only met where torch is loaded.
"""

from __future__ import annotations

import ast
import re
import sys
import traceback

# Bound here, before a learner's file is loaded, which may replace them.
from builtins import abs, float, getattr, int, isinstance, len, list, max, min, repr, str, tuple, type  # noqa: UP029
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, reduce
from math import inf, isclose, isfinite, isnan, prod
from numbers import Integral
from types import TracebackType
from typing import Any

from minicache_course import scenario
from minicache_course.finder import learners_line
from minicache_course.language import joined, labelled, said
from minicache_course.values import are_data, equal, is_a, is_number, plain, poses

_STARTER = re.compile(r"phase (\d+), task (\d+): ")
"""How the message of a starter's NotImplementedError begins."""

PLACES = ("at ", "called at ")
"""How the tracer's notes on where an error was raised begin."""

_MAX_MESSAGE = 1000  # of an error's message, the characters in which `saying` is looked for
_MAX_NUMBERS = 16  # of a tensor that is shown with its values
_MIN_SIZE = 100  # of an integer that is an amount: smaller ones are ids, positions, counts


class CheckFailed(AssertionError):  # noqa: N818, a verdict rather than an error
    """A check did not hold.

    Attributes:
        called: the call or the value that was looked at, as text.
        got: what came back.
        expected: what should have come back.
        first_difference: the first place where the two differ, or "" where `got` and `expected` show it.
        num_done: how many notes of `scenario.done` are shown with it.
    """

    def __init__(
        self, called: str, got: str, expected: str, first_difference: str = "", num_done: int | None = None
    ) -> None:
        super().__init__(called, got, expected, first_difference, num_done)
        self.called, self.got, self.expected, self.first_difference = called, got, expected, first_difference
        self.num_done = num_done

    def __str__(self) -> str:
        lines = [labelled("called", self.called), labelled("got", self.got), labelled("expected", self.expected)]
        if self.first_difference:
            lines.append(labelled("differs", self.first_difference))
        return joined("\n", lines)


@dataclass(frozen=True)
class Outcome:
    """What a call returned or raised. Its methods check it and raise `CheckFailed`.

    Attributes:
        called: the call as text.
        returned: its result, None if it raised.
        error: what it raised, or None.
        num_done: notes of what the test has done (`scenario.done`), without one of the call itself.
        overwritten: of a call that gave a tensor, which tensor among its arguments it has changed; "" for none.
    """

    called: str
    returned: Any = None
    error: BaseException | None = None
    num_done: int | None = None
    overwritten: str = ""

    def _failed(self, got: str, expected: str, first_difference: str = "") -> CheckFailed:
        return CheckFailed(self.called, got, expected, first_difference, self.num_done)

    @property
    def value(self) -> Any:
        """The result. A call that raised fails the test, saying what was raised and where."""
        __tracebackhide__ = True
        got = self._result("a result")
        if not is_tensor(got) and poses(got):
            raise self._failed(short(got), "a result", f"{_kind(got)} decides itself what it is equal to")
        return got

    def gives(self, expected: object) -> None:
        """Exactly `expected`: numbers, strings, lists, tuples, or tensors of the same shape, dtype and values."""
        __tracebackhide__ = True
        self.is_close(expected, rtol=0.0, atol=0.0)

    def is_close(self, expected: object, *, rtol: float = 1e-5, atol: float = 1e-5) -> None:
        """`expected` up to |got − expected| ≤ atol + rtol · |expected|: floats, tensors, or sequences of them."""
        __tracebackhide__ = True
        got = self._result(short(expected))
        if (difference := _difference(got, expected, rtol, atol)) is not None:
            raise self._failed(short(got), short(expected), difference)

    def is_near(
        self, expected: float, rel: float, *, reveal: bool = True, factors: Mapping[float, str] | None = None
    ) -> None:
        """A number within `rel` · |expected| of `expected`.

        Args:
            expected: the right answer, not 0.
            rel: the allowed relative error: 0.01 for 1 %, 0 for none.
            reveal: whether a failure may print `expected`; an answer worked on paper stays the learner's to find.
            factors: got / expected → what was probably forgotten, `{0.5: "count both K and V"}`.
        """
        __tracebackhide__ = True
        right = short(expected) if reveal else "the right number"
        wanted = f"{right}, within {100 * rel:.3g} %" if rel else f"{right}, exactly"
        got = plain(self._result(wanted))
        if not is_number(got):
            raise self._failed(short(got), wanted, f"{_kind(got)} is not a number")
        if abs(got - expected) <= rel * abs(expected):
            return
        hints = [hint for factor, hint in (factors or {}).items() if isclose(got / expected, factor, rel_tol=rel)]
        close = "your answer is close, but not within the tolerance" if isclose(got, expected, rel_tol=0.01) else ""
        parts = [_ratio(got, expected, "your answer", "the right one") or close, *hints[:1]]
        raise self._failed(short(got), wanted, joined(": ", filter(None, parts)))

    def raises(self, error: type[BaseException] | tuple[type[BaseException], ...], saying: str | None = None) -> None:
        """An error of that type, its message containing `saying` (upper and lower case are the same)."""
        __tracebackhide__ = True
        types = error if isinstance(error, tuple) else (error,)
        wanted = reduce(lambda one, other: f"{one} or {other}", (each.__name__ for each in types))
        wanted = f"{wanted} saying {saying!r}" if saying else wanted
        if self.error is None:
            raise self._failed(f"{short(self.returned)}, and no error", wanted)
        if not is_a(self.error, *types):
            raise self._failed(told(self.error), wanted) from self.error
        if saying and saying.lower() not in plain(str(self.error))[:_MAX_MESSAGE].lower():
            raise self._failed(told(self.error), wanted, "the message does not contain it") from self.error

    def _result(self, wanted: str) -> Any:
        __tracebackhide__ = True
        if self.error is not None:
            raise self._failed(told(self.error), wanted) from self.error
        if self.overwritten:  # what is expected may be computed from the arguments
            raise self._failed(f"{short(self.returned)}, and another {self.overwritten}", "arguments unchanged")
        return self.returned


def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    """Call `fn` and keep what came of it. What a starter raises ("not written yet") goes straight through."""
    arguments = [short(arg) for arg in args] + [f"{name}={short(arg)}" for name, arg in kwargs.items()]
    called = f"{_name(fn)}({joined(', ', arguments)})"  # before the call, which may change its arguments
    before, given = scenario.num_done(), _Given(args, kwargs)
    try:
        returned, error = fn(*args, **kwargs), None
    except (Exception, SystemExit) as raised:
        if is_not_written(raised):
            raise
        returned, error = None, unwrapped(raised)
    # Calls made inside are shown too, but not the call itself, which is the next line.
    num_done = before if hasattr(fn, "is_followed") else scenario.num_done()
    return Outcome(called, returned, error, num_done, given.overwritten(returned))


class _Given:
    """The tensors among a call's arguments, with copies."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        named_args = [*((f"argument {number}", arg) for number, arg in enumerate(args, start=1)), *kwargs.items()]
        self._tensors = [(name, arg) for name, arg in named_args if is_tensor(arg) and arg.device.type == "cpu"]
        if self._tensors:
            with tensors().alone():
                self._copies = [tensors().bytes_of(arg) for _, arg in self._tensors]

    def overwritten(self, returned: Any) -> str:
        """The name of one that is no longer as it was; "" where the result is no tensor, or is one of them."""
        if not self._tensors or not is_tensor(returned) or any(returned is arg for _, arg in self._tensors):
            return ""
        with tensors().alone():
            for (name, arg), copy in zip(self._tensors, self._copies, strict=True):
                if not tensors().same_bytes(tensors().bytes_of(arg), copy):
                    return name
        return ""


def that(description: str, got: object) -> Outcome:
    """A value already at hand, and in words what it is: `that("cache.num_tokens after 3 tokens", n).gives(3)`."""
    return Outcome(description, returned=got, num_done=scenario.num_done())


def is_not_written(error: BaseException) -> bool:
    """Whether `error` is what an untouched starter raises."""
    return unwritten_task(error) is not None


def unwritten_task(error: BaseException) -> str | None:
    """The task, such as "1.2", whose untouched starter raised `error`, a `NotImplementedError("phase 1, task 2: …")`.

    Or, where a kernel was to run, what Triton made of it: the interpreter wraps it, the compiler cannot translate it.
    None: it is another error.
    """
    found = None
    if isinstance(error, NotImplementedError):
        found = _STARTER.match(str(error))
    elif isinstance(line := getattr(error, "node", None), ast.Raise):
        found = _STARTER.search(ast.unparse(line))
    if found:
        return f"{found[1]}.{found[2]}"
    return unwritten_task(error.__cause__) if _is_tritons(error) and error.__cause__ is not None else None


def unwrapped(error: BaseException) -> BaseException:
    """What a kernel raised, its traceback without Triton's own frames: of these there are a dozen for every line of it.

    Triton's interpreter wraps an error, once for every function that it passes through.
    """
    while _is_tritons(error) and type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    kept: TracebackType | None = None
    for frame, lineno in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not frame.f_globals.get("__name__", "").startswith("triton."):
            kept = TracebackType(kept, frame, frame.f_lasti, lineno)
    return error.with_traceback(kept)


def _is_tritons(error: BaseException) -> bool:
    return type(error).__module__.startswith("triton.")


def named(error: BaseException) -> str:
    """An error's type and message in a line."""
    # The text of a SyntaxError repeats the file and the line.
    message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return ": ".join(filter(None, [type(error).__name__, message]))  # theirs, which is not translated


def told(error: BaseException) -> str:
    """An error in a line: its type, its message, and the learner's line that it passed through.

    An error of the tracer's says itself, in notes, where in a kernel it was raised.
    """
    places = [note for note in getattr(error, "__notes__", ()) if note.startswith(PLACES)]
    line = "; ".join(places) or learners_line(error)
    return f"{named(error)}  ({line})" if line else named(error)


def short(value: Any) -> str:
    """`value` in a line: tensors as shape and dtype, small ones with their values; long things cut.

    Of a dataclass, the fields that have not their defaults.
    """
    if is_tensor(value):
        return _short_tensor(value)
    if isinstance(value, list | tuple):
        leaves = _leaves(value)
        if len(leaves) > 8 and all(map(is_number, leaves)) and len(repr(value)) > 80:
            kinds = {type(leaf).__name__ for leaf in leaves}
            return f"a {type(value).__name__} of {len(leaves)} {kinds.pop() if len(kinds) == 1 else said('number')}s"
    if isinstance(value, list | tuple) and 0 < len(value) <= 8:
        inside = ", ".join(short(item) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Enum):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return _name(value)
    if is_dataclass(value) and not isinstance(value, type):
        shown = [(each, short(getattr(value, each.name))) for each in fields(value) if each.repr]
        told_fields = [f"{each.name}={text}" for each, text in shown if text != _default(each)]
        return _cut(f"{type(value).__qualname__}({', '.join(told_fields)})", 240)
    text = repr(value)
    if " object at 0x" in text:  # Python's own repr: an address tells nothing
        return _kind(value)
    return _cut(text, 80)


def _short_tensor(value: Any) -> str:
    with tensors().alone():
        shape, dtype = tensors().shape_of(value), str(tensors().dtype_of(value)).removeprefix("torch.")
        told_shape = f"tensor{shape} {dtype}"
        if prod(shape) > _MAX_NUMBERS or tensors().device_of(value).type == "meta":
            return told_shape
        numbers = _numbers(tensors().numbers_of(value))
    if len(shape) <= 1:
        return f"tensor({numbers}) {dtype}"
    return f"{told_shape} {numbers}" if prod(shape) else told_shape


def _default(field: Field[Any]) -> str:
    """A dataclass field's default as text; "" if it has none."""
    if field.default_factory is not MISSING:
        return short(field.default_factory())
    return "" if field.default is MISSING else short(field.default)


def _numbers(value: Any) -> str:
    """What a tensor's `tolist()` gave, its floats in six digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(_numbers, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _leaves(value: Any) -> list[Any]:
    """What nested lists and tuples hold, in order."""
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list | tuple) else [value]


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 4]} …{text[-1]}"


def _difference(got: Any, expected: Any, rtol: float, atol: float, at: str = "") -> str | None:
    """Where and how `got` first differs from `expected`, "" if the two alone tell it, or None if they are the same."""
    prefix = f"at {at}: " if at else ""
    if is_tensor(expected):
        with tensors().alone():
            return _tensor_difference(got, expected, rtol, atol, prefix)
    if isinstance(expected, list | tuple):
        kind = list if isinstance(expected, list) else tuple
        if not is_a(got, kind):
            return f"{prefix}{_kind(got)}, expected a {kind.__name__}"
        got = plain(got)
        for index, (one, other) in enumerate(zip(got, expected, strict=False)):
            if (difference := _difference(one, other, rtol, atol, f"{at}[{index}]")) is not None:
                return difference
        return None if len(got) == len(expected) else f"{prefix}{_items(len(got))}, expected {len(expected)}"
    if not at and (got is None or expected is None):  # "None" and the other one tell it all
        return None if got is expected else ""
    if is_number(expected) and got is not None:
        # A bool is no number here, and a count of things is an integer.
        number = plain(got)
        if not is_number(number) or (isinstance(expected, Integral) and not isinstance(number, Integral)):
            return f"{prefix}{short(got)} is {_kind(got)}, expected {_kind(expected)}"
        got = number
        if got == expected or abs(got - expected) <= atol + rtol * abs(expected) < inf:
            return None
        return f"{prefix}got {short(got)}, expected {short(expected)}" if at else _factor(got, expected)
    if type(got) is not type(expected) and isinstance(expected, bool | str | None):
        return f"{prefix}{short(got)} is {_kind(got)}, expected {_kind(expected)}"
    if isinstance(expected, dict) and is_a(got, dict):
        return _dict_difference(plain(got), expected, rtol, atol, at)
    if isinstance(expected, set | frozenset) and is_a(got, set, frozenset):
        items = plain(got)
        same = are_data(items, expected) and items == expected
    elif is_dataclass(expected) and not isinstance(expected, type) and type(expected).__dataclass_params__.eq:  # type: ignore[attr-defined]
        same = type(got) is type(expected)
        for each in fields(expected) if same else ():
            one, other, place = getattr(got, each.name), getattr(expected, each.name), f"{at}.{each.name}".lstrip(".")
            if each.compare and (difference := _difference(one, other, rtol, atol, place)) is not None:
                return difference
    else:
        same = equal(got, expected)
    return None if same else f"{prefix}got {short(got)}, expected {short(expected)}" if at else ""


def _dict_difference(got: dict[Any, Any], expected: dict[Any, Any], rtol: float, atol: float, at: str) -> str | None:
    prefix = f"at {at}: " if at else ""
    if not are_data(got, expected) or got.keys() != expected.keys():
        return f"{prefix}got {short(got)}, expected {short(expected)}" if at else ""
    for key, other in expected.items():
        if (difference := _difference(got[key], other, rtol, atol, f"{at}[{key!r}]")) is not None:
            return difference
    return None


def _ratio(got: Any, expected: Any, subject: str, other: str) -> str:
    """How many times `expected` the number `got` is, in words, or "" where that tells nothing."""
    try:
        ratio = got / expected
    except (OverflowError, ZeroDivisionError):
        return ""
    if not isfinite(ratio) or ratio <= 0 or f"{ratio:.3g}" == "1":
        return ""
    if 0.01 <= ratio <= 100:
        return f"{subject} is {ratio:.3g} times {other}"
    factor = float(f"{max(ratio, 1 / ratio):.2g}")
    size = said("large") if ratio > 1 else said("small")
    return f"{subject} is about {factor:,.0f} times too {size}"


def _factor(got: Any, expected: Any) -> str:
    """The ratio, where something was counted twice or left out or a unit is wrong: not of small counts, not 1.13."""
    if isinstance(expected, Integral) and min(abs(got), abs(expected)) < _MIN_SIZE:
        return ""
    told_ratio = _ratio(got, expected, said("yours"), "the expected")
    if not told_ratio:
        return ""
    factor = max(got, expected) / min(got, expected)
    return told_ratio if factor > 100 or isclose(factor, round(factor), rel_tol=1e-3) else ""


def _tensor_difference(got: Any, expected: Any, rtol: float, atol: float, prefix: str) -> str | None:
    if not is_tensor(got):
        return f"{prefix}{_kind(got)}, expected a tensor"
    torch = tensors()
    if not any(type(got) is each for each in torch.TYPES):
        return f"{prefix}{_kind(got)}, a subclass of Tensor, expected a tensor"
    if (shape := torch.shape_of(got)) != (expected_shape := torch.shape_of(expected)):
        return f"{prefix}shape {shape}, expected {expected_shape}"
    if (dtype := torch.dtype_of(got)) != (expected_dtype := torch.dtype_of(expected)):
        return f"{prefix}dtype {dtype}, expected {expected_dtype}"
    if (device := torch.device_of(got)).type != (expected_device := torch.device_of(expected)).type:
        return f"{prefix}on {device}, expected on {expected_device}"
    compared = torch.Comparison(got, expected, rtol, atol)
    if not compared.count:
        return None
    first, right, largest = compared.first, compared.right, compared.largest
    here = f"first at {compared.index}: got {first:.6g}, expected {right:.6g}"
    how = ", contains NaN" if isnan(largest) else f", largest error {largest:.3g}"
    if not expected_dtype.is_floating_point:  # ids and positions: how far off says nothing
        how = ""
    known = [f"{number:.6g} is {where}" for number in (first, right) if (where := scenario.origin(number))]
    return joined("; ", [f"{prefix}{here}", *known, f"{compared.count} of {prod(shape)} differ{how}"])


@cache
def tensors() -> Any:
    """The functions on tensors, where torch is loaded. The session asks for them before it loads a learner's file."""
    from minicache_course import tensors as functions

    return functions


def is_tensor(value: object) -> bool:
    """Whether `value` is a tensor; torch is not loaded to find out."""
    return "torch" in sys.modules and is_a(value, tensors().Tensor)


def _items(count: int) -> str:
    return f"{count} item" if count == 1 else f"{count} items"


def _kind(value: object) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return said("an {kind}", kind=name) if name[0] in "aeiouAEIOU" else said("a {kind}", kind=name)


def _name(fn: Any) -> str:
    name = getattr(fn, "__qualname__", None) or _kind(fn)
    return str(name).rpartition("<locals>.")[2]
