"""A check that fails says what was called, what came back, what was expected, and where they first differ."""

from __future__ import annotations

import builtins
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from typing import Any, NamedTuple
from unittest.mock import ANY, MagicMock

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minicache.errors import MemoryAccessError
from minicache_course.checks import CheckFailed, Outcome, call, short, that, told

EYE = torch.eye(3)


def failure(check: Any, *args: Any, **kwargs: Any) -> CheckFailed:
    with pytest.raises(CheckFailed) as info:
        check(*args, **kwargs)
    return info.value


class Box:
    def put(self, thing: object, *, times: int = 1) -> list[object]:
        return [thing] * times


def test_the_call_is_told_with_its_arguments() -> None:
    outcome = call(Box().put, torch.zeros(3, 6), times=2)
    assert outcome.called == "Box.put(tensor[3, 6] float32, times=2)"
    assert len(outcome.value) == 2


def test_arguments_are_told_as_they_were_before_the_call() -> None:
    assert call(list.clear, [1, 2]).called == "list.clear([1, 2])"


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (3, 3),
        (2.0, 2.0),
        (2, 2.0),
        ("a", "a"),
        (None, None),
        (True, True),
        ([1, (2, "x")], [1, (2, "x")]),
        (torch.Size([2, 3]), (2, 3)),
        (EYE, EYE.clone()),
        ((EYE, EYE), (EYE, EYE)),
    ],
)
def test_gives_accepts(got: object, expected: object) -> None:
    that("it", got).gives(expected)


@dataclass(frozen=True)
class Model:
    num_layers: int
    vocabulary: str
    latent: int | None = None
    scale: torch.Tensor | None = None


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        (409_600, 819_200, "yours is 0.5 times the expected"),
        (20_500, 819_200_000, "yours is about 40,000 times too small"),
        (3e12, 2e3, "yours is about 1,500,000,000 times too large"),
        (True, 1, "a bool, expected an int"),
        (1, True, "an int, expected a bool"),
        (3.0, 3, "a float, expected an int"),
        ([None], [3], "at [0]: got None, expected 3"),
        ("3", 3, "a str, expected an int"),
        ([0], [None], "at [0]: 0 is an int, expected None"),
        ([1, 2], (1, 2), "a list, expected a tuple"),
        ([1, 2], [1, 3], "at [1]: got 2, expected 3"),
        ([1, [2, 3]], [1, [2, 4]], "at [1][1]: got 3, expected 4"),
        ([1, 2], [1, 2, 3], "2 items, expected 3"),
        ([1.0], torch.ones(1), "a list, expected a tensor"),
        (torch.ones(2, 3), torch.ones(3, 2), "shape [2, 3], expected [3, 2]"),
        (torch.ones(2).double(), torch.ones(2), "dtype torch.float64, expected torch.float32"),
        (Model(1, "a"), Model(2, "a"), "at num_layers: got 1, expected 2"),
        ([Model(1, "a")], [Model(1, "b")], "at [0].vocabulary: got 'a', expected 'b'"),
        (Model(1, "a"), (1, "a"), "a Model, expected a tuple"),
        (EYE * 2, EYE, "first at [0, 0]: got 2, expected 1; 3 of 9 differ, largest error 1"),
        ((EYE, EYE + 0.5), (EYE, EYE), "at [1]: first at [0, 0]"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), "first at [1]: got nan, expected 2"),
        (torch.tensor([float("nan"), 1.0]), torch.zeros(2), "2 of 2 differ, contains NaN"),
    ],
)
def test_gives_refuses(got: object, expected: object, difference: str) -> None:
    assert difference in failure(that("it", got).gives, expected).first_difference


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (21_047, 21_048),
        (0, 3),
        (3, 0),
        (4, 2),  # two small counts: both can be seen
        (-1, 1),
        (-300, 300),
        (452, 400),
        (float("nan"), 1.0),
        ("a", "b"),
        (0, None),
        (None, "a"),
        (None, 3),
    ],
)
def test_a_difference_that_would_tell_nothing_more_is_left_out(got: object, expected: object) -> None:
    assert "differs" not in str(failure(that("it", got).gives, expected))


def test_is_close() -> None:
    that("x", 1.0 + 1e-7).is_close(1.0)
    that("x", EYE + 1e-7).is_close(EYE)
    that("x", torch.tensor([float("inf")])).is_close(torch.tensor([float("inf")]))
    assert "2 times the expected" in failure(that("x", 2.0).is_close, 1.0).first_difference
    that("x", 1.1).is_close(1.0, rtol=0.2)


def test_is_near_can_keep_the_answer_to_itself() -> None:
    that("bytes", 101).is_near(100, 0.02)
    error = failure(that("bytes", 8192).is_near, 16384, 0.01, reveal=False, factors={0.5: "count both K and V"})
    assert "16384" not in str(error)
    assert "0.5 times" in str(error)
    assert "count both K and V" in str(error)
    assert "16384" in str(failure(that("bytes", 8192).is_near, 16384, 0.01))
    assert "not a number" in str(failure(that("bytes", "many").is_near, 16384, 0.01))


@pytest.mark.parametrize(
    ("got", "rel", "expected", "difference"),
    [
        (8192, 0.01, "the right number, within 1 %", "your answer is 0.5 times the right one"),
        (1, 1e-4, "the right number, within 0.01 %", "your answer is about 16,000 times too small"),
        (16383, 0, "the right number, exactly", "your answer is close, but not within the tolerance"),
        (0, 0, "the right number, exactly", ""),
    ],
)
def test_is_near_says_how_near_is_near(got: int, rel: float, expected: str, difference: str) -> None:
    error = failure(that("bytes", got).is_near, 16384, rel, reveal=False)
    assert (error.expected, error.first_difference) == (expected, difference)


def test_raises() -> None:
    call(int, "x").raises(ValueError, saying="INVALID")
    call(int, "x").raises((TypeError, ValueError))
    assert "no error" in failure(call(int, "3").raises, ValueError).got
    assert "ValueError" in failure(call(int, "x").raises, TypeError).got
    assert "does not contain it" in failure(call(int, "x").raises, ValueError, saying="banana").first_difference


def test_a_call_that_raised_has_no_value() -> None:
    outcome = call(int, "x")
    error = failure(lambda: outcome.value)
    assert error.called == "int('x')"
    assert error.got.startswith("ValueError: invalid literal")
    assert isinstance(error.__cause__, ValueError)
    assert "ValueError" in failure(outcome.gives, 3).got


def test_an_error_of_the_tracers_is_told_with_its_places() -> None:
    error = MemoryAccessError("a_kernel loads x[10]")
    error.add_note("at kernels/decode.py:3: k = tl.load(k_ptr)")
    error.add_note("called at kernels/prefill.py:9: attend_range(q)")
    told_so = "(at kernels/decode.py:3: k = tl.load(k_ptr); called at kernels/prefill.py:9: attend_range(q))"
    assert told(error) == f"MemoryAccessError: a_kernel loads x[10]  {told_so}"


def test_sys_exit_is_an_error_like_any_other() -> None:
    assert "SystemExit" in failure(call(exit, 0).gives, None).got


def test_a_starters_error_goes_through() -> None:
    def starter() -> None:
        raise NotImplementedError("phase 1, task 2: Reserve the memory; read docs/en/x.md")

    def own() -> None:
        raise NotImplementedError

    with pytest.raises(NotImplementedError):
        call(starter)
    assert isinstance(call(own), Outcome)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.arange(3), "tensor([0, 1, 2]) int64"),
        (torch.eye(2, dtype=torch.float16), "tensor[2, 2] float16 [[1, 0], [0, 1]]"),
        (torch.full((1, 2), 1 / 3), "tensor[1, 2] float32 [[0.333333, 0.333333]]"),
        (torch.zeros(2, 0), "tensor[2, 0] float32"),
        (torch.zeros(2, device="meta"), "tensor[2] float32"),
        ((torch.zeros(3, 6),), "(tensor[3, 6] float32,)"),
        ([1 / 3] * 32, "a list of 32 floats"),
        ([[1 / 3] * 4, [1 / 7] * 5], "a list of 9 floats"),
        ((1, *[1 / 3] * 8), "a tuple of 9 numbers"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, 8]"),
        (Box(), "a Box"),
        (print, "print"),
    ],
)
def test_values_are_told_in_a_line(value: object, text: str) -> None:
    assert short(value) == text


def test_a_dataclass_is_told_by_its_fields_that_are_not_the_default() -> None:
    words = "sixty characters, and so the whole takes more than eighty"
    assert short(Model(32, words)) == f"Model(num_layers=32, vocabulary={words!r})"
    assert short(Model(32, "", 3, torch.ones(17))) == (
        "Model(num_layers=32, vocabulary='', latent=3, scale=tensor[17] float32)"
    )


def test_long_values_are_cut() -> None:
    assert len(short("x" * 1000)) < 100
    assert len(short(list(range(1000)))) < 100


def test_an_infinity_that_is_expected_is_near_to_nothing_else() -> None:
    infinite = float("-inf")
    that("x", torch.tensor([infinite])).is_close(torch.tensor([infinite]))
    failure(that("x", torch.tensor([-1e30])).is_close, torch.tensor([infinite]))
    failure(that("x", -1e30).is_close, infinite)


# What is returned may be made to pass: nothing that it says of itself counts.


class Always:
    """Equal to everything, of any class, and any number."""

    __class__ = int  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __sub__(self, other: object) -> Always:
        return self

    __rsub__ = __abs__ = __sub__  # type: ignore[assignment]

    def __le__(self, other: object) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 2


class AnyKind(type):
    """A metaclass that claims every class for a base."""

    def __eq__(cls, other: object) -> bool:
        return True

    __hash__ = type.__hash__

    @property
    def __mro__(cls) -> tuple[type, ...]:  # type: ignore[override]
        return (bool, int, str, list, tuple, dict, torch.Tensor, object)


class OfAnyKind(Always, metaclass=AnyKind):
    pass


class AlwaysInt(int):
    __eq__ = Always.__eq__
    __hash__ = Always.__hash__
    __sub__ = __rsub__ = __abs__ = lambda self, *_: 0
    __int__ = __index__ = lambda self: 819_200
    __le__ = __lt__ = lambda self, other: True


class AlwaysFloat(float):
    __eq__ = Always.__eq__
    __hash__ = Always.__hash__
    __sub__ = __rsub__ = __abs__ = lambda self, *_: 0.0


class AlwaysStr(str):
    __eq__ = Always.__eq__
    __hash__ = str.__hash__
    __contains__ = lambda self, other: True  # noqa: E731
    lower = __str__ = lambda self: self  # type: ignore[assignment]


class AlwaysList(list[Any]):
    __eq__ = Always.__eq__  # type: ignore[assignment]
    __iter__ = lambda self: iter([1, 2])  # noqa: E731  # type: ignore[assignment]
    __len__ = lambda self: 2  # noqa: E731


class AlwaysDict(dict[Any, Any]):
    __eq__ = Always.__eq__  # type: ignore[assignment]
    items = lambda self: {"a": 1}.items()  # noqa: E731  # type: ignore[assignment]


class AlwaysSet(set[Any]):
    __eq__ = Always.__eq__  # type: ignore[assignment]


class AlwaysTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return EYE


HOSTILE = [Always(), OfAnyKind(), MagicMock(spec=int), MagicMock(), ANY]


@pytest.mark.parametrize("got", HOSTILE, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize(
    "expected",
    [3, 2.5, True, None, "text", b"bytes", [1, 2], (1, 2), {"a": 1}, {1}, EYE, Model(1, "a"), torch.float32, Box],
    ids=str,
)
def test_an_object_that_is_equal_to_everything_equals_nothing(got: object, expected: object) -> None:
    failure(that("it", got).gives, expected)
    failure(that("it", [got, 2]).gives, [expected, 2])
    failure(that("it", {"a": got}).gives, {"a": expected})
    failure(that("it", got).is_close, expected)
    if isinstance(expected, float):
        failure(that("it", got).is_near, expected, 0.5)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (AlwaysInt(7), 819_200),
        (AlwaysInt(7), 819_200.0),
        (AlwaysFloat(7), 2.5),
        (AlwaysFloat("nan"), 2.5),
        (AlwaysStr("a"), "b"),
        (AlwaysList([3]), [1, 2]),
        (AlwaysDict(), {"a": 1}),
        (AlwaysSet([3]), {1}),
        ({Always()}, {1}),
        ({Always(): 1}, {0: 1}),
        ({(Always(), 1): 1}, {(0, 1): 1}),
        (frozenset([(Always(),)]), {(0,)}),
        (torch.zeros(3, 3).as_subclass(AlwaysTensor), EYE),
    ],
)
def test_a_subclass_is_the_value_that_it_has(got: object, expected: object) -> None:
    failure(that("it", got).gives, expected)
    failure(that("it", [got]).gives, [expected])


class Computes:
    def __mul__(self, other: object) -> Computes:
        return self

    def __le__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize(
    "got",
    [Always(), OfAnyKind(), MagicMock(spec=int), AlwaysInt(3), AlwaysFloat(3), Computes()],
    ids=map(str, range(6)),
)
def test_a_test_does_not_compute_with_what_computes_as_it_likes(got: object) -> None:
    failure(lambda: call(lambda: got).value)


@pytest.mark.parametrize(
    "got",
    [3, 2.5, Fraction(1, 2), EYE, torch.nn.Parameter(EYE), [Always()], Box(), Model(1, "a"), Box, numpy.float64(2)],
)
def test_a_test_computes_with_anything_else(got: object) -> None:
    assert call(lambda: got).value is got


class Level(IntEnum):
    HIGH = 3


class Pair(NamedTuple):
    one: int
    other: int


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (AlwaysInt(3), 3),
        (Level.HIGH, 3),
        (Level.HIGH, Level.HIGH),
        (Fraction(1, 2), 0.5),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(3), 3),
        (Pair(1, 2), (1, 2)),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (frozenset([1]), {1}),
        ({"a": 1}.keys(), {"a"}),
        (deque([1, 2]), deque([1, 2])),
        (range(3), range(0, 3)),
        ({Level.HIGH: 1, torch.float32: 2}, {torch.float32: 2, Level.HIGH: 1}),
        (torch.nn.Parameter(EYE), EYE),
        (Box, Box),
    ],
)
def test_what_is_equal_in_earnest_is_accepted(got: object, expected: object) -> None:
    that("it", got).gives(expected)


def test_a_mapping_tells_the_key_at_which_it_differs() -> None:
    assert failure(that("it", {"a": [1, 2]}).gives, {"a": [1, 3]}).first_difference == "at ['a'][1]: got 2, expected 3"


def test_an_error_is_of_the_class_that_it_is() -> None:
    class ClaimsError(Exception):
        __class__ = ValueError  # type: ignore[assignment]

    class MatchesError(ValueError):
        def __str__(self) -> str:
            return AlwaysStr("no")

    class RecitesError(ValueError):
        def __str__(self) -> str:
            return "x" * 10_000 + "shape"

    def raising(error: BaseException) -> None:
        raise error

    failure(call(raising, ClaimsError()).raises, ValueError)
    failure(call(raising, MatchesError()).raises, ValueError, saying="shape")
    failure(call(raising, RecitesError()).raises, ValueError, saying="shape")


class KVRows:
    @staticmethod
    def store(rows: torch.Tensor) -> None:
        rows.zero_()


def test_an_argument_may_not_be_overwritten_by_what_gives_a_tensor() -> None:
    """Or an expectation that is computed from the arguments after the call would be what the call has made of them."""

    def doubles(x: torch.Tensor) -> torch.Tensor:
        return 2 * x.fill_(0)

    def through_data(x: torch.Tensor) -> torch.Tensor:
        x.data.zero_()
        return torch.zeros(2)

    for cheat in (doubles, through_data):
        x = torch.ones(2)
        assert "and another argument 1" in failure(call(cheat, x).gives, 2 * x).got
        assert "and another x" in failure(lambda cheat=cheat: call(cheat, x=torch.ones(2)).value).got
    x = torch.tensor([1.0, float("nan")])
    call(lambda x: x + 1, x).value  # noqa: B018
    call(torch.Tensor.add_, x, 1).value  # noqa: B018  its result is its argument
    call(KVRows.store, x).gives(None)  # what writes gives nothing


def test_functions_that_a_learners_file_replaces_have_no_part_in_a_check() -> None:
    checks = [
        failure_of(that("x", torch.zeros(3, 3)), EYE),
        failure_of(that("x", 1.0), 2.0),
        failure_of(that("x", [1]), [2, 3]),
    ]
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        *((builtins, name, lambda *_: 0) for name in ("isinstance", "len", "all", "any", "abs")),
        *((math, name, lambda *_, **__: True) for name in ("isclose", "isfinite")),
        *((torch, name, lambda *_, **__: True) for name in ("equal", "allclose", "isclose", "eq")),
        *(
            (torch.Tensor, name, lambda *_, **__: EYE)
            for name in ("double", "sub", "__le__", "__eq__", "sum", "detach")
        ),
        *((torch.Tensor, name, EYE) for name in ("shape", "dtype")),
    ]
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        held = [check() for check in checks]
    finally:  # pytest's own way of replacing asks isinstance
        for owner, name, was in before:
            setattr(owner, name, was) if was is not None else delattr(owner, name)
    assert held == [True] * 3


def failure_of(outcome: Outcome, expected: object) -> Callable[[], bool]:
    """A function that says whether the check fails as it should: pytest is not asked while `isinstance` is replaced."""

    def fails() -> bool:
        try:
            outcome.gives(expected)
        except CheckFailed:
            return True
        return False

    return fails


class Everything(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return EYE


class EveryOperation(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.ops.aten.zeros_like(args[0])


@pytest.mark.parametrize("mode", [Everything, EveryOperation])
def test_a_mode_that_is_left_behind_has_no_part_in_a_check(mode: Any) -> None:
    got = torch.zeros(3, 3)
    with mode():
        fails = failure_of(that("x", got), EYE)()
    assert fails
