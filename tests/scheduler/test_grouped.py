"""The scheduler over several groups of layers: any windows, any load, and what it refuses."""

from __future__ import annotations

import random
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minicache.errors import InvariantError, RequestTooLargeError
from minicache.memory.groups import NULL_BLOCK, BlockGroups
from minicache.request import Request, RequestStatus
from minicache.scheduler import GroupedScheduler, Scheduler, create_scheduler
from minicache.scheduler.audit_grouped import GroupedAuditor
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import observe
from minicache.scheduler.restore import restore

WINDOWS = [(None,), (8,), (None, 8), (8, None), (None, 5, 17), (None, 8, 8, 8), (6, 30), (1, None), (10**6, 3)]


def grouped(*windows: int | None, **options: Any) -> GroupedScheduler:
    scheduler = create_scheduler("chunked", **{"num_blocks": 60, "block_size": 4, "windows": windows} | options)
    assert isinstance(scheduler, GroupedScheduler)
    return scheduler


def some_requests(rng: random.Random, number: int, most: int) -> list[Request]:
    """Prompts that share prefixes, of at most `most` tokens."""
    requests = []
    for each in range(number):
        shared, length = rng.choice([0, 5, 8, 17, 24]), rng.randint(1, most)
        prompt = [position if position < shared else 100 * each + position for position in range(length)]
        requests.append(Request(each, prompt, rng.randint(1, 25), stop_token_ids=[9]))
    return requests


def options_of(rng: random.Random) -> dict[str, Any]:
    budget = rng.choice([1, 3, 8, 20, 100])
    return {
        "num_blocks": rng.choice([8, 12, 20, 40]),
        "max_num_seqs": rng.randint(1, 6),
        "max_num_batched_tokens": budget,
        "max_model_len": rng.choice([None, None, 40]),
        "prefix_caching": rng.random() < 0.7,
        "prefix_cache_retention": rng.choice([0, 0, None, 4, 12]),
        "reserve_full_prompt": rng.random() < 0.6,
        "long_prefill_threshold": rng.choice([0, 0, 5]),
        "watermark": rng.choice([0.0, 0.0, 0.2]),
    }


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**9))
def test_any_load_is_served_and_every_block_comes_back(windows, seed):
    """The auditor watches: no window loses a token, what is found was computed, no more is held than charged."""
    rng = random.Random(seed)
    options = options_of(rng)
    plain = grouped(*windows, **options)
    scheduler = observe(plain, GroupedAuditor())
    coming = some_requests(rng, rng.randint(1, 9), 36)
    left, served = list(coming), []
    for _ in range(2000):
        while left and rng.random() < 0.3:
            try:
                scheduler.add_request(left[0])
                served.append(left[0])
            except RequestTooLargeError:
                too_large = plain.blocks_to_admit(left[0]) > options["num_blocks"]
                assert too_large or left[0].num_prompt_tokens >= (options["max_model_len"] or 10**9)
            left.pop(0)
        if not scheduler.has_unfinished:
            if not left:
                break
            continue
        output = scheduler.schedule()
        scheduler.check()
        event = rng.random()
        if event < 0.02:
            scheduler.recover()
            continue
        if event < 0.05:
            scheduler.abort_request(rng.choice(served).request_id)
        tokens = {each: 9 if rng.random() < 0.02 else 0 for each in output.num_scheduled_tokens}
        scheduler.update_from_output(output, tokens)
        scheduler.check()
    assert not scheduler.has_unfinished
    assert scheduler.pool.num_free == options["num_blocks"]
    for request in served:
        assert request.group_block_ids == [[] for _ in windows]
        if request.status is RequestStatus.FINISHED_CAPACITY:
            assert plain.blocks_to_admit(request) > options["num_blocks"]


@pytest.mark.parametrize("windows", [(None,), (10**6,)])
@settings(max_examples=60)
@given(seed=st.integers(0, 10**9))
def test_one_group_that_sees_everything_is_the_chunked_scheduler(windows, seed):
    """Also one whose window is larger than any request, if the prefix cache keeps all of it."""
    rng = random.Random(seed)
    options = options_of(rng) | {"block_size": 4}
    del options["prefix_cache_retention"]
    requests = [(each.prompt_token_ids, each.max_tokens) for each in some_requests(rng, 8, 30)]
    schedules = []
    for groups in ({"windows": windows, "prefix_cache_retention": None}, {}):
        scheduler = create_scheduler("chunked", **options, **groups)
        steps: list[Any] = []
        for number, (prompt, max_tokens) in enumerate(requests):
            try:
                scheduler.add_request(Request(number, prompt, max_tokens))
            except RequestTooLargeError:
                steps.append(number)
        while scheduler.has_unfinished:
            output = scheduler.schedule()
            steps.append((output.num_scheduled_tokens, output.preempted, output.finished, scheduler.pool.num_free))
            scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
        schedules.append(steps)
    assert schedules[0] == schedules[1]


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9), window=st.integers(1, 30))
@example(seed=3, window=8)
def test_an_admission_takes_no_more_than_it_was_charged(seed, window):
    rng = random.Random(seed)
    charged: dict[Any, int] = {}

    class Watched(GroupedScheduler):
        def admit(self, request, output, found=()):
            free, charge = self.pool.num_free, self.blocks_to_take(request, found)
            super().admit(request, output, found)
            assert free - self.pool.num_free <= charge
            charged[request.request_id] = charge

    options = options_of(rng) | {"num_blocks": 60, "max_model_len": None}
    drive(Watched(windows=(None, window), block_size=4, **options), some_requests(rng, 8, 60))
    assert len(charged) == 8


def test_a_window_keeps_its_memory_however_long_the_request() -> None:
    """And the group without a window keeps everything, in the same pool."""
    held = {}
    for windows in ((None, 32), (32,), (32, 32)):
        scheduler = grouped(*windows, num_blocks=400, block_size=16, max_num_batched_tokens=64)
        scheduler.add_request(Request("r", list(range(2000)), 100))
        most = 0
        while scheduler.has_unfinished:
            output = scheduler.schedule()
            most = max(most, scheduler.pool.num_used)
            scheduler.update_from_output(output, {"r": 0})
        held[windows] = most
    # In decode ⌈2099 / 16⌉ and 3 blocks; in the prompt 64 + 31 tokens.
    assert held == {(None, 32): 132 + 3, (32,): 6, (32, 32): 12}


def test_blocks_leave_when_the_request_is_next_considered() -> None:
    scheduler = grouped(None, 4, num_blocks=8, block_size=4, max_num_batched_tokens=4)
    request = Request("r", [1] * 7, 9)
    scheduler.add_request(request)
    seen = []
    for _ in range(4):
        output = scheduler.schedule()
        seen.append((deepcopy(request.group_block_ids), scheduler.pool.num_free))
        scheduler.update_from_output(output, {"r": 2})
        assert scheduler.pool.num_free == seen[-1][1], "a commit frees nothing"
    assert seen[0] == ([[0], [1]], 6)
    assert seen[1] == ([[0, 2], [1, 3]], 4)  # 4 computed: the next token, at 4, sees 1 … 4
    assert seen[2] == ([[0, 2], [NULL_BLOCK, 3]], 5)  # 7 computed: it sees 4 … 7
    assert seen[3] == ([[0, 2, 1], [NULL_BLOCK, 3, 4]], 3)
    assert request.block_ids == [0, 2, 1]


def computed(scheduler: Scheduler, *prompts: list[int]) -> list[int]:
    """Of prompts that come in turn, the tokens that are computed before each one's first."""
    counts = []
    for number, prompt in enumerate(prompts):
        request = Request(number, prompt, 1)
        drive(scheduler, [request])
        counts.append(request.num_prompt_tokens - request.num_cached_tokens)
    return counts


@pytest.mark.parametrize(("retention", "expected"), [(0, [200, 210, 92, 128, 16]), (None, [200, 82, 92, 16, 16])])
def test_a_junction_is_kept_for_the_next(retention, expected):
    """Prompts with 128 tokens in common. The first leaves a window's blocks only at its own end."""
    scheduler = grouped(None, 32, num_blocks=200, block_size=16, prefix_caching=True, prefix_cache_retention=retention)
    common = list(range(128))
    prompts = [common + [1000 * length + n for n in range(length - 128)] for length in (200, 210, 220)]
    assert computed(scheduler, *prompts, common, common) == expected
    stats = scheduler.stats
    assert (stats.num_requests, stats.num_queried_tokens) == (5, 886)
    assert stats.num_hit_tokens == 886 - sum(expected)


def test_salts_are_apart_and_a_failed_request_leaves_nothing() -> None:
    scheduler = grouped(None, 8, prefix_caching=True, prefix_cache_retention=None)
    prompt = list(range(20))
    for salt, cached in ((None, 0), ("a", 0), (None, 16), ("a", 16)):
        request = Request("r", prompt, 1, cache_salt=salt)
        drive(scheduler, [request])
        assert request.num_cached_tokens == cached
    scheduler.add_request(Request("bad", [*prompt, 99], 5))
    output = scheduler.schedule()
    scheduler.finish_request("bad", RequestStatus.FINISHED_ERROR)
    scheduler.update_from_output(output, {})
    scheduler.check()
    request = Request("next", [*prompt, 99], 1)
    drive(scheduler, [request])
    assert request.num_cached_tokens == 0, "the found blocks were in doubt, too"
    scheduler.reset_prefix_cache()
    assert computed(scheduler, prompt) == [20]


def test_recovery_and_an_interrupt_leave_empty_tables() -> None:
    scheduler = grouped(None, 8, num_blocks=12, prefix_caching=True)
    requests = [Request(number, list(range(17)), 8) for number in range(3)]
    for request in requests:
        scheduler.add_request(request)
    scheduler.schedule()
    requests[0].group_block_ids[1].pop()  # an interrupt anywhere: a block is in no table
    restore(scheduler)
    scheduler.recover()
    scheduler.check()
    assert scheduler.pool.num_used == 0
    assert all(request.group_block_ids == [[], []] for request in requests)
    assert len(drive(scheduler).finished) == 3


def test_refused() -> None:
    for options, saying in (
        ({"windows": (None, 8), "preemption": "swap", "num_host_blocks": 4}, "recompute"),
        ({"windows": (None, 8), "num_speculative_tokens": 2}, "together"),
        ({"windows": ()}, "at least one"),
        ({"windows": (None, 0)}, "at least 1"),
        ({"windows": (None, 8), "prefix_cache_retention": 6}, "multiple"),
        ({"prefix_cache_retention": 8}, "give windows"),
        ({"prefix_cache_retention": None}, "give windows"),
    ):
        with pytest.raises(ValueError, match=saying):
            create_scheduler("chunked", num_blocks=8, block_size=4, **options)
    with pytest.raises(TypeError, match="tuple"):
        create_scheduler("chunked", num_blocks=8, windows=32)  # type: ignore[arg-type]
    for name in ("static", "continuous", "paged", "fair"):
        with pytest.raises(ValueError, match="windows"):
            create_scheduler(name, num_blocks=8, windows=(None, 8))
    with pytest.raises(ValueError, match="no prefix cache"):
        grouped(None, 8).reset_prefix_cache()


def test_a_request_is_never_forked() -> None:
    scheduler = grouped(None, 8)
    scheduler.add_request(Request("r", [1, 2], 5))
    scheduler.update_from_output(scheduler.schedule(), {"r": 1})
    with pytest.raises(ValueError, match="forks no requests"):
        scheduler.fork_request("r", "s")
    assert scheduler.num_running == 1


def test_a_request_that_can_never_fit_is_refused_by_what_it_holds_at_a_time() -> None:
    """100 tokens are 25 blocks of full attention, and never more than 5 of a window of 8."""
    scheduler = grouped(None, 8, num_blocks=30, max_num_batched_tokens=8)
    scheduler.add_request(Request("fits", [1] * 100, 1))
    assert drive(scheduler).finished
    with pytest.raises(RequestTooLargeError, match="31 blocks"):
        scheduler.add_request(Request("large", [1] * 104, 1))
    assert grouped(8, 8, num_blocks=10, max_num_batched_tokens=8).check_size(Request("long", [1] * 9999, 1)) is None


class LosesTokens(BlockGroups):
    def num_outside(self, window: int | None, num_computed_tokens: int) -> int:
        return super().num_outside(window, num_computed_tokens + 4)


class KeepsBlocks(BlockGroups):
    def num_outside(self, window: int | None, num_computed_tokens: int) -> int:
        return super().num_outside(window, max(0, num_computed_tokens - 4))


class ConfusesGroups(BlockGroups):
    def find(self, hashes):
        tables, junction = super().find(hashes)
        return [tables[0], tables[0]], junction


@pytest.mark.parametrize(
    ("broken", "rule"), [(LosesTokens, "windows"), (KeepsBlocks, "windows"), (ConfusesGroups, "found")]
)
def test_what_the_auditor_catches(broken, rule):
    scheduler = grouped(None, 8, prefix_caching=True, prefix_cache_retention=None, max_num_batched_tokens=8)
    scheduler.groups = broken(scheduler.groups.pool, (None, 8), max_step_tokens=8, retention=None)
    requests = [Request(number, list(range(30)), 9) for number in range(3)]
    arrivals = [(10 * number, request) for number, request in enumerate(requests)]
    with pytest.raises(InvariantError, match=rule):
        drive(observe(scheduler, GroupedAuditor()), arrivals=arrivals)


def test_a_table_of_each_group_is_public() -> None:
    request = Request("r", [1, 2], 3)
    assert request.group_block_ids == [[]]
    request.group_block_ids = [[1, 2], [NULL_BLOCK, 3], [4, 5]]
    assert request.block_ids == [1, 2]
    assert request.group_block_ids == [[1, 2], [NULL_BLOCK, 3], [4, 5]]


def test_windows_that_grow_hold_more() -> None:
    """The same load with a larger window: never fewer blocks at a time, in a pool that preempts nothing."""
    most = []
    for window in (1, 4, 9, 16, 40):
        scheduler = grouped(None, window, num_blocks=400, max_num_batched_tokens=16)
        for request in some_requests(random.Random(5), 8, 60):
            scheduler.add_request(request)
        used = 0
        while scheduler.has_unfinished:
            output = scheduler.schedule()
            used = max(used, scheduler.pool.num_used)
            scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
        most.append(used)
    assert all(fewer <= more for fewer, more in pairwise(most))
    assert most[0] < most[-1]
