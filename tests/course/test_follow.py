"""A failure tells the scenario: what was made, what was done before, and whose number turned up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.cache import KVCache
from minicache.request import Request
from minicache.scheduler import ContinuousBatchScheduler
from minicache_course import scenario
from minicache_course.checks import call, that
from minicache_course.follow import following, following_schedulers


class Shelf:
    def __init__(self, size: int) -> None:
        self.size = size
        self.things: list[int] = []

    def put(self, *things: int) -> None:
        for thing in things:
            if thing < 0:
                raise ValueError(thing)
            self.things.append(thing)

    def put_twice(self, thing: int) -> None:
        self.put(thing)
        self.put(thing)


def notes_of(test: object, error: type[BaseException] = AssertionError) -> list[str]:
    assert callable(test)
    with pytest.raises(error) as raised, scenario.telling():
        test()
    return "\n".join(raised.value.__notes__).splitlines()


def test_what_was_made_and_done_is_told_up_to_the_call_in_question() -> None:
    def test() -> None:
        shelf = Shelf(size=3)
        shelf.put(1)
        call(shelf.put, 2).gives(None)
        call(shelf.put_twice, 4).gives([4])

    with following(Shelf, "__init__", "put", "put_twice"):
        assert notes_of(test) == ["given     Shelf(size=3)", "after     put(1)", "          put(2)"]
    assert Shelf.put.__name__ == "put"
    assert not hasattr(Shelf.put, "__wrapped__")


def test_an_error_on_the_way_is_told_with_the_call_that_raised_it() -> None:
    def test() -> None:
        Shelf(2).put(-1)

    with following(Shelf, "__init__", "put"):
        assert notes_of(test, ValueError)[-1] == "after     put(-1), which raised ValueError"


def test_of_many_steps_the_last_are_told() -> None:
    def test() -> None:
        for number in range(20):
            Shelf(number).put(number)
        raise AssertionError

    with following(Shelf, "put"):
        lines = notes_of(test)
    assert lines[0] == "after     … (12 more before)"
    assert [line.strip() for line in lines[1:]] == [f"put({number})" for number in range(12, 20)]


def test_what_one_test_did_is_not_told_of_the_next() -> None:
    with following(Shelf, "put"):
        with scenario.telling():
            Shelf(1).put(1)

        def test() -> None:
            raise AssertionError

        with pytest.raises(AssertionError) as raised, scenario.telling():
            test()
    assert not hasattr(raised.value, "__notes__")


def test_each_example_of_hypothesis_has_its_own() -> None:
    @settings(database=None, derandomize=True)
    @given(st.integers(0, 9))
    def test(number: int) -> None:
        shelf = Shelf(9)
        shelf.put(number)
        assert number < 5

    test.hypothesis.inner_test = scenario.telling()(test.hypothesis.inner_test)  # type: ignore[attr-defined]
    with following(Shelf, "__init__", "put"):
        assert notes_of(test)[:2] == ["given     Shelf(9)", "after     put(5)"]


def test_schedulers_tell_requests_and_steps() -> None:
    def test() -> None:
        scheduler = ContinuousBatchScheduler(num_blocks=9, max_num_seqs=2)
        for name in "ab":
            scheduler.add_request(Request(name, [1, 2, 3], 4, stop_token_ids=[7]))
        scheduler.update_from_output(scheduler.schedule(), {"a": 7, "b": 1})
        that("it", 1).gives(2)

    with following_schedulers():
        assert notes_of(test) == [
            "given     ContinuousBatchScheduler(num_blocks=9, max_num_seqs=2)",
            "          requests of 3 prompt tokens, max_tokens 4, stop_token_ids [7]: 'a', 'b'",
            "after     add_request 'a', 'b'",
            "          schedule() runs {'a': 3, 'b': 3}",
            "          update_from_output(…, {'a': 7, 'b': 1}) finishes ['a']",
        ]


def test_a_number_in_the_wrong_place_is_told_by_name() -> None:
    k = torch.arange(4.0).reshape(1, 1, 2, 2)

    def test() -> None:
        cache = KVCache(1, 1, 1, 4, 2)
        cache.append(0, k, k + 100)
        call(cache.read, 0).gives((k, k))

    with (
        following(KVCache, "append"),
        pytest.raises(AssertionError, match=r"100 is v\[0, 0, 0, 0\] of append\(0, k, v\)"),
        scenario.telling(),
    ):
        test()
