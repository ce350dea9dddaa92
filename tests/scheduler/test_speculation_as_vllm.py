"""Where speculation differs from vLLM 0.33's, on purpose: `docs/en/reference/vllm-differences.md`.

`AsVllm` undoes the differences one by one. Without all five it is vLLM's scheduler, step for step: there is
no sixth.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Final

import pytest

from minicache.memory.blocks import blocks_for
from minicache.request import Request, RequestId
from minicache.scheduler import SchedulerOutput, SpeculativeScheduler, create_scheduler

GOLDEN = Path(__file__).parent / "golden" / "speculative.json.gz"
OPTIONS = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefix_caching")
MODES = ("full_prompt_must_fit", "first_chunk_must_fit")
RULES: Final = ("length", "budget", "blocks", "returned", "admission")
TOKEN = 7


class AsVllm(SpeculativeScheduler):
    """`SpeculativeScheduler` without these rules of ours: without all of them, it is vLLM's.

    | rule | ours | vLLM's |
    |---|---|---|
    | length | no draft token beyond max_tokens | up to max_model_len |
    | budget | a token for every later request of the batch | a request's draft tokens first |
    | blocks | draft tokens take spare blocks only | they preempt |
    | returned | the blocks of rejected ones are freed | they stay |
    | admission | none for a request just admitted | k of −1, if it has one token to compute |
    """

    def __init__(self, *, without: Sequence[str] = RULES, **options: Any) -> None:
        super().__init__(**options)
        self.without = frozenset(without)

    def num_drafts(self, request: Request, budget: int, num_later: int) -> int:
        """Draft tokens that a request may have, if so much budget is left behind its own token; but for its blocks."""
        limit = min(self.num_speculative_tokens, self.largest_chunk(1 + self.num_speculative_tokens) - 1)
        limit = min(limit, budget if "budget" in self.without else budget - num_later)
        if "length" not in self.without:
            limit = min(limit, request.max_tokens - len(request.output_token_ids) - 1)
        if self.max_model_len is not None:
            limit = min(limit, self.max_model_len - request.num_tokens - 1)
        return max(0, limit)

    def max_drafts(self, request: Request, output: SchedulerOutput) -> int:
        limit = self.num_drafts(request, self.token_budget, len(self.running) - len(output.scheduled))
        if "blocks" in self.without:
            return limit
        num_spare = max(0, self.pool.num_free - self._num_missing)
        return min(limit, (len(request.block_ids) + num_spare) * self.pool.block_size - request.num_tokens)

    def blocks_missing(self, request: Request) -> int:
        left = request.num_tokens - request.num_computed_tokens
        num_new = self.chunk(left)
        if "blocks" in self.without and left == num_new == 1 and self.has_gained_token(request):
            place = next(place for place, each in enumerate(self.running) if each is request)
            limit = self.num_drafts(request, self.token_budget - 1, len(self.running) - place - 1)
            num_new += len(self.propose(request, limit)[:limit]) if limit else 0
        needed = blocks_for(request.num_computed_tokens + num_new, self.pool.block_size) if num_new else 0
        return max(0, needed - len(request.block_ids))

    def return_blocks(self, request: Request, num_tokens: int) -> None:
        if "returned" not in self.without:
            super().return_blocks(request, num_tokens)

    def accept(self, output: SchedulerOutput, tokens: Mapping[RequestId, Sequence[int]]) -> dict[RequestId, int]:
        most = {each.request_id: each.max_tokens - len(each.output_token_ids) for each in output.scheduled}
        return super().accept(output, {name: given[: most[name]] for name, given in tokens.items()})

    # Admission

    def schedule_running(self, output: SchedulerOutput) -> None:
        super().schedule_running(output)
        self._num_scheduled = len(output.scheduled)
        self._in_prompt = not all(map(self.has_gained_token, output.scheduled))

    def num_pads(self, request: Request, found: Sequence[int]) -> int:
        """Draft tokens of −1 that the request is admitted with."""
        alone = not self._num_scheduled and not found
        if "admission" not in self.without or self._in_prompt or alone or super().num_new_tokens(request, found) != 1:
            return 0
        left = request.num_tokens - max(request.num_computed_tokens, len(found) * self.pool.block_size)
        return self.num_speculative_tokens if left == 1 else 0

    def head(self) -> Request | None:
        request = super().head()
        if request is not None and self.num_pads(request, self.find_prefix(request)) >= self.token_budget:
            return None
        return request

    def blocks_to_take(self, request: Request, found: Sequence[int] = ()) -> int:
        needed, used = super().blocks_to_take(request, found), sum(self.pool.ref_count(each) > 0 for each in found)
        if num_pads := self.num_pads(request, found):
            needed = max(needed, blocks_for(request.num_tokens + num_pads, self.pool.block_size) - used)
        return needed

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        num_pads = self.num_pads(request, found)
        super().admit(request, output, found)
        if num_pads:
            drafts = [-1] * num_pads
            needed = blocks_for(request.num_tokens + num_pads, self.pool.block_size) - len(request.block_ids)
            request.block_ids += self.pool.allocate(needed)
            request.draft_token_ids = output.draft_token_ids[request.request_id] = drafts
            output.num_scheduled_tokens[request.request_id] += num_pads
            self.token_budget -= num_pads


# The recordings


@cache
def workloads() -> list[dict[str, Any]]:
    """The last 14 exercise rules that few of the others do."""
    loaded: list[dict[str, Any]] = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    return loaded


def prompt(request: int, prefix: int, length: int) -> list[int]:
    return [p % 500 if p < prefix else (request * 7919 + p * 31 + 1) % 30000 + 500 for p in range(length)]


def num_drafts(workload: dict[str, Any], request: Request) -> int:
    """How many tokens the drafter proposes next."""
    k, place = workload["num_speculative_tokens"], len(request.output_token_ids)
    most = (int(request.request_id) + place) % (k + 1) if workload["ragged"] else k
    return min(most, max(0, request.max_tokens - place - 1)) if workload["capped"] else most


def num_accepted(workload: dict[str, Any], request: Request, drafts: list[int]) -> int:
    """How many of them the model accepts: none of −1."""
    number, place = int(request.request_id), len(request.output_token_ids)
    for index, draft in enumerate(drafts):
        if draft < 0 or (5 * number + 3 * (place + index)) % 7 >= workload["right_of_seven"]:
            return index
    return len(drafts)


def rows_of(scheduler: Any, workload: dict[str, Any]) -> Iterator[list[Any]]:
    """The rows of the recording, as the scheduler makes them."""
    scheduler.propose = lambda request, limit: [TOKEN] * min(limit, num_drafts(workload, request))
    coming = sorted((row[3], number) for number, row in enumerate(workload["requests"]))
    step = 0
    while coming or scheduler.has_unfinished:
        while coming and coming[0][0] <= step:
            arrival, number = coming.pop(0)
            prefix, length, max_tokens, _ = workload["requests"][number]
            request = Request(
                str(number), prompt(number, prefix, length), max_tokens, arrival_time=arrival + number * 1e-6
            )
            scheduler.add_request(request)
        output = scheduler.schedule()
        row = [dict(output.num_scheduled_tokens), sorted(output.preempted), scheduler.pool.num_free]
        drafts = {name: list(each) for name, each in output.draft_token_ids.items()}
        accepted = {
            each.request_id: num_accepted(workload, each, drafts[each.request_id])
            for each in output.scheduled
            if each.request_id in drafts
        }
        tokens = dict.fromkeys(output.num_scheduled_tokens, TOKEN)
        tokens |= scheduler.accept(output, {name: [TOKEN] * (number + 1) for name, number in accepted.items()})
        finished = scheduler.update_from_output(output, tokens)
        scheduler.check()
        row.insert(2, [each.request_id for each in finished])
        yield [*row, scheduler.pool.num_free, {name: len(each) for name, each in drafts.items()}, accepted]
        step += 1


def options_of(workload: dict[str, Any], mode: str) -> dict[str, Any]:
    options = {name: workload[name] for name in (*OPTIONS, "num_speculative_tokens")}
    return options | {"reserve_full_prompt": mode == "full_prompt_must_fit"}


def is_same(rows: Iterator[list[Any]], expected: list[list[Any]]) -> bool:
    """Whether the steps compute the same tokens and preempt the same requests."""
    return all(ours and theirs and ours[:2] == theirs[:2] for ours, theirs in zip_longest(rows, expected))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", range(134))
def test_without_these_rules_every_step_is_the_one_that_vllm_schedules(index: int, mode: str) -> None:
    workload = workloads()[index]
    expected = workload["steps"][mode]
    got = rows_of(AsVllm(**options_of(workload, mode)), workload)
    for step, (theirs, ours) in enumerate(zip_longest(expected, got)):
        assert ours == theirs, f"step {step}: expected {theirs}, got {ours}"


@pytest.mark.parametrize(
    ("rule", "num_others"), [("length", 30), ("budget", 4), ("blocks", 57), ("returned", 11), ("admission", 27)]
)
def test_how_many_schedules_each_rule_changes(rule: str, num_others: int) -> None:
    """Of 120, in vLLM's own mode, if it is the only one that is kept."""
    changed = 0
    without = [each for each in RULES if each != rule]
    for workload in workloads()[:120]:
        expected = workload["steps"][MODES[0]]
        got = rows_of(AsVllm(without=without, **options_of(workload, MODES[0])), workload)
        changed += not is_same(got, expected)
    assert changed == num_others


@pytest.mark.parametrize(
    ("mode", "num_same", "theirs", "ours"),
    [
        (MODES[0], 43, (8_318, 72_744, 299), (8_257, 70_289, 193)),
        (MODES[1], 39, (8_287, 79_172, 499), (8_239, 76_406, 379)),
    ],
    ids=MODES,
)
def test_what_the_rules_save(mode: str, num_same: int, theirs: tuple[int, ...], ours: tuple[int, ...]) -> None:
    """Steps, computed tokens and preemptions of 120 workloads."""
    same, counted = 0, []
    for workload in workloads()[:120]:
        expected = workload["steps"][mode]
        got = list(rows_of(create_scheduler("chunked", **options_of(workload, mode)), workload))
        same += is_same(iter(got), expected)
        counted.append(
            [
                (len(rows), sum(sum(r[0].values()) for r in rows), sum(len(r[1]) for r in rows))
                for rows in (expected, got)
            ]
        )
    assert same == num_same
    assert [tuple(map(sum, zip(*each, strict=True))) for each in zip(*counted, strict=True)] == [theirs, ours]


# The shortest workload that shows each of them


@pytest.mark.parametrize(
    ("rule", "options", "requests", "theirs", "ours"),
    [
        ("length", {}, [(1, 2, 0)], [{"0": 1}, {"0": 2}], [{"0": 1}, {"0": 1}]),
        (
            "budget",
            {"max_num_batched_tokens": 2},
            [(1, 3, 0), (1, 3, 0)],
            [{"0": 1, "1": 1}, {"0": 2}],
            [{"0": 1, "1": 1}, {"0": 1, "1": 1}],
        ),
        (
            "blocks",
            {"num_blocks": 3},
            [(1, 3, 0), (1, 3, 0)],
            [{"0": 1, "1": 1}, {"0": 2}],
            [{"0": 1, "1": 1}, {"0": 2, "1": 1}],
        ),
        (
            "admission",
            {},
            [(1, 3, 0), (1, 1, 1)],
            [{"0": 1}, {"0": 2, "1": 2}],
            [{"0": 1}, {"0": 2, "1": 1}],
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_shortest_workload(rule: str, options: dict[str, Any], requests: Any, theirs: Any, ours: Any) -> None:
    """Blocks of 2, one draft token. Requests are (prompt, max_tokens, step of arrival)."""
    options = {"num_blocks": 9, "block_size": 2, "num_speculative_tokens": 1} | options
    assert [row[0] for row in small_rows(AsVllm(**options), requests)] == theirs
    assert [row[0] for row in small_rows(create_scheduler("chunked", **options), requests)] == ours
    others = [each for each in RULES if each != rule]  # and it is this rule that makes the difference
    assert [row[0] for row in small_rows(AsVllm(without=others, **options), requests)] == ours


def test_the_shortest_workload_of_returned_blocks() -> None:
    """The draft token of step 1 is in a second block, and wrong."""
    options = {"num_blocks": 2, "block_size": 2, "num_speculative_tokens": 1}
    assert [row[4] for row in small_rows(AsVllm(**options), [(1, 3, 0)])] == [1, 0]
    assert [row[4] for row in small_rows(create_scheduler("chunked", **options), [(1, 3, 0)])] == [1, 1]


def small_rows(scheduler: Any, requests: Sequence[tuple[int, int, int]]) -> list[Any]:
    """The first two steps of a workload whose draft tokens are all wrong."""
    workload = {"num_speculative_tokens": 1, "ragged": False, "capped": False, "right_of_seven": 0}
    workload["requests"] = [[0, *each] for each in requests]
    return list(islice(rows_of(scheduler, workload), 2))
