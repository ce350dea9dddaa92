"""A check that fails says what was called, what came back, what was expected, and where they first differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from minicache.course.checks import CheckFailed, Outcome, call, short, that, told
from minicache.errors import MemoryAccessError

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
        (16383, 0, "the right number, exactly", "your answer is close, but not close enough"),
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
    assert "does not say it" in failure(call(int, "x").raises, ValueError, saying="banana").first_difference


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
    words = "sixty characters, so that the whole takes more than eighty"
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
