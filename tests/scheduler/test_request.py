"""What a request guarantees: it is checked when it is made, and its tokens are found by position."""

from __future__ import annotations

from typing import Any

import pytest

from minicache.request import Request, RequestStatus


def test_a_new_request_has_done_nothing() -> None:
    request = Request("a", (5, 6, 7), 4, stop_token_ids=[1, 1], priority=-2, arrival_time=1.5, group="image")
    assert (request.prompt_token_ids, request.num_prompt_tokens, request.num_tokens) == ([5, 6, 7], 3, 3)
    assert (request.max_tokens, request.stop_token_ids, request.ignore_eos) == (4, frozenset([1]), False)
    assert (request.priority, request.arrival_time, request.group, request.cache_salt) == (-2, 1.5, "image", None)
    assert (request.status, request.finish_reason, request.arrival_index) == (RequestStatus.WAITING, None, -1)
    assert (request.output_token_ids, request.block_ids, request.host_block_ids) == ([], [], [])
    assert (request.num_computed_tokens, request.num_cached_tokens, request.num_preemptions) == (0, 0, 0)


def test_the_prompt_is_its_own() -> None:
    prompt = [1, 2, 3]
    request = Request("a", prompt, 4)
    prompt.append(4)
    assert request.prompt_token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"prompt_token_ids": []}, ValueError),
        ({"prompt_token_ids": [1, -1]}, ValueError),
        ({"prompt_token_ids": [1, 2.0]}, TypeError),
        ({"prompt_token_ids": [True]}, TypeError),
        ({"prompt_token_ids": "text"}, TypeError),
        ({"prompt_token_ids": None}, TypeError),
        ({"max_tokens": 0}, ValueError),
        ({"max_tokens": 1.0}, TypeError),
        ({"stop_token_ids": [-3]}, ValueError),
        ({"stop_token_ids": ["."]}, TypeError),
        ({"priority": 0.5}, TypeError),
        ({"priority": True}, TypeError),
        ({"arrival_time": float("nan")}, ValueError),
        ({"arrival_time": float("inf")}, ValueError),
        ({"group": None}, TypeError),
        ({"group": ["image"]}, TypeError),
        ({"request_id": ["a"]}, TypeError),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Request(**{"request_id": "a", "prompt_token_ids": [1], "max_tokens": 1} | arguments)


def test_an_end_has_a_reason_and_nothing_else_has() -> None:
    reasons = {status.name: status.finish_reason for status in RequestStatus if status.is_finished}
    assert reasons == {
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH": "length",
        "FINISHED_CAPACITY": "capacity",
        "FINISHED_ABORTED": "abort",
        "FINISHED_ERROR": "error",
    }
    assert all(status.finish_reason is None for status in RequestStatus if not status.is_finished)


def test_tokens_by_position() -> None:
    request = Request("a", [0, 1, 2], 4)
    request.output_token_ids += [3, 4]
    everything = [0, 1, 2, 3, 4]
    for start in range(6):
        for stop in range(start, 6):
            assert request.token_ids(start, stop) == everything[start:stop]
    for start, stop in [(0, 6), (-1, 2), (3, 2), (4, 3), (5, 6), (6, 6)]:
        with pytest.raises(IndexError, match="request 'a' has 5"):
            request.token_ids(start, stop)


def test_it_can_be_read_in_a_message() -> None:
    request = Request("a", [0, 1, 2], 4)
    request.output_token_ids.append(3)
    assert repr(request) == "Request('a', WAITING, 3 + 1/4 tokens, 0 computed)"
