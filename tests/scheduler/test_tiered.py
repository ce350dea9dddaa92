"""Tiers below the prefix cache: a request waits for its load, and no load ever changes an answer.

As in test_lost_steps, a model of every slot holds what was written there: all tokens up to the one that the entry
belongs to. Tiers hold such contents by hash, lose them, answer late or not at all, and steps fail. Each token is
computed from what its blocks hold, so a block with other contents shows.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from zlib import crc32

import pytest

from minicache.errors import InvariantError
from minicache.request import Request, RequestStatus
from minicache.scheduler import SCHEDULERS, SchedulerOutput, create_scheduler
from minicache.scheduler.audit_async import AsyncAuditor
from minicache.scheduler.audit_priority import PriorityAuditor
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.fair import STARVATION_BOUND
from minicache.scheduler.observe import observe
from minicache.scheduler.tiered import LoadingQueue, TieredBlockPool, TieredScheduler

BLOCK = 4


@dataclass
class FakeLoad:
    """A load that ends when the test says so."""

    hashes: list[bytes]
    blocks: list[bytes] = field(default_factory=list)
    is_done: bool = False
    is_given_up: bool = False


class FakeTiers:
    """Tiers without threads: `finish` ends the loads, with what is there."""

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}
        self.loads: list[FakeLoad] = []
        self.touched: list[bytes] = []

    def fetch(self, hashes: Sequence[bytes]) -> FakeLoad:
        self.loads.append(FakeLoad(list(hashes)))
        return self.loads[-1]

    def give_up(self, load: FakeLoad) -> None:
        load.is_given_up = True

    def touch(self, hashes: Sequence[bytes]) -> None:
        self.touched += hashes

    def discard(self, hashes: Sequence[bytes]) -> None:
        for each in hashes:
            self.stored.pop(each, None)

    def finish(self, load: FakeLoad, most: int = 1000) -> None:
        for each in load.hashes[:most]:
            if each not in self.stored:
                break
            load.blocks.append(self.stored[each])
        load.is_done = True


def make(name: str = "chunked", **options: Any) -> tuple[TieredScheduler, FakeTiers]:
    tiers = FakeTiers()
    options = {"num_blocks": 16, "block_size": BLOCK} | options
    return cast(TieredScheduler, create_scheduler(name, tiers=tiers, **options)), tiers


def run(scheduler: TieredScheduler, tiers: FakeTiers, token: int = 7) -> SchedulerOutput:
    """A step whose contents do not matter."""
    output = scheduler.schedule()
    for block_id, its_hash in output.blocks_to_store:
        tiers.stored[its_hash] = b"%d" % block_id
    scheduler.update_from_output(output, {each.request_id: token for each in output.scheduled})
    scheduler.check()
    return output


def serve(scheduler: TieredScheduler, tiers: FakeTiers, request: Request) -> list[int]:
    """Serve a request alone, with all loads done at once: the tokens that each step computed."""
    scheduler.add_request(request)
    counts = []
    while scheduler.has_unfinished:
        for load in tiers.loads:
            if not load.is_done:
                tiers.finish(load)
        counts.append(run(scheduler, tiers).total_num_scheduled_tokens)
    for block_id, its_hash in scheduler.take_filled():
        tiers.stored[its_hash] = b"%d" % block_id
    return counts


PROMPT = list(range(10, 23))  # three full blocks, and a token


def test_full_blocks_are_stored_by_the_step_after_they_were_computed() -> None:
    scheduler, tiers = make()
    tiers.fetch = lambda hashes: FakeLoad(list(hashes), is_done=True)  # type: ignore[method-assign]
    scheduler.add_request(Request("a", PROMPT, 5))
    first = run(scheduler, tiers)
    request = first.scheduled[0]
    assert list(first.blocks_to_store) == []
    hashes = scheduler.hashes(request, 3)
    assert list(run(scheduler, tiers).blocks_to_store) == list(zip(request.block_ids, hashes, strict=False))[:3]
    assert list(run(scheduler, tiers).blocks_to_store) == []


def test_another_scheduler_loads_what_one_has_stored() -> None:
    scheduler, tiers = make()
    assert serve(scheduler, tiers, Request("a", PROMPT, 5)) == [13, 1, 1, 1, 1]
    assert len(tiers.stored) == 4
    again, _ = make()
    again.tiers = tiers
    request = Request("b", PROMPT, 5)
    assert serve(again, tiers, request) == [1, 1, 1, 1, 1]
    assert request.num_cached_tokens == 12


def test_a_waiting_request_holds_no_block_and_others_pass_it() -> None:
    scheduler, tiers = make()
    scheduler.add_request(Request("a", PROMPT, 5))
    scheduler.add_request(Request("b", [1, 2], 5))
    output = run(scheduler, tiers)
    assert list(output.num_scheduled_tokens) == ["b"]
    assert (scheduler.num_waiting, scheduler.num_loading, scheduler.pool.num_used) == (1, 1, 1)
    tiers.finish(tiers.loads[0])
    assert list(run(scheduler, tiers).num_scheduled_tokens) == ["b", "a"]
    assert scheduler.num_loading == 0


def test_a_load_without_blocks_is_computed_and_not_asked_for_again() -> None:
    scheduler, tiers = make()
    assert serve(scheduler, tiers, Request("a", PROMPT, 2)) == [13, 1]
    assert len(tiers.loads) == 1


def test_a_partial_load_is_used() -> None:
    scheduler, tiers = make()
    serve(scheduler, tiers, Request("a", PROMPT, 2))
    again, _ = make()
    again.tiers = tiers
    request = Request("b", PROMPT, 2)
    again.add_request(request)
    tiers.finish(tiers.loads[-1], most=2)
    assert run(again, tiers).num_scheduled_tokens == {"b": 5}


def test_what_the_prefix_cache_has_is_not_asked_for() -> None:
    scheduler, tiers = make()
    serve(scheduler, tiers, Request("a", PROMPT, 2))
    scheduler.add_request(Request("b", PROMPT, 2))
    assert len(tiers.loads) == 1
    scheduler.add_request(Request("c", [*PROMPT[:12], *range(50, 60)], 2))
    assert len(tiers.loads[-1].hashes) == 2  # of the five blocks, three are cached, and the last is not full


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_request_that_ends_gives_its_load_up(status: RequestStatus) -> None:
    scheduler, tiers = make()
    scheduler.add_request(Request("a", PROMPT, 2))
    assert scheduler.finish_request("a", status)
    assert tiers.loads[0].is_given_up
    assert (scheduler.num_loading, scheduler.pool.num_used, scheduler.has_unfinished) == (0, 0, False)
    scheduler.check()
    scheduler.add_request(Request("a", PROMPT, 2))
    assert len(tiers.loads) == 2


def test_blocks_stay_in_cpu_memory_while_the_request_does_not_fit() -> None:
    scheduler, tiers = make(num_blocks=6)
    serve(scheduler, tiers, Request("a", PROMPT, 2))
    scheduler, _ = make(num_blocks=6)
    scheduler.tiers = tiers
    scheduler.add_request(Request("long", list(range(50, 62)), 6))
    tiers.finish(tiers.loads[-1])
    run(scheduler, tiers)
    scheduler.add_request(Request("b", PROMPT, 2))
    tiers.finish(tiers.loads[-1])
    num_used = scheduler.pool.num_used
    assert list(run(scheduler, tiers).num_scheduled_tokens) == ["long"]
    assert scheduler.pool.num_used <= num_used + 1
    while "b" in scheduler.waiting:
        output = run(scheduler, tiers)
    assert output.num_scheduled_tokens["b"] == 1
    assert len(output.blocks_to_load) == 3


def test_the_bound_on_bypasses_ends_the_wait() -> None:
    scheduler, tiers = make(num_blocks=400, max_num_seqs=200)
    scheduler.add_request(Request("slow", PROMPT, 2))
    for number in range(STARVATION_BOUND + 5):
        scheduler.add_request(Request(number, [number], 2))
    order = list(run(scheduler, tiers).num_scheduled_tokens)
    assert order.index("slow") == STARVATION_BOUND
    assert tiers.loads[0].is_given_up
    assert scheduler.num_loading == 0


def test_a_write_back_stores_what_is_evicted() -> None:
    scheduler, tiers = make(num_blocks=5, tier_policy="write_back")
    serve(scheduler, tiers, Request("a", PROMPT, 2))
    assert not tiers.stored
    serve(scheduler, tiers, Request("b", list(range(50, 63)), 2))
    assert len(tiers.stored) == 2  # of five blocks one was never cached, and b takes four
    serve(scheduler, tiers, Request("c", PROMPT, 2))
    assert scheduler.stats.num_hit_tokens == 12  # the beginning of the prefix was still here, its end comes back


def test_blocks_in_doubt_are_discarded() -> None:
    scheduler, tiers = make(max_num_batched_tokens=8)
    scheduler.add_request(Request("a", PROMPT, 2))
    tiers.finish(tiers.loads[0])
    run(scheduler, tiers)
    run(scheduler, tiers)
    assert len(tiers.stored) == 2  # of the first chunk
    scheduler.finish_request("a", RequestStatus.FINISHED_ERROR)
    run(scheduler, tiers)
    assert not tiers.stored


def test_the_blocks_of_a_finished_request_count_as_used() -> None:
    scheduler, tiers = make()
    request = Request("a", PROMPT, 2)
    serve(scheduler, tiers, request)
    assert tiers.touched == request.block_hashes != []


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="policy of tiers is one of write_through, write_back"):
        make(tier_policy="never")
    with pytest.raises(ValueError, match="shares no blocks"):
        make("continuous")
    with pytest.raises(ValueError, match="leave out windows"):
        make(windows=(None, 8))
    with pytest.raises(ValueError, match="make a new engine"):
        make()[0].reset_prefix_cache()


def test_the_pool_restores_what_it_could_not_place() -> None:
    pool = TieredBlockPool(4, BLOCK)
    pool.cache(held := pool.allocate(2), [b"a", b"b"])
    pool.free(held[1:])
    with pytest.raises(Exception, match="block"):
        pool.place(held, [b"c", b"d", b"e"])
    assert (pool.num_free, pool.find([b"a", b"b"])) == (3, held)
    placed = pool.place(held, [b"c", b"d"])
    assert pool.find([b"a", b"b", b"c", b"d"]) == held + placed
    assert pool.num_free == 3
    pool.check()


def test_the_pool_notes_a_full_block_that_is_evicted_before_it_is_stored() -> None:
    pool = TieredBlockPool(1, BLOCK)
    pool.cache(pool.allocate(1), [b"a"])
    assert pool.filled == {0: b"a"}
    pool.free([0])
    pool.allocate(1)
    assert (pool.filled, pool.evicted) == ({}, [(0, b"a", True)])


def test_a_queue_passes_over_those_that_load() -> None:
    queue = LoadingQueue(lambda request: (request.arrival_index,))
    first, second = requests = [Request(name, [1], 1, group=name) for name in "ab"]
    for index, each in enumerate(requests):
        each.arrival_index = index
        queue.add(each)
    queue.hold(first)
    assert (queue.first(), queue.first("a"), queue.oldest(), list(queue), len(queue)) == (
        *(second, None, first),
        *(["a", "b"], 2),
    )
    assert queue["a"] is first
    queue.let_go(first)
    assert queue.first() is first
    queue.hold(second)
    queue.remove(second)
    with pytest.raises(KeyError):
        queue.remove(second)
    assert list(queue) == ["a"]


# The auditor


def audited(output_of: Callable[[SchedulerOutput], object] = lambda output: None) -> tuple[TieredScheduler, FakeTiers]:
    """A scheduler that an auditor watches, whose steps are changed before the auditor sees them."""
    scheduler, tiers = make()
    schedule = scheduler.schedule

    def changed() -> SchedulerOutput:
        output = schedule()
        output_of(output)
        return output

    scheduler.schedule = changed  # type: ignore[method-assign]
    return cast(TieredScheduler, observe(scheduler, SharingAuditor())), tiers


def test_the_auditor_takes_loaded_blocks_for_computed_ones() -> None:
    scheduler, tiers = audited()
    serve(scheduler, tiers, Request("a", PROMPT, 5))
    again, its_tiers = audited()
    its_tiers.stored = tiers.stored
    request = Request("b", PROMPT, 5)
    assert serve(again, its_tiers, request) == [1, 1, 1, 1, 1]
    assert request.num_cached_tokens == 12
    serve(again, its_tiers, Request("c", PROMPT, 5))  # which finds them in the prefix cache


def test_the_auditor_finds_a_block_that_holds_other_tokens() -> None:
    scheduler, tiers = audited()
    serve(scheduler, tiers, Request("a", PROMPT, 5))

    def mix_up(output: SchedulerOutput) -> None:
        output.blocks_to_load = [(block_id, b"another", each) for block_id, _, each in output.blocks_to_load]

    again, its_tiers = audited(mix_up)
    its_tiers.stored = tiers.stored
    with pytest.raises(InvariantError, match=r"found: block \d+ does not hold"):
        serve(again, its_tiers, Request("b", PROMPT, 5))


@pytest.mark.parametrize("wrong", [(0, b"another"), (15, b"never computed")])
def test_the_auditor_finds_a_block_that_is_stored_wrongly(wrong: tuple[int, bytes]) -> None:
    def mix_up(output: SchedulerOutput) -> None:
        output.blocks_to_store = [wrong] if output.blocks_to_store else []

    scheduler, tiers = audited(mix_up)
    with pytest.raises(InvariantError, match=rf"tiers: block {wrong[0]} is stored"):
        serve(scheduler, tiers, Request("a", PROMPT, 5))


def test_the_auditor_finds_a_request_that_is_forgotten_while_another_loads() -> None:
    scheduler, _ = audited()
    scheduler.add_request(Request("loads", PROMPT, 5))
    run(scheduler, FakeTiers())
    scheduler.add_request(Request("short", [1], 5))
    scheduler.scheduler.head = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(InvariantError, match="work: no progress"):
        scheduler.schedule()


# Everything at once

STAGES = ("paged", "chunked", "async")


def next_token(tokens: Sequence[int]) -> int:
    """What the model generates after these."""
    return crc32(bytes(tokens)) % 6


def answer(request: Request) -> list[int]:
    """What a request gets without any of this."""
    tokens = list(request.prompt_token_ids)
    while len(tokens) < request.num_prompt_tokens + request.max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[request.num_prompt_tokens :]


class Machine:
    """A server on slots instead of tensors, in which anything may happen."""

    def __init__(self, name: str, seed: int) -> None:
        self.choose = choose = random.Random(f"{name} {seed}")
        policy = choose.choice(["fair", "priority"]) if name == "chunked" else "fair"
        scheduler, self.tiers = make(
            name,
            num_blocks=choose.choice([10, 14, 30]),
            max_num_seqs=choose.choice([2, 4, 8]),
            max_num_batched_tokens=40 if name == "paged" else choose.choice([8, 16, 64]),
            tier_policy=choose.choice(["write_through", "write_back"]),
            preemption=choose.choice(["recompute", "swap"]),
            num_host_blocks=6,
            watermark=choose.choice([0.0, 0.1]),
            policy=policy,
        )
        auditor = {"async": AsyncAuditor, "priority": PriorityAuditor}.get(
            name if name == "async" else policy, SharingAuditor
        )
        self.scheduler = cast(TieredScheduler, observe(scheduler, auditor()))
        self.slots: list[Any] = [None] * (self.scheduler.pool.num_blocks * BLOCK)
        self.host: list[Any] = [None] * (6 * BLOCK)
        self.requests: list[Request] = []
        self.num_loaded = 0

    def block(self, block_id: int) -> slice:
        return slice(block_id * BLOCK, (block_id + 1) * BLOCK)

    def may_fail(self) -> None:
        if self.choose.random() < 0.02:
            raise ConnectionError

    def carry_out(self, output: SchedulerOutput) -> dict[Any, int]:
        """Move blocks and run the model: the tokens of the requests that get one."""
        for block_id, its_hash in output.blocks_to_store:
            self.may_fail()
            if self.choose.random() < 0.9:  # else the tier is full, or gone
                self.tiers.stored[its_hash] = pickle.dumps(self.slots[self.block(block_id)])
        for pairs in output.swapped_out.values():
            for block_id, host_id in pairs:
                self.host[self.block(host_id)] = self.slots[self.block(block_id)]
        for pairs in output.swapped_in.values():
            for host_id, block_id in pairs:
                self.slots[self.block(block_id)] = self.host[self.block(host_id)]
        for source, target in output.blocks_to_copy:
            self.slots[self.block(target)] = self.slots[self.block(source)]
        for block_id, _, contents in output.blocks_to_load:
            self.may_fail()
            self.slots[self.block(block_id)] = pickle.loads(contents)
            self.num_loaded += 1
        tokens = {}
        for request, end in self.planned.pop(id(output)):
            known = request.token_ids(0, min(end, request.num_tokens))
            if len(known) < end:
                continue  # it has finished meanwhile, and its token is dropped
            table = self.tables.pop((id(output), request))
            for position in range(end):
                slot = table[position // BLOCK] * BLOCK + position % BLOCK
                if position >= end - output.num_scheduled_tokens[request.request_id]:
                    self.may_fail()
                    self.slots[slot] = tuple(known[: position + 1])
                else:
                    assert self.slots[slot] == tuple(known[: position + 1]), f"{request!r} reads what it has not"
            if end >= request.num_tokens:
                tokens[request.request_id] = next_token(known)
        return tokens

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.planned[id(output)] = []
        for request in output.scheduled:
            end = request.num_computed_tokens + output.num_scheduled_tokens[request.request_id]
            self.planned[id(output)].append((request, end))
            self.tables[id(output), request] = list(request.block_ids)
        return output

    def disturb(self) -> None:
        """Clients come and go; loads end, lose records, or bring too little."""
        choose, scheduler = self.choose, self.scheduler
        if len(self.requests) < 40 and choose.random() < 0.4:
            prompt = [[choose.randrange(2)] * choose.randrange(1, 16), [choose.randrange(6)] * choose.randrange(8)]
            prompt_ids = [token for part in prompt for token in part]
            self.requests.append(
                Request(
                    len(self.requests),
                    prompt_ids,
                    choose.randrange(1, 12),
                    stop_token_ids=(4,),
                    priority=choose.randrange(2),
                    cache_salt=choose.choice([None, "salt"]),
                )
            )
            scheduler.add_request(self.requests[-1])
        for load in self.tiers.loads:
            if not load.is_done and choose.random() < 0.3:
                self.tiers.finish(load, choose.choice([0, 1, 1000, 1000]))
        if choose.random() < 0.05 and self.tiers.stored:
            del self.tiers.stored[choose.choice(list(self.tiers.stored))]
        if choose.random() < 0.03 and scheduler.waiting:
            scheduler.abort_request(choose.choice(list(scheduler.waiting)))
        if choose.random() < 0.02 and scheduler.running:
            scheduler.abort_request(choose.choice(scheduler.running).request_id)
        scheduler.check()

    def run(self) -> None:
        self.planned: dict[int, list[tuple[Request, int]]] = {}
        self.tables: dict[tuple[int, Request], list[int]] = {}
        scheduler, before = self.scheduler, None
        for _ in range(3000):
            self.disturb()
            if len(self.requests) == 40 and not scheduler.has_unfinished:
                break
            try:
                overlaps = scheduler.overlaps and self.choose.random() < 0.8
                ahead = self.schedule() if before is None or overlaps else None
                oldest = before if before is not None else ahead
                assert oldest is not None
                if before is None and overlaps:
                    before = oldest
                    continue
                scheduler.update_from_output(oldest, self.carry_out(oldest))
                before = ahead if oldest is before else None
            except ConnectionError:
                if scheduler.overlaps or self.choose.random() < 0.5:
                    scheduler.recover()  # else the next schedule() does
                before = None
        else:
            pytest.fail(f"unfinished: {scheduler.running} {dict(scheduler.waiting)}")
        for request in self.requests:
            if request.status is not RequestStatus.FINISHED_ABORTED:
                assert request.output_token_ids == answer(request)
        assert scheduler.pool.num_used == 0
        assert not scheduler.num_loading
        assert all(load.is_done or load.is_given_up for load in self.tiers.loads)


@pytest.mark.parametrize("name", STAGES)
def test_answers_do_not_depend_on_the_tiers(name: str) -> None:
    assert name in SCHEDULERS
    num_loaded = 0
    for seed in range(6):
        machine = Machine(name, seed)
        machine.run()
        num_loaded += machine.num_loaded
    assert num_loaded > 20
