"""Phase 12, task 9: a request waits for its blocks without holding any, and what comes is only ever a shortcut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from zlib import crc32

import pytest

from minicache.errors import InvariantError
from minicache.request import Request, RequestStatus
from minicache.scheduler import create_scheduler
from minicache.scheduler.fair import STARVATION_BOUND
from minicache.scheduler.tiered import MAX_LOADS, TieredScheduler
from minicache_course import scenario
from minicache_course.checks import CheckFailed, call, that
from minicache_course.follow import following_schedulers
from minicache_course.seeds import fresh, in_use, one_of

BLOCK = 4


class FakeLoad:
    """A load that ends when the test says so."""

    def __init__(self, hashes):
        self.hashes, self.blocks, self.is_done, self.num_given_up = list(hashes), [], False, 0

    def __repr__(self):
        return f"a load of {len(self.hashes)} blocks"


class FakeTiers:
    """Tiers without threads. `stored` has contents by hash, `names` what the test calls a hash."""

    def __init__(self, stored=None):
        self.stored, self.loads = {} if stored is None else stored, []

    def fetch(self, hashes: Sequence[bytes]):
        self.loads.append(FakeLoad(hashes))
        return self.loads[-1]

    def give_up(self, load):
        load.num_given_up += 1

    def touch(self, hashes):
        pass

    def discard(self, hashes):
        for each in hashes:
            self.stored.pop(each, None)

    def finish(self, load, most=1000):
        """A load is done: it has the longest prefix that is stored, or a part of that."""
        for each in load.hashes[:most]:
            if each not in self.stored:
                break
            load.blocks.append(self.stored[each])
        load.is_done = True
        scenario.done(f"a load of {len(load.hashes)} blocks is done, and has brought {len(load.blocks)}")


@pytest.fixture(autouse=True)
def _scenario():
    with following_schedulers():
        yield


@pytest.fixture
def make():
    """`make(stored=None, **options)`: a chunked scheduler with tiers; 100 blocks of 4 by default."""

    def create(stored=None, name="chunked", **options):
        tiers = FakeTiers(stored)
        return create_scheduler(name, tiers=tiers, **{"num_blocks": 100, "block_size": BLOCK} | options), tiers

    return create


def prompt(num_tokens, first=10):
    """Tokens that are all different: two prompts from another first token share no block."""
    return list(range(first, first + num_tokens))


def step(scheduler, tiers):
    """A step: what has to be stored is stored, every request with a new token gets 7. Gives the step."""
    __tracebackhide__ = True
    output = call(scheduler.schedule).value
    for block_id, its_hash in output.blocks_to_store:
        tiers.stored[its_hash] = b"contents of %d" % block_id
    scheduler.update_from_output(output, {each.request_id: 7 for each in output.scheduled})
    check(scheduler)
    return output


def check(scheduler):
    """The books agree."""
    __tracebackhide__ = True
    try:
        scheduler.check()
    except InvariantError as error:
        that("scheduler.check()", f"InvariantError: {error}").gives("no error")


def contents(scheduler, request_prompt, num_blocks, salt=""):
    """hash → contents of the first blocks of a prompt, as tiers have them."""
    hashes = scheduler.hashes(Request("to hash", request_prompt, 1), num_blocks)[:num_blocks]
    return {its_hash: b"block %d%s" % (number, salt.encode()) for number, its_hash in enumerate(hashes)}


def asked(tiers, scheduler, request_prompt):
    """The numbers of the blocks of a prompt that each load was asked for."""
    num_blocks = len(request_prompt) // BLOCK
    numbers = {its_hash: number for number, its_hash in enumerate(contents(scheduler, request_prompt, num_blocks))}
    return [[numbers.get(each, "another") for each in load.hashes] for load in tiers.loads]


# What is asked for


@pytest.mark.parametrize(
    ("num_tokens", "blocks"), [(13, [0, 1, 2]), (16, [0, 1, 2]), (17, [0, 1, 2, 3]), (5, [0]), (12, [0, 1])]
)
def test_what_is_asked_for(make, num_tokens, blocks):
    """All full blocks before the last token, as soon as the request arrives: the last token is always computed."""
    scheduler, tiers = make()
    scheduler.add_request(Request("a", prompt(num_tokens), 5))
    that("the numbers of the blocks that were asked for", asked(tiers, scheduler, prompt(num_tokens))).gives([blocks])
    that("requests that wait for a load", scheduler.num_loading).gives(1)


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_nothing_to_ask_for(make, num_tokens):
    """A prompt of at most one block has nothing that could be found: it is computed at once."""
    scheduler, tiers = make()
    scheduler.add_request(Request("a", prompt(num_tokens), 5))
    that("loads", tiers.loads).gives([])
    that("the first step", dict(step(scheduler, tiers).num_scheduled_tokens)).gives({"a": num_tokens})


def serve(scheduler, tiers, request, most=1000):
    """Serve a request alone, its loads done at once. Gives the tokens of each step."""
    scheduler.add_request(request)
    steps = []
    while scheduler.has_unfinished and len(steps) < 300:
        for load in tiers.loads:
            if not load.is_done:
                tiers.finish(load, most)
        steps.append(step(scheduler, tiers).total_num_scheduled_tokens)
    return steps


def test_only_what_the_prefix_cache_lacks(make):
    """The first three blocks are in the prefix cache: the load begins with number 3."""
    scheduler, tiers = make()
    serve(scheduler, tiers, Request("a", prompt(14), 2))
    tiers.loads.clear()
    scheduler.add_request(Request("b", prompt(23), 2))
    that("the numbers of the blocks that were asked for", asked(tiers, scheduler, prompt(23))).gives([[3, 4]])


def test_nothing_if_all_is_here(make):
    """The prefix cache has all of it: the same prompt again waits for no load."""
    scheduler, tiers = make()
    serve(scheduler, tiers, Request("a", prompt(14), 2))
    tiers.loads.clear()
    scheduler.add_request(Request("b", prompt(14), 2))
    that("loads", tiers.loads).gives([])
    that("the step", dict(step(scheduler, tiers).num_scheduled_tokens)).gives({"b": 2})


def test_once_while_it_waits(make):
    """The load has brought nothing, and there is no batch slot for five steps. The tiers are not asked again."""
    scheduler, tiers = make(max_num_seqs=1)
    scheduler.add_request(Request("first", prompt(3, 500), 6))
    step(scheduler, tiers)
    scheduler.add_request(Request("a", prompt(13), 2))
    tiers.finish(tiers.loads[0])
    work = [dict(step(scheduler, tiers).num_scheduled_tokens) for _ in range(6)]
    that("the steps", work).gives([{"first": 1}] * 5 + [{"a": 13}])
    that("how often the tiers were asked", len(tiers.loads)).gives(1)


def test_again_when_it_was_preempted(make):
    """A request that was preempted and waits again may be asked for again: its blocks may be in the tiers now."""
    scheduler, tiers = make(num_blocks=8)
    old = Request("old", prompt(13), 20)
    for request in (Request("first", prompt(11, 500), 20), old):
        scheduler.add_request(request)
        tiers.finish(tiers.loads[-1])
    while not old.num_preemptions:
        step(scheduler, tiers)
    while old.request_id in scheduler.waiting and len(tiers.loads) < 3:
        step(scheduler, tiers)
    that("how often the tiers were asked, for two requests and one preemption", len(tiers.loads)).gives(3)


def test_not_for_one_that_is_swapped_out(make):
    """Its blocks are in CPU swap space: there is nothing to ask for."""
    scheduler, tiers = make(num_blocks=8, preemption="swap", num_host_blocks=20)
    old = Request("old", prompt(13), 12)
    for request in (Request("first", prompt(11, 500), 12), old):
        scheduler.add_request(request)
        tiers.finish(tiers.loads[-1])
    while scheduler.has_unfinished:
        step(scheduler, tiers)
    that("whether it was preempted", old.num_preemptions > 0).gives(True)
    that("how often the tiers were asked, for two requests", len(tiers.loads)).gives(2)


def test_a_bound_on_loads(make):
    """Blocks that come are in CPU memory, so at most MAX_LOADS requests have a load; the others are computed."""
    scheduler, tiers = make(num_blocks=1000, max_num_seqs=100)
    for number in range(MAX_LOADS + 3):
        scheduler.add_request(Request(number, prompt(6, 100 * number), 2))
    that("how often the tiers were asked", len(tiers.loads)).gives(MAX_LOADS)
    that("what the step computes", list(step(scheduler, tiers).num_scheduled_tokens)).gives([32, 33, 34])


def test_the_next_one_is_asked_for_when_a_load_has_ended(make):
    """Loads that have brought nothing count no longer: of those that came too late, the next is asked for."""
    scheduler, tiers = make(num_blocks=1000, max_num_seqs=1)
    scheduler.add_request(Request("first", prompt(3), 3))
    step(scheduler, tiers)
    for number in range(MAX_LOADS + 1):
        scheduler.add_request(Request(number, prompt(6, 100 * number), 2))
    that("how often the tiers were asked", len(tiers.loads)).gives(MAX_LOADS)
    for load in tiers.loads:
        tiers.finish(load)
    step(scheduler, tiers)
    scheduler.add_request(Request("last", prompt(6, 90_000), 2))
    that("how often, when a request comes after that", len(tiers.loads)).gives(MAX_LOADS + 1)


# It waits


def test_it_holds_no_block_and_others_pass(make):
    """While a waits for its load, b is computed. Then a is, from the tokens that have not come."""
    scheduler, tiers = make()
    scheduler.add_request(a := Request("a", prompt(13), 5))
    tiers.stored |= contents(scheduler, prompt(13), 2)
    scheduler.add_request(Request("b", prompt(2, 500), 5))
    output = step(scheduler, tiers)
    that("the step", dict(output.num_scheduled_tokens)).gives({"b": 2})
    that(
        "blocks of a, used blocks of the pool, waiting",
        (len(a.block_ids), scheduler.pool.num_used, scheduler.num_waiting),
    ).gives((0, 1, 1))
    tiers.finish(tiers.loads[0])
    output = step(scheduler, tiers)
    that("the step after its load is done", dict(output.num_scheduled_tokens)).gives({"b": 1, "a": 5})
    that("requests that wait for a load", scheduler.num_loading).gives(0)
    that("a's tokens that were not computed", a.num_cached_tokens).gives(8)


def test_a_step_without_work(make):
    """All that wait, wait for a load: the step is empty, and nothing is lost."""
    scheduler, tiers = make()
    scheduler.add_request(Request("a", prompt(13), 2))
    for _ in range(3):
        that("the step", dict(step(scheduler, tiers).num_scheduled_tokens)).gives({})
        that(
            "unfinished, waiting, waiting for a load",
            (scheduler.has_unfinished, scheduler.num_waiting, scheduler.num_loading),
        ).gives((True, 1, 1))
    tiers.finish(tiers.loads[0])
    that("the step after its load is done", dict(step(scheduler, tiers).num_scheduled_tokens)).gives({"a": 13})


def test_its_place_in_the_queue(make):
    """One batch slot, and three wait for it: a and c for their loads too. When a's is done, it is before b and c."""
    scheduler, tiers = make(max_num_seqs=1)
    scheduler.add_request(Request("first", prompt(2, 900), 3))
    step(scheduler, tiers)
    scheduler.add_request(Request("a", prompt(13), 1))
    scheduler.add_request(Request("b", prompt(2, 600), 1))
    scheduler.add_request(Request("c", prompt(13, 300), 1))
    step(scheduler, tiers)
    tiers.finish(tiers.loads[0])
    order = []
    for index in range(5):
        if index == 2:
            tiers.finish(tiers.loads[1])
        order += step(scheduler, tiers).num_scheduled_tokens
    that("the order", order).gives(["first", "a", "b", "c"])


def test_the_head(make):
    """`head` passes over those that wait for a load, and asks for one that was not asked for: then that waits too."""
    scheduler, tiers = make(num_blocks=1000, max_num_seqs=100)
    for number in range(MAX_LOADS + 1):
        scheduler.add_request(Request(number, prompt(6, 100 * number), 2))
    call(scheduler.head).gives(scheduler.waiting[MAX_LOADS])  # there was no load left for it
    tiers.finish(tiers.loads[0])
    call(scheduler.end_loads).gives(None)
    call(scheduler.head).gives(scheduler.waiting[0])
    scheduler.abort_request(0)
    scheduler.add_request(short := Request("short", prompt(2, 90_000), 2))
    call(scheduler.head).gives(short)  # the one before it waits now
    scheduler.abort_request("short")
    call(scheduler.head).gives(None)
    that("how often the tiers were asked", len(tiers.loads)).gives(MAX_LOADS + 1)
    that("requests that wait for a load", scheduler.num_loading).gives(MAX_LOADS)


def test_the_bound_on_bypasses(make):
    """64 requests pass one that waits for its load. Then it is next: it is computed, and the load given up."""
    scheduler, tiers = make(num_blocks=400, max_num_seqs=200)
    scheduler.add_request(Request("slow", prompt(13), 2))
    for number in range(STARVATION_BOUND + 5):
        scheduler.add_request(Request(number, [number], 2))
    order = list(step(scheduler, tiers).num_scheduled_tokens)
    that("how many were admitted before it", order.index("slow") if "slow" in order else order).gives(STARVATION_BOUND)
    that("whether the tiers know that its load is given up", tiers.loads[0].num_given_up > 0).gives(True)


def test_what_has_come_is_used_at_the_bound(make):
    """It must not wait any longer, and one block of three has come: it is used."""
    scheduler, tiers = make(num_blocks=400, max_num_seqs=200)
    scheduler.add_request(Request("slow", prompt(13), 2))
    tiers.loads[0].blocks.append(b"block 0")
    for number in range(STARVATION_BOUND):
        scheduler.add_request(Request(number, [number], 2))
    output = step(scheduler, tiers)
    that("its tokens of the step", output.num_scheduled_tokens.get("slow")).gives(9)
    that("the contents to load", [each for _, _, each in output.blocks_to_load]).gives([b"block 0"])


# What comes


@pytest.mark.parametrize("num_here", [0, 1, 2, 3])
def test_what_comes_is_loaded_and_not_computed(make, num_here):
    """Of three blocks the tiers have so many: they are in the step that computes the rest, in order."""
    scheduler, tiers = make()
    scheduler.add_request(a := Request("a", prompt(13), 5))
    tiers.stored |= contents(scheduler, prompt(13), num_here)
    tiers.finish(tiers.loads[0])
    output = step(scheduler, tiers)
    that("the step", dict(output.num_scheduled_tokens)).gives({"a": 13 - BLOCK * num_here})
    hashes = list(contents(scheduler, prompt(13), num_here))
    wanted = [(a.block_ids[number], hashes[number], b"block %d" % number) for number in range(num_here)]
    that("blocks_to_load", list(output.blocks_to_load)).gives(wanted)
    that("a's tokens that were not computed", a.num_cached_tokens).gives(BLOCK * num_here)
    that("blocks_to_load of the next step", list(step(scheduler, tiers).blocks_to_load)).gives([])


def test_others_find_what_was_loaded(make):
    """What was loaded is in the prefix cache: another request with that prefix shares it without a load."""
    scheduler, tiers = make()
    scheduler.add_request(a := Request("a", prompt(13), 9))
    tiers.stored |= contents(scheduler, prompt(13), 3)
    tiers.finish(tiers.loads[0])
    step(scheduler, tiers)
    scheduler.add_request(b := Request("b", prompt(14), 9))
    output = step(scheduler, tiers)
    that("the step", dict(output.num_scheduled_tokens)).gives({"a": 1, "b": 2})
    that("blocks that both have", b.block_ids[:3]).gives(a.block_ids[:3])
    that("how often the tiers were asked", len(tiers.loads)).gives(1)


def test_what_was_loaded_is_not_stored_again(make):
    """Only the blocks that were computed go down to the tiers."""
    scheduler, tiers = make()
    stored = contents(scheduler, prompt(13), 2)
    tiers.stored |= stored
    serve(scheduler, tiers, Request("a", prompt(13), 5))
    that("blocks that were stored", [tiers.stored[each] for each in stored]).gives([b"block 0", b"block 1"])


def test_the_prefix_cache_has_more_by_now(make):
    """While b waits for blocks 0 to 4, a has computed the first three. Only the others are placed, behind a's."""
    scheduler, tiers = make(max_num_seqs=4)
    tiers.stored |= contents(scheduler, prompt(23), 5)
    scheduler.add_request(b := Request("b", prompt(23), 5))
    scheduler.add_request(a := Request("a", prompt(13), 9))
    tiers.finish(tiers.loads[1], most=0)
    step(scheduler, tiers)
    tiers.finish(tiers.loads[0])
    output = step(scheduler, tiers)
    that("the step", dict(output.num_scheduled_tokens)).gives({"a": 1, "b": 3})
    that("the first blocks of b", b.block_ids[:3]).gives(a.block_ids[:3])
    wanted = [(b.block_ids[number], b"block %d" % number) for number in (3, 4)]
    that("blocks_to_load", [(block_id, each) for block_id, _, each in output.blocks_to_load]).gives(wanted)


def test_the_prefix_cache_has_all_by_now(make):
    """While b waits, a has computed the same prompt. Nothing is placed, and the load is given up."""
    scheduler, tiers = make()
    tiers.stored |= contents(scheduler, prompt(14), 3)
    scheduler.add_request(Request("b", prompt(14), 5))
    scheduler.add_request(Request("a", prompt(15), 9))
    tiers.finish(tiers.loads[1], most=0)
    step(scheduler, tiers)
    tiers.finish(tiers.loads[0])
    output = step(scheduler, tiers)
    that("the step", dict(output.num_scheduled_tokens)).gives({"a": 1, "b": 2})
    that("blocks_to_load", list(output.blocks_to_load)).gives([])


@pytest.mark.parametrize("num_here", [3, 5], ids=["as much as has come", "more"])
def test_a_load_that_is_of_no_use_is_dropped(make, num_here):
    """The prefix cache has what the load has brought: `find_prefix` drops the load, though nothing is placed."""
    scheduler, tiers = make()
    tiers.stored |= contents(scheduler, prompt(23), 3)
    scheduler.add_request(b := Request("b", prompt(23), 5))
    scheduler.add_request(a := Request("a", prompt(BLOCK * num_here + 1), 9))
    tiers.finish(tiers.loads[1], most=0)
    step(scheduler, tiers)
    tiers.finish(tiers.loads[0])
    scheduler.end_loads()
    dropped, drop_load = [], scheduler.drop_load
    scheduler.drop_load = lambda request: dropped.append(request) or drop_load(request)
    call(scheduler.find_prefix, b).gives(a.block_ids[:num_here])
    that("what was given to drop_load", dropped).gives([b])


def test_the_prefix_cache_has_less_by_now(make):
    """The load begins with block 3; others have evicted the first blocks. It is of no use: all is computed."""
    scheduler, tiers = make(num_blocks=9, max_num_seqs=2)
    serve(scheduler, tiers, Request("a", prompt(13), 1))
    tiers.loads.clear()
    tiers.stored |= contents(scheduler, prompt(23), 5)
    scheduler.add_request(b := Request("b", prompt(23), 1))
    that("the numbers of the blocks that were asked for", asked(tiers, scheduler, prompt(23))).gives([[3, 4]])
    other = Request("other", prompt(34, 500), 1)
    scheduler.add_request(other)
    tiers.finish(tiers.loads[1])
    step(scheduler, tiers)
    tiers.finish(tiers.loads[0])
    output = step(scheduler, tiers)
    that("the step", dict(output.num_scheduled_tokens)).gives({"b": 23})
    that("blocks_to_load", list(output.blocks_to_load)).gives([])
    that("b's tokens that were not computed", b.num_cached_tokens).gives(0)


def test_blocks_stay_in_cpu_memory_until_it_is_admitted(make):
    """Its blocks have come and the pool is full: nothing is placed, nothing evicted, until it can be admitted."""
    scheduler, tiers = make(num_blocks=6)
    tiers.stored |= contents(scheduler, prompt(13), 3)
    scheduler.add_request(Request("long", prompt(12, 500), 6))
    tiers.finish(tiers.loads[0])
    step(scheduler, tiers)
    scheduler.add_request(a := Request("a", prompt(13), 2))
    tiers.finish(tiers.loads[1])
    while "a" in scheduler.waiting:
        num_used, num_cached = scheduler.pool.num_used, scheduler.pool.num_cached
        output = step(scheduler, tiers)
        if "a" in scheduler.waiting:
            that("blocks_to_load of a step in which it waits", list(output.blocks_to_load)).gives([])
            that("whether the step has taken more than a block", scheduler.pool.num_used > num_used + 1).gives(False)
            that("whether cached blocks were evicted", scheduler.pool.num_cached < num_cached).gives(False)
    that("its tokens of the step that admits it", output.num_scheduled_tokens.get("a")).gives(1)
    that("the contents to load", [each for _, _, each in output.blocks_to_load]).gives(
        [b"block 0", b"block 1", b"block 2"]
    )
    that("a's tokens that were not computed", a.num_cached_tokens).gives(12)


# The end


@pytest.mark.parametrize("has_come", [False, True], ids=["under way", "done"])
def test_it_is_aborted(make, has_come):
    """The client leaves: the load is given up, and counts no longer."""
    scheduler, tiers = make(max_num_seqs=1)
    tiers.stored |= contents(scheduler, prompt(13), 3)
    scheduler.add_request(Request("first", prompt(2, 900), 9))
    step(scheduler, tiers)
    scheduler.add_request(Request("a", prompt(13), 2))
    if has_come:
        tiers.finish(tiers.loads[0])
        step(scheduler, tiers)
    scheduler.abort_request("a")
    check(scheduler)
    that("whether the tiers know that its load is given up", tiers.loads[0].num_given_up > 0).gives(True)
    that("waiting, waiting for a load", (scheduler.num_waiting, scheduler.num_loading)).gives((0, 0))
    for number in range(MAX_LOADS):
        scheduler.add_request(Request(number, prompt(6, 100 * number), 2))
    that("how often the tiers were asked, with 32 more requests", len(tiers.loads)).gives(1 + MAX_LOADS)


def test_another_request_with_its_id(make):
    """A request's id is used again while the first is still known to someone: only its own load is given up."""
    scheduler, tiers = make()
    first, second = Request("a", prompt(13), 2), Request("a", prompt(13, 300), 2)
    scheduler.add_request(first)
    scheduler.abort_request("a")
    scheduler.add_request(second)
    call(scheduler.drop_load, first).gives(None)
    check(scheduler)
    that("whether the second's load is given up", tiers.loads[1].num_given_up > 0).gives(False)
    that("requests that wait for a load", scheduler.num_loading).gives(1)


def test_a_load_is_given_up_when_it_is_over(make):
    """Done or not, used or not: the tiers hear of it when no request waits for it any more."""
    scheduler, tiers = make()
    tiers.stored |= contents(scheduler, prompt(13), 3)
    for number, first in enumerate((10, 300, 600)):
        scheduler.add_request(Request(number, prompt(13, first), 2))
    for load in tiers.loads[:2]:
        tiers.finish(load)
    step(scheduler, tiers)
    that("whether they have heard, of each", [load.num_given_up > 0 for load in tiers.loads]).gives([True, True, False])


def test_drop_load_without_a_load(make):
    """Nothing happens."""
    scheduler, tiers = make()
    scheduler.add_request(a := Request("a", prompt(3), 2))
    call(scheduler.drop_load, a).gives(None)
    call(scheduler.drop_load, Request("b", prompt(3), 2)).gives(None)
    that("the step", dict(step(scheduler, tiers).num_scheduled_tokens)).gives({"a": 3})


# Everything at once


def next_token(tokens):
    """What the model generates after these."""
    return crc32(bytes(tokens)) % 6


class Machine:
    """A server on slots instead of tensors: a slot holds all tokens up to its own, so a wrong block shows."""

    def __init__(self, rng, scheduler, tiers):
        self.rng, self.scheduler, self.tiers = rng, scheduler, tiers
        self.slots = [None] * (scheduler.pool.num_blocks * BLOCK)
        self.host = [None] * (6 * BLOCK)
        self.requests, self.num_loaded, self.num_steps = [], 0, 0

    def run(self, num_requests):
        __tracebackhide__ = True
        for _ in range(2000):
            self.disturb(num_requests)
            if len(self.requests) == num_requests and not self.scheduler.has_unfinished:
                return
            output = call(self.scheduler.schedule).value
            self.num_steps += 1
            if self.rng.random() < 0.02:
                continue  # the step fails, and its tokens never come
            self.scheduler.update_from_output(output, self.carry_out(output))
        left = [*self.scheduler.running, *self.scheduler.waiting.values()]
        raise CheckFailed("requests served", f"{left} are unfinished after 2000 steps", "all")

    def disturb(self, num_requests):
        """Clients come and go; loads end, bring too little, or something has gone from the tiers."""
        rng, scheduler = self.rng, self.scheduler
        if len(self.requests) < num_requests and rng.random() < 0.4:
            tokens = [rng.randrange(6)] * rng.randrange(4, 21) + [rng.randrange(6)] * rng.randrange(1, 6)
            request = Request(len(self.requests), tokens, rng.randrange(1, 12), priority=rng.randrange(2))
            self.requests.append(request)
            scheduler.add_request(request)
        for load in self.tiers.loads:
            if not load.is_done and rng.random() < 0.3:
                self.tiers.finish(load, rng.choice([0, 1, 1000, 1000]))
        if rng.random() < 0.05 and self.tiers.stored:
            del self.tiers.stored[rng.choice(list(self.tiers.stored))]
        if rng.random() < 0.04 and scheduler.waiting:
            scheduler.abort_request(rng.choice(list(scheduler.waiting)))
        check(scheduler)

    def carry_out(self, output):
        """Store, swap, load, and run the model: the tokens of the requests that get one."""
        __tracebackhide__ = True
        for block_id, its_hash in output.blocks_to_store:
            self.tiers.stored[its_hash] = self.slots[_slots(block_id)]
        for pairs in output.swapped_out.values():
            for block_id, host_id in pairs:
                self.host[_slots(host_id)] = self.slots[_slots(block_id)]
        for pairs in output.swapped_in.values():
            for host_id, block_id in pairs:
                self.slots[_slots(block_id)] = self.host[_slots(host_id)]
        for block_id, _, loaded in output.blocks_to_load:
            self.slots[_slots(block_id)] = loaded
            self.num_loaded += 1
        tokens = {}
        for request in output.scheduled:
            start, num_new = request.num_computed_tokens, output.num_scheduled_tokens[request.request_id]
            known = tuple(request.token_ids(0, start + num_new))
            for position in range(start + num_new):
                slot = request.block_ids[position // BLOCK] * BLOCK + position % BLOCK
                if position >= start:
                    self.slots[slot] = known[: position + 1]
                elif self.slots[slot] != known[: position + 1]:
                    held = self.slots[slot]
                    story = f"what position {position} of {request!r} holds, in block {slot // BLOCK}"
                    that(story, f"of the tokens {held}").gives(f"of the tokens {known[: position + 1]}")
            if start + num_new >= request.num_tokens:
                tokens[request.request_id] = next_token(known)
        return tokens


def _slots(block_id):
    return slice(block_id * BLOCK, (block_id + 1) * BLOCK)


@pytest.mark.parametrize("name", ["paged", "chunked"])
@pytest.mark.parametrize("seed", range(4))
def test_answers_do_not_depend_on_the_tiers(make, name, seed):
    """Random requests, loads that fail, blocks that are gone, aborts, failed steps: every block holds what it must."""
    rng = random.Random(fresh(seed))
    swaps = rng.random() < 0.5
    scheduler, tiers = make(
        name=name,
        num_blocks=rng.choice([10, 12, 20]),
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=40 if name == "paged" else rng.choice([8, 16, 64]),
        tier_policy=rng.choice(["write_through", "write_back"]),
        **({"preemption": "swap", "num_host_blocks": 6} if swaps else {}),
    )
    that("whether it is a TieredScheduler", isinstance(scheduler, TieredScheduler)).gives(True)
    machine = Machine(rng, scheduler, tiers)
    machine.run(one_of(80, range(70, 90)))
    if in_use() is None:  # other draws may load less
        that(f"whether any of the {machine.num_steps} steps has loaded", machine.num_loaded > 0).gives(True)
    for request in machine.requests:
        if request.status is not RequestStatus.FINISHED_ABORTED:
            tokens = list(request.prompt_token_ids)
            while len(tokens) < request.num_tokens:
                tokens.append(next_token(tokens))
            that(f"the answer of {request!r}", request.output_token_ids).gives(tokens[request.num_prompt_tokens :])
    that("used blocks", scheduler.pool.num_used).gives(0)
    over = [load.is_done or load.num_given_up > 0 for load in tiers.loads]
    that("loads that no one waits for, and of which the tiers have not heard", over.count(False)).gives(0)
