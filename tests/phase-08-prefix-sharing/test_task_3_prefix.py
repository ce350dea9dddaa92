"""Phase 8, task 3: a prefix that cached blocks hold is not computed again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from minicache.memory.prefix import block_hash, root_hash
from minicache.request import Request, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.prefix_caching import PrefixCachingScheduler
from minicache_course.checks import call, that
from minicache_course.seeds import fresh

# What is found


def test_of_exactly_three_blocks_two_are_found(caching, serve, a_request):
    """48 tokens in blocks of 16, sent again: 32 are found, as one must be computed. With one token more: all 48."""
    scheduler = caching(num_blocks=20, block_size=16)
    prompt = list(range(48))
    that("computed for the first", serve(scheduler, a_request("a", prompt, 2))).gives({"a": 48})
    again, longer = a_request("b", prompt, 1), a_request("c", [*prompt, 99], 1)
    that("computed for the same again", serve(scheduler, again)).gives({"b": 16})
    that("computed for one token more", serve(scheduler, longer)).gives({"c": 1})
    that("num_cached_tokens of both", (again.num_cached_tokens, longer.num_cached_tokens)).gives((32, 48))


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_a_token_is_always_left_to_compute(caching, serve, a_request, num_tokens):
    """A prompt of any length that is sent again computes at least one token, and at most one block of tokens."""
    scheduler = caching()
    serve(scheduler, a_request("a", num_tokens, 1))
    request = a_request("b", num_tokens, 1)
    blocks = call(scheduler.find_prefix, request).value
    that("blocks of 4 that are found", len(blocks)).gives({0: 0, 1: 1, 2: 2, 3: 3}[(num_tokens - 1) // 4])
    that("computed", serve(scheduler, request)).gives({"b": num_tokens - 4 * len(blocks)})


def test_a_token_is_left_though_all_hashes_are_known(caching, serve, a_request):
    """The last block's hash is known already, so `hashes` returns more than num_blocks: the caller slices."""
    scheduler = caching()
    serve(scheduler, a_request("a", 8, 1))
    request = a_request("b", 8, 1)
    scheduler.hashes(request, 2)
    that("blocks of 4 that are found of 8 tokens, with both hashes known", len(scheduler.find_prefix(request))).gives(1)


def test_blocks_are_found_up_to_the_first_difference(caching, serve, a_request):
    """Three blocks are cached. A prompt that differs in the second finds one, whatever follows."""
    scheduler = caching()
    serve(scheduler, a_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 1))
    call(scheduler.find_prefix, a_request("b", [*range(1, 13), 13])).gives([0, 1, 2])
    call(scheduler.find_prefix, a_request("c", [1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13])).gives([0])
    call(scheduler.find_prefix, a_request("d", [0, 2, 3, 4, 5, 6, 7, 8, 9])).gives([])
    call(scheduler.find_prefix, a_request("e", [5, 6, 7, 8, 9, 10, 11, 12, 13])).gives([])


def test_asking_changes_nothing(caching, serve, a_request):
    """find_prefix adds no reference; the request does not hold the found blocks yet."""
    scheduler = caching()
    serve(scheduler, a_request("a", 9, 1))
    request = a_request("b", 9)
    before = scheduler.pool.num_free, scheduler.pool.ref_count(0)
    call(scheduler.find_prefix, request).gives([0, 1])
    that("free blocks, references of block 0", (scheduler.pool.num_free, scheduler.pool.ref_count(0))).gives(before)
    seen = request.block_ids, request.num_computed_tokens, request.num_cached_tokens
    that("the request's blocks, computed and cached tokens", seen).gives(([], 0, 0))
    that("requests in the stats", scheduler.stats.num_requests).gives(1)


def test_find_prefix_answers_for_a_request_of_any_status(caching, a_request, a_step):
    """A request in the batch finds its own blocks; so does one that has finished."""
    request = a_request("a", 9)
    scheduler = caching([request])
    a_step(scheduler)
    that("its status", request.status.name).gives("RUNNING")
    call(scheduler.find_prefix, request).gives([0, 1])
    scheduler.abort_request("a")
    call(scheduler.find_prefix, request).gives([0, 1])


def test_find_prefix_caches_what_is_noted_first(caching, a_request, a_step):
    """Blocks that decode has filled are noted, not cached: find_prefix calls cache_filled before the look-up."""
    scheduler = caching([a_request("a", 6, 9)])
    for _ in range(3):
        a_step(scheduler)  # 6 tokens of prompt, and two that were generated: the second block is full
    found = call(scheduler.find_prefix, a_request("b", [*[1] * 6, 7, 7, 0])).value
    that("blocks found while a, which filled them, still runs", found).gives([0, 1])


def test_find_prefix_caches_what_is_noted_each_time(caching, a_request, a_step):
    """A request whose hashes are known from an earlier look-up finds blocks that were filled since."""
    scheduler = caching([a_request("a", 4, 9)])
    a_step(scheduler)
    request = a_request("b", [*[1] * 4, 7, 7, 7, 7, 0])
    that("blocks found while a has filled one", call(scheduler.find_prefix, request).value).gives([0])
    for _ in range(4):
        a_step(scheduler)
    that("blocks found when a has filled two", call(scheduler.find_prefix, request).value).gives([0, 1])


def test_release_caches_what_is_noted_first(caching, serve, a_request):
    """A request that finishes releases its blocks. Its filled blocks are cached first: release calls cache_filled."""
    scheduler = caching()
    serve(scheduler, a_request("a", 6, 7))  # 12 tokens are computed: three full blocks, two of them by decode
    that("cached blocks when a has finished, before any look", scheduler.pool.num_cached).gives(3)


def test_answers_are_found_too(caching, serve, a_request):
    """The second turn of a chat is the first prompt, its answer, and new words: 12 of its 15 tokens are cached."""
    scheduler = caching()
    first = a_request("a", 6, 7)
    serve(scheduler, first)
    second = a_request("b", [*first.prompt_token_ids, *first.output_token_ids, 5, 5], 1)
    that("computed for the second turn", serve(scheduler, second)).gives({"b": 15 - 12})


def test_the_last_token_of_an_answer_is_never_computed(caching, serve, a_request):
    """6 tokens and an answer of 2 are 8, but of these only 7 were ever computed: the second block is not full."""
    scheduler = caching()
    first = a_request("a", 6, 2)
    serve(scheduler, first)
    second = a_request("b", [*first.prompt_token_ids, *first.output_token_ids, 5], 1)
    that("computed for the second turn", serve(scheduler, second)).gives({"b": 9 - 4})


def test_a_prefix_is_found_by_the_same_tenant_with_the_same_adapter_only(caching, serve, a_request):
    """Tenant a's prompt, sent by others. Only a request with the same salt and adapter finds it."""
    scheduler = caching(num_blocks=60)
    serve(scheduler, a_request("a", 12, 1, cache_salt="tenant a"))
    others = {
        "no salt": {},
        "tenant b": {"cache_salt": "tenant b"},
        "an adapter of that name": {"adapter": "tenant a"},
        "tenant a, with an adapter": {"cache_salt": "tenant a", "adapter": "poems"},
        "tenant a": {"cache_salt": "tenant a"},
    }
    computed = [serve(scheduler, a_request(name, 12, 1, **keys))[name] for name, keys in others.items()]
    that(f"tokens computed for {list(others)}", computed).gives([12, 12, 12, 12, 4])
    again = a_request("poems", 12, 1, cache_salt="tenant a", adapter="poems")
    that("tokens computed for tenant a with the adapter, again", serve(scheduler, again)).gives({"poems": 4})


# Hashes, each once


def test_the_hashes_of_a_request_are_a_chain_from_its_root(caching, a_request):
    """A chain from its root, with prompt and output one sequence; kept in block_hashes."""
    scheduler, request = caching(), a_request("a", [1, 2, 3, 4, 5], cache_salt="x", adapter="y")
    request.output_token_ids += [6, 7, 8]
    hashes = call(scheduler.hashes, request, 2).value
    first = hashes[0]
    keyless = block_hash(root_hash(), [1, 2, 3, 4])
    that("whether the first hash is the one without the keys", first == keyless).gives(False)
    that("the second", hashes[1]).gives(block_hash(first, [5, 6, 7, 8]))
    that("block_hashes", request.block_hashes).gives([first, hashes[1]])
    alike = a_request("b", [1, 2, 3, 4], cache_salt="x", adapter="y")
    that("the first of a request with the same keys", call(scheduler.hashes, alike, 1).value[0]).gives(first)
    swapped = a_request("c", [1, 2, 3, 4], cache_salt="y", adapter="x")
    that("whether it is the same with salt and adapter swapped", scheduler.hashes(swapped, 1)[0] == first).gives(False)


def test_what_is_known_is_not_computed_again(caching, a_request):
    """Hashes in block_hashes are used as they are; missing ones are appended."""
    scheduler, request = caching(), a_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    known = [b"1" * 32, b"2" * 32]
    request.block_hashes = list(known)
    that("the first two hashes, which stood in block_hashes", call(scheduler.hashes, request, 1).value[:2]).gives(known)
    that("block_hashes", request.block_hashes).gives(known)
    hashes = call(scheduler.hashes, request, 3).value
    that("the first two of three", hashes[:2]).gives(known)
    that("the hash of the third block, whose parent is the second in block_hashes", hashes[2]).gives(
        block_hash(known[1], [9, 10, 11, 12])
    )
    that("how many are kept", len(request.block_hashes)).gives(3)


def test_no_block_has_no_hashes(caching, a_request):
    """No blocks: no hashes."""
    call(caching().hashes, a_request("a", 3), 0).gives([])


# What is cached, and when


@pytest.mark.parametrize(
    ("num_computed", "num_new", "cached"),
    [
        (0, 3, []),
        (0, 4, [0]),
        (0, 7, [0]),
        (0, 8, [0, 1]),
        (0, 12, [0, 1, 2]),
        (3, 1, [0]),
        (4, 1, []),
        (4, 3, []),
        (4, 4, [1]),
        (7, 1, [1]),
        (6, 6, [1, 2]),
        (8, 3, []),
        (11, 1, [2]),
    ],
)
def test_a_step_caches_what_it_fills(caching, a_request, num_computed, num_new, cached):
    """A block of 4 is cached by the step that computes its last token. Twelve tokens, of which some are computed."""
    scheduler, request = caching(), a_request("a", range(12))
    request.block_ids = scheduler.pool.allocate(3)
    request.num_computed_tokens = num_computed
    call(scheduler.cache_blocks, request, num_computed, num_computed + num_new).gives(None)
    found = [block for each in scheduler.hashes(request, 3)[:3] for block in scheduler.pool.find([each])]
    that("cached blocks", found).gives(cached)
    that("num_cached of the pool", scheduler.pool.num_cached).gives(len(cached))


def test_a_block_is_found_in_the_step_that_computes_it(caching, a_request, a_step):
    """Two equal prompts arrive together: the second finds, in the same step, blocks that the first will compute."""
    a, b = a_request("a", 9), a_request("b", 9)
    scheduler = caching([a, b])
    that("step 0", a_step(scheduler).num_scheduled_tokens).gives({"a": 9, "b": 1})
    that("the first two blocks of both", (a.block_ids[:2], b.block_ids[:2])).gives(([0, 1], [0, 1]))
    that("whether their third blocks are one", a.block_ids[2] == b.block_ids[2]).gives(False)
    that("references of block 0", scheduler.pool.ref_count(0)).gives(2)


def test_blocks_that_decode_fills_are_found(caching, a_request, a_step):
    """All blocks that the batch has filled are found: another turn of a chat, with one token more."""
    requests = [a_request("a", 6, 20), a_request("b", [2] * 5, 20)]
    scheduler = caching(requests)
    found = []
    for _ in range(8):
        a_step(scheduler)
        turns = [a_request("turn", each.token_ids(0, each.num_tokens)) for each in requests]
        found.append(sum(len(scheduler.find_prefix(turn)) for turn in turns))
    that("blocks found after steps 0 … 7", found).gives([2, 2, 3, 4, 4, 4, 5, 6])


def test_a_block_is_found_in_the_decode_step_that_fills_it(caching, a_request, a_step):
    """a's second block is filled by the decode step in which the second turn of its chat arrives, and is found."""
    a = a_request("a", 6, 20)
    scheduler = caching([a])
    a_step(scheduler)
    a_step(scheduler)
    scheduler.add_request(a_request("turn", [*a.token_ids(0, 8), 0], 1))
    that("tokens of the step", a_step(scheduler).num_scheduled_tokens).gives({"a": 1, "turn": 1})


def test_only_requests_that_fill_a_block_are_noted(caching, a_request, a_step):
    """`_filled` gets (request, start, stop) of the step's tokens, only when they fill a block."""
    a, b = a_request("a", 6, 20), a_request("b", [2] * 5, 20)
    scheduler = caching([a, b])
    noted = []
    for _ in range(5):
        a_step(scheduler)
        noted.append([(request.request_id, start, stop) for request, start, stop in scheduler._filled])
        scheduler.cache_filled()
    that("_filled after steps 0 … 4", noted).gives([[], [], [("a", 7, 8)], [("b", 7, 8)], []])


def test_a_step_of_several_tokens_is_noted(caching, a_request, a_step):
    """A request of the batch may compute several tokens in a step: the block that they fill may end in their middle."""
    request = a_request("a", 9, 20)
    scheduler = caching([request])
    a_step(scheduler)
    request.num_computed_tokens = 6  # as phase 9's chunks would leave it
    a_step(scheduler)
    that(
        "_filled after a step that computed tokens 6 … 9, of blocks of 4", [noted[1:] for noted in scheduler._filled]
    ).gives([(6, 10)])


def test_a_step_that_preempts_notes_what_it_fills(caching, a_request, a_step):
    """The last of the batch is its own victim: blocks that the others fill in this step are still cached."""
    requests = [a_request("old", 7, 20), a_request("young", [2] * 4, 20)]
    scheduler = caching(requests, num_blocks=3)
    a_step(scheduler)
    output = a_step(scheduler)
    that("work and preempted", (output.num_scheduled_tokens, output.preempted)).gives(({"old": 1}, ["young"]))
    found = scheduler.find_prefix(a_request("c", [*[1] * 7, 7, 0]))
    that("blocks of the old one's eight tokens that are found", found).gives(requests[0].block_ids[:2])


def test_without_a_prefix_cache_nothing_is_found_noted_or_hashed(caching, serve, a_request, a_step):
    """prefix_caching=False: as phase 6's scheduler. Nothing is found, noted, cached or counted."""
    scheduler = caching(prefix_caching=False)
    scheduler.add_request(a_request("a", 9, 9))
    for _ in range(6):
        a_step(scheduler)
    that("_filled, while a request runs that has filled a block in decode", scheduler._filled).gives([])
    scheduler.abort_request("a")
    call(scheduler.find_prefix, a_request("b", 9)).gives([])
    c = a_request("c", 9, 1)
    that("computed for the same again", serve(scheduler, c)).gives({"c": 9})
    that("hashes that were computed for it, which nothing looks for", c.block_hashes).gives([])
    that("requests in the stats", scheduler.stats.num_requests).gives(0)


class ChunkScheduler(PrefixCachingScheduler):
    """Computes at most 6 tokens of a request in a step, as phase 9's scheduler may."""

    def schedule_tokens(self, request, output):
        output.num_scheduled_tokens[request.request_id] = min(6, request.num_tokens - request.num_computed_tokens)
        output.scheduled.append(request)


def test_admission_caches_only_what_the_step_computes(a_request):
    """14 tokens, of which the admitting step computes 6 (`num_scheduled_tokens`): only the first block is full."""
    scheduler = ChunkScheduler(num_blocks=20, block_size=4, prefix_caching=True)
    scheduler.add_request(a_request("a", 14))
    output = call(scheduler.schedule).value
    that("the step", output.num_scheduled_tokens).gives({"a": 6})
    that("blocks of 4 that are cached of its 14 tokens", scheduler.pool.num_cached).gives(1)


# What it costs to admit


def test_found_tokens_are_not_in_the_budget(caching, a_request, a_step):
    """12 tokens a step, one taken by the batch. A prompt of 12 of which 8 are found needs 4 of them, and 1 block."""
    scheduler = caching([a_request("a", 11)], num_blocks=4, max_num_batched_tokens=12)
    a_step(scheduler)
    scheduler.add_request(a_request("b", 12))
    that("step 1", a_step(scheduler).num_scheduled_tokens).gives({"a": 1, "b": 4})
    that("used blocks", scheduler.pool.num_used).gives(4)


def test_a_found_block_that_is_free_counts_as_taken(caching, serve, a_request, a_step):
    """4 blocks: one used, three free, two of which are found. The request needs these two and two more, so it waits."""
    scheduler = caching(num_blocks=4)
    serve(scheduler, a_request("a", [1] * 8, 1))
    scheduler.add_request(a_request("old", [5, 5], 4))
    a_step(scheduler)
    scheduler.add_request(a_request("new", [1] * 13, 1))
    that("step 1", call(scheduler.schedule).value.num_scheduled_tokens).gives({"old": 1})
    that("the waiting queue", list(scheduler.waiting)).gives(["new"])


def test_found_blocks_are_shared_before_any_is_allocated(caching, serve, a_request):
    """The two blocks that it finds have been free longest, so they would be handed out next."""
    scheduler = caching(num_blocks=4)
    serve(scheduler, a_request("a", [1] * 8, 1))
    serve(scheduler, a_request("b", [2] * 8, 1))  # the free list is 1 0 3 2, and all are cached
    output, request = SchedulerOutput(), a_request("c", [1] * 10)
    scheduler.add_request(request)
    call(scheduler.schedule_waiting, output).gives(None)
    that("admitted", output.num_scheduled_tokens).gives({"c": 2})
    that("blocks of c: the two that it finds, and a new one", request.block_ids).gives([0, 1, 3])
    scheduler.check()


def test_found_tokens_count_as_computed(caching, serve, a_request):
    """Found tokens are computed tokens; the request is in the batch, in the step, and in the stats."""
    scheduler = caching()
    serve(scheduler, a_request("a", 8, 1))
    request, output = a_request("b", 11), SchedulerOutput()
    scheduler.add_request(request)
    call(scheduler.schedule_waiting, output).gives(None)
    that("status", request.status.name).gives("RUNNING")
    that("computed, cached tokens", (request.num_computed_tokens, request.num_cached_tokens)).gives((8, 8))
    that("in the step", output.num_scheduled_tokens).gives({"b": 3})
    that("its blocks", request.block_ids[:2]).gives([0, 1])
    stats = scheduler.stats
    seen = stats.num_requests, stats.num_queried_tokens, stats.num_hit_tokens
    that("requests, queried, hit", seen).gives((2, 19, 8))
    that("hit rate", stats.hit_rate).is_close(8 / 19)


def test_the_stats_are_sums(caching, serve, a_request):
    """The same 9 tokens three times: 27 are queried, and 8 are found twice."""
    scheduler = caching()
    for name in "abc":
        serve(scheduler, a_request(name, 9, 1))
    stats = scheduler.stats
    seen = stats.num_requests, stats.num_queried_tokens, stats.num_hit_tokens
    that("requests, queried, hit, of 9 tokens served three times in blocks of 4", seen).gives((3, 27, 16))


# Victims


def test_a_victim_finds_its_own_blocks(caching, a_request, a_step):
    """Two prompts of 80 in 10 blocks of 16. The second is preempted, and its blocks are handed out from the tail.

    The first takes one block after 80 and one after 96 tokens, and one after 112 if it gets there. Of the victim's five
    full blocks the others are still there when it comes back, so of its 81 tokens only few are computed again.
    """
    requests = [a_request(n, [n] * 80, 20) for n in range(2)]
    scheduler = caching(requests, num_blocks=10, block_size=16)
    that("step 0", a_step(scheduler).num_scheduled_tokens).gives({0: 80, 1: 80})
    output = a_step(scheduler)
    that("step 1", (output.num_scheduled_tokens, output.preempted)).gives(({0: 1}, [1]))
    seen = requests[1].num_computed_tokens, requests[1].num_cached_tokens
    that("the victim's num_computed_tokens, num_cached_tokens", seen).gives((0, 0))
    steps = 0
    while 1 not in output.num_scheduled_tokens and steps < 30:
        output, steps = a_step(scheduler), steps + 1
    that("computed when it comes back", output.num_scheduled_tokens.get(1)).gives(81 - 3 * 16)
    that(
        "num_cached_tokens of the victim, which found nothing when it was first admitted", requests[1].num_cached_tokens
    ).gives(0)
    that("tokens that it had generated", len(requests[1].output_token_ids)).gives(2)
    that("requests in the stats: each admission counts", scheduler.stats.num_requests).gives(3)
    that("queried, hit", (scheduler.stats.num_queried_tokens, scheduler.stats.num_hit_tokens)).gives((241, 48))


def test_a_victim_leaves_a_token_to_compute_too(caching, a_request, a_step):
    """A victim whose tokens fill its blocks to the last slot finds all but the last block, and computes that."""
    requests = [a_request(0, [5] * 4, 3), a_request(1, [6] * 7, 9)]
    scheduler = caching(requests, num_blocks=3)
    that("step 0", a_step(scheduler).num_scheduled_tokens).gives({0: 4, 1: 7})
    that("preempted in step 1", a_step(scheduler).preempted).gives([1])
    that("tokens of the victim", requests[1].num_tokens).gives(8)
    a_step(scheduler)
    output = a_step(scheduler)
    # Its second block was never full: the first is found, unless it was handed out.
    that("step 3", output.num_scheduled_tokens).gives({1: 4})


def test_what_a_victim_computes_again_is_cached_again(caching, serve, a_request, a_step):
    """Its blocks were reallocated while it waited. It fills new ones when it comes back, and these are found."""
    requests = [a_request("old", [5] * 8, 8), a_request("young", [6] * 8, 9)]
    scheduler = caching(requests, num_blocks=4)
    a_step(scheduler)
    that("preempted in step 1", a_step(scheduler).preempted).gives(["young"])
    output, steps = a_step(scheduler), 0
    while "young" not in output.num_scheduled_tokens and steps < 30:
        output, steps = a_step(scheduler), steps + 1
    num_computed = output.num_scheduled_tokens.get("young", 0)
    that("whether it computes a block of its prompt again", 9 >= num_computed > 4).gives(True)
    that("blocks of its prompt that are found", len(scheduler.find_prefix(a_request("c", [6] * 9)))).gives(2)


def test_a_victim_computes_what_is_not_found_of_prompt_and_answer(caching, a_request, a_step):
    """It has generated tokens when it is preempted. Only tokens not found are computed, in prompt and output."""
    requests = [a_request("old", [5] * 4, 9), a_request("young", [6] * 4, 9)]
    scheduler = caching(requests, num_blocks=4)
    output, steps = a_step(scheduler), 0
    while not output.preempted and steps < 30:
        output, steps = a_step(scheduler), steps + 1
    that("preempted, with so many tokens", (output.preempted, requests[1].num_tokens)).gives((["young"], 9))
    while "young" not in output.num_scheduled_tokens and steps < 30:
        output, steps = a_step(scheduler), steps + 1
    that("blocks of its prompt that are found", len(scheduler.find_prefix(a_request("c", [6] * 5)))).gives(1)
    that("computed of 4 + 5 tokens when it comes back", output.num_scheduled_tokens.get("young")).gives(5)


def test_a_victim_finds_its_answer(caching, a_request, a_step):
    """Its blocks are still cached when it comes back: it finds its prompt's, and one filled by its answer."""
    requests = [a_request("old", [5] * 11, 9), a_request("young", [6] * 4, 20)]
    scheduler = caching(requests, num_blocks=9)
    for _ in range(6):
        a_step(scheduler)
    victim = scheduler.running[-1]
    call(scheduler.preempt, victim, SchedulerOutput()).gives(None)
    that("its tokens, computed tokens", (victim.num_tokens, victim.num_computed_tokens)).gives((10, 0))
    that("computed when it comes back", a_step(scheduler).num_scheduled_tokens).gives({"old": 1, "young": 2})


def test_a_swapped_out_request_looks_for_nothing(caching, a_request, a_step):
    """A request that is swapped out has its blocks in CPU swap space: it looks for none, and computes one token."""
    requests = [a_request(n, [n + 1] * 8, 6) for n in range(2)]
    scheduler = caching(requests, num_blocks=4, preemption="swap", num_host_blocks=8)
    a_step(scheduler)
    that("preempted in step 1", a_step(scheduler).preempted).gives([1])
    that("status", requests[1].status.name).gives("SWAPPED")
    call(scheduler.find_prefix, requests[1]).gives([])
    output, steps = a_step(scheduler), 0
    while 1 not in output.num_scheduled_tokens and steps < 30:
        output, steps = a_step(scheduler), steps + 1
    that("computed when it comes back", output.num_scheduled_tokens.get(1)).gives(1)
    copied = output.swapped_in.get(1, [])
    that("blocks that are copied back", [block for _, block in copied]).gives(requests[1].block_ids[:2])
    that("requests in the stats", scheduler.stats.num_requests).gives(2)


def test_a_swapped_out_request_gives_back_its_host_blocks(caching, a_request, a_step):
    """It returns all of its blocks, which are in CPU swap space."""
    scheduler = caching([a_request(n, 8) for n in range(2)], num_blocks=4, preemption="swap", num_host_blocks=8)
    a_step(scheduler)
    a_step(scheduler)
    that("CPU blocks in use", scheduler.host_pool.num_used).gives(2)
    scheduler.abort_request(1)
    that("CPU blocks in use", scheduler.host_pool.num_used).gives(0)
    scheduler.check()


def test_a_swapped_in_request_caches_what_it_fills(caching, a_request, a_step):
    """It comes back with a token to compute that fills its second block: that block is cached, too."""
    requests = [a_request(0, [5] * 4, 3), a_request(1, [6] * 7, 9)]
    scheduler = caching(requests, num_blocks=3, preemption="swap", num_host_blocks=8)
    that("step 0", a_step(scheduler).num_scheduled_tokens).gives({0: 4, 1: 7})
    that("preempted in step 1", a_step(scheduler).preempted).gives([1])
    a_step(scheduler)
    that("step 3", a_step(scheduler).num_scheduled_tokens).gives({1: 1})
    second = scheduler.hashes(requests[1], 2)[1:2]  # the first block may have been handed out meanwhile
    that("what the pool finds under its second block's hash", scheduler.pool.find(second)).gives(
        requests[1].block_ids[1:2]
    )
    scheduler.abort_request(1)
    scheduler.check()


# Steps that fail, and requests that do


def test_recover_forgets_what_a_failed_step_was_to_write(caching, a_request, a_step):
    """Two equal prompts in one step, which fails: the second had found unwritten blocks. Both start again."""
    a, b = a_request("a", 9, 3), a_request("b", 9, 3)
    scheduler = caching([a, b])
    that("the step that fails", scheduler.schedule().num_scheduled_tokens).gives({"a": 9, "b": 1})
    call(scheduler.recover).gives(None)
    scheduler.check()
    that("status of both", (a.status.name, b.status.name)).gives(("WAITING", "WAITING"))
    that("cached blocks", scheduler.pool.num_cached).gives(0)
    call(scheduler.find_prefix, a_request("c", 9)).gives([])
    that("the step after it", a_step(scheduler).num_scheduled_tokens).gives({"a": 9, "b": 1})


def test_recover_forgets_what_was_cached_before(caching, serve, a_request, a_step):
    """A failed step may have written anywhere: blocks of finished requests and of the batch are cached no longer."""
    scheduler = caching()
    pool = scheduler.pool
    serve(scheduler, a_request("before", [3] * 9, 1))
    scheduler.add_request(a_request("a", 7, 9))
    a_step(scheduler)
    a_step(scheduler)  # fills a's second block, which is noted
    scheduler.schedule()
    call(scheduler.recover).gives(None)
    that("cached blocks", scheduler.pool.num_cached).gives(0)
    call(scheduler.find_prefix, a_request("b", [3] * 9)).gives([])
    that("evicted", scheduler.stats.num_evicted_blocks).gives(0)
    that("whether scheduler.pool is still the pool whose blocks the tensors belong to", scheduler.pool is pool).gives(
        True
    )
    that("a computes its prompt and its two tokens", a_step(scheduler).num_scheduled_tokens).gives({"a": 9})
    call(scheduler.find_prefix, a_request("c", 8)).gives([scheduler.running[0].block_ids[0]])


def test_recover_without_a_prefix_cache(caching, a_request, a_step):
    """prefix_caching=False: there is no hash to drop, and the requests wait again."""
    scheduler = caching([a_request("a", 9, 3)], prefix_caching=False)
    scheduler.schedule()
    call(scheduler.recover).gives(None)
    that("the waiting queue", list(scheduler.waiting)).gives(["a"])
    that("the step after it", a_step(scheduler).num_scheduled_tokens).gives({"a": 9})


def test_a_failed_request_takes_its_hashes_with_it(caching, a_request, a_step):
    """FINISHED_ERROR: the contents of its blocks are in doubt. Blocks that it did not have stay cached."""
    a, b = a_request("a", [1] * 9, 9), a_request("b", [1, 1, 1, 1, 2, 2, 2, 2, 2], 9)
    scheduler = caching([a, b])
    a_step(scheduler)
    that("cached blocks", scheduler.pool.num_cached).gives(3)
    scheduler.finish_request("a", RequestStatus.FINISHED_ERROR)
    scheduler.check()
    that("blocks found for a's prompt", call(scheduler.find_prefix, a_request("c", [1] * 9)).value).gives([])
    that("cached blocks: b's second", scheduler.pool.num_cached).gives(1)
    that("b continues", a_step(scheduler).num_scheduled_tokens).gives({"b": 1})


def test_what_a_failed_request_has_just_filled_is_not_cached(caching, a_request, a_step):
    """The block that it filled last is noted and not cached yet when it fails: it must not be cached afterwards."""
    scheduler = caching([a_request("a", 6, 20)])
    for _ in range(3):
        a_step(scheduler)
    scheduler.finish_request("a", RequestStatus.FINISHED_ERROR)
    call(scheduler.find_prefix, a_request("b", [*[1] * 6, 7, 7, 0])).gives([])
    that("cached blocks", scheduler.pool.num_cached).gives(0)
    scheduler.check()


def test_what_others_have_filled_is_cached_though_a_request_fails(caching, a_request, a_step):
    """a and b fill a block each in one step, and a fails. b's block is noted too, and valid."""
    scheduler = caching([a_request("a", 6, 20), a_request("b", [2] * 6, 20)])
    for _ in range(3):
        a_step(scheduler)
    scheduler.finish_request("a", RequestStatus.FINISHED_ERROR)
    found = call(scheduler.find_prefix, a_request("c", [*[2] * 6, 7, 7, 0])).value
    that("how many of b's two full blocks are found after a has failed", len(found)).gives(2)


def test_a_request_fails_without_a_prefix_cache(caching, a_request, a_step):
    """prefix_caching=False: there is no hash to drop, and its blocks are returned."""
    scheduler = caching([a_request("a", 6, 20)], prefix_caching=False)
    a_step(scheduler)
    call(scheduler.finish_request, "a", RequestStatus.FINISHED_ERROR).gives(True)
    that("used blocks", scheduler.pool.num_used).gives(0)


@pytest.mark.parametrize("committed", [False, True])
def test_an_abort_leaves_its_blocks_cached(caching, a_request, a_step, committed):
    """An abort is not a failure, even before the step is committed: the step still computes its tokens."""
    a, b = a_request("a", 9), a_request("b", 9)
    scheduler = caching([a, b])
    output = scheduler.schedule()
    if committed:
        scheduler.update_from_output(output, {"a": 7, "b": 7})
    scheduler.abort_request("a")
    scheduler.check()
    that("blocks that are found", call(scheduler.find_prefix, a_request("c", 9)).value).gives([0, 1])
    if not committed:
        scheduler.update_from_output(output, {"a": 7, "b": 7})
    that("b's computed tokens", b.num_computed_tokens).gives(9)


# Against a model


@dataclass
class Model:
    """The same rules, written with lists and whole prefixes, and without hashes."""

    num_blocks: int
    max_num_seqs: int
    budget: int
    waiting: list[dict[str, Any]] = field(default_factory=list)
    running: list[dict[str, Any]] = field(default_factory=list)
    references: dict[int, int] = field(default_factory=dict)
    cached: list[tuple[Any, int]] = field(default_factory=list)  # (salt and whole prefix, block), oldest first

    def __post_init__(self):
        self.free = list(range(self.num_blocks))

    def find(self, it):
        found = []
        for end in range(4, len(it["tokens"]), 4):  # the last token is never in it
            blocks = [block for key, block in self.cached if key == (it["salt"], it["tokens"][:end])]
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def take(self):
        block = self.free.pop(0)
        self.cached = [(key, each) for key, each in self.cached if each != block]
        self.references[block] = 1
        return block

    def let_go(self, it):
        for block in reversed(it["blocks"]):
            self.references[block] -= 1
            if not self.references[block]:
                self.free.insert(len(self.free) if block in [each for _, each in self.cached] else 0, block)
        it["blocks"], it["computed"] = [], 0

    def cache(self, it, num_new):
        for end in range(4, it["computed"] + num_new + 1, 4):
            block = it["blocks"][end // 4 - 1]
            if end > it["computed"] and all(each != block for _, each in self.cached):
                self.cached.append(((it["salt"], it["tokens"][:end]), block))

    def step(self):
        """[(id, tokens, blocks)], and the ids of preempted requests."""
        work, preempted, turn = [], [], 0
        while turn < len(self.running):
            it = self.running[turn]
            missing = -(-len(it["tokens"]) // 4) - len(it["blocks"])
            while missing > len(self.free) and it in self.running:
                victim = self.running.pop()
                self.let_go(victim)
                self.waiting.insert(0, victim)
                preempted.append(victim["id"])
            if it not in self.running:
                break
            it["blocks"] += [self.take() for _ in range(missing)]
            work.append((it["id"], 1, list(it["blocks"])))
            turn += 1
        for it in self.running:
            self.cache(it, 1)
        left = self.budget - len(work)
        while self.waiting and not preempted and len(self.running) < self.max_num_seqs:
            it = self.waiting[0]
            found = self.find(it)
            num_new, missing = len(it["tokens"]) - 4 * len(found), -(-len(it["tokens"]) // 4) - len(found)
            if num_new > left or missing + sum(block in self.free for block in found) > len(self.free):
                break
            for block in found:
                if block in self.free:
                    self.free.remove(block)
                self.references[block] = self.references.get(block, 0) + 1
            it["blocks"], it["computed"] = found + [self.take() for _ in range(missing)], 4 * len(found)
            self.cache(it, num_new)
            self.running.append(self.waiting.pop(0))
            work.append((it["id"], num_new, list(it["blocks"])))
            left -= num_new
        return work, preempted

    def commit(self, work, token_ids):
        for it in list(self.running):
            if it["id"] in [request_id for request_id, _, _ in work]:
                it["computed"] = len(it["tokens"])
                it["tokens"] = [*it["tokens"], token_ids[it["id"]]]
                it["left"] -= 1
                if not it["left"]:
                    self.running.remove(it)
                    self.let_go(it)


def a_workload(rng, budget, num_blocks):
    """Prompts that begin alike, some of them the whole of an earlier one: (step, prompt, tokens to generate, salt)."""
    stems = [[rng.randrange(3) for _ in range(rng.randint(1, 20))] for _ in range(3)]
    most, requests = min(budget - 8, num_blocks * 4 - 8), []
    for _ in range(rng.randint(3, 14)):
        prompt = rng.choice(stems)[: rng.randint(1, 20)] + [rng.randrange(3) for _ in range(rng.randint(0, 9))]
        requests.append((rng.randint(0, 12), prompt[:most], rng.randint(1, 7), rng.choice([None, None, "a"])))
    return sorted(requests, key=lambda each: each[0])


@pytest.mark.parametrize("seed", range(25))
def test_the_rules_written_with_lists_give_the_same(caching, seed):
    """The same blocks, hits and victims, in the same order, in every step of a random run."""
    rng = random.Random(fresh(seed))
    num_blocks, slots, budget = rng.randint(8, 20), rng.randint(1, 6), rng.choice([24, 40, 200])
    model = Model(num_blocks, slots, budget)
    scheduler = caching(num_blocks=num_blocks, max_num_seqs=slots, max_num_batched_tokens=budget)
    coming, number = a_workload(rng, budget, num_blocks), 0
    for step in range(400):
        while coming and coming[0][0] <= step:
            _, prompt, left, salt = coming.pop(0)
            scheduler.add_request(Request(number, prompt, left, cache_salt=salt))
            it = {"id": number, "tokens": list(prompt), "left": left, "salt": salt, "blocks": [], "computed": 0}
            model.waiting.append(it)
            number += 1
        output, (work, preempted) = call(scheduler.schedule).value, model.step()
        got = [
            (each.request_id, output.num_scheduled_tokens[each.request_id], each.block_ids) for each in output.scheduled
        ]
        that(f"(id, tokens, blocks) of step {step}", sorted(got)).gives(sorted(work))
        that(f"preempted in step {step}", output.preempted).gives(preempted)
        token_ids = {request_id: rng.randrange(3) for request_id, _, _ in work}
        scheduler.update_from_output(output, token_ids)
        model.commit(work, token_ids)
        scheduler.check()
        that(f"free blocks after step {step}", scheduler.pool.num_free).gives(len(model.free))
        if not scheduler.has_unfinished and not coming:
            return
    that("requests that are left after 400 steps", scheduler.num_running + scheduler.num_waiting).gives(0)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(12))
def test_all_read_their_own_tokens(caching, memory, preemption, seed):
    """Random runs with aborts and failing steps, on a memory that tracks the contents of every slot."""
    rng = random.Random(fresh(seed))
    scheduler = caching(
        num_blocks=rng.randint(6, 20),
        max_num_seqs=rng.randint(1, 6),
        preemption=preemption,
        num_host_blocks=rng.randint(1, 8) if preemption == "swap" else 0,
    )
    device, number = memory(scheduler), 0
    for turn in range(150):
        if turn < 60 and rng.random() < 0.4:
            prompt = [rng.randrange(2)] * rng.randint(1, 9) + [rng.randrange(2)] * rng.randint(0, 7)
            scheduler.add_request(Request(number, prompt, rng.randint(1, 8), cache_salt=rng.choice([None, "a"])))
            number += 1
        abort_one(scheduler, rng)
        for request in list(scheduler.waiting.values())[:2]:
            device.finds(request)
        output = call(scheduler.schedule).value
        fails = rng.random() < 0.1
        device.run(output, fails=fails)
        abort_one(scheduler, rng)
        if fails:
            call(scheduler.recover).gives(None)
        else:
            token_ids = {request_id: rng.randrange(2) for request_id in output.num_scheduled_tokens}
            scheduler.update_from_output(output, token_ids)
        scheduler.check()
        if turn >= 60 and not scheduler.has_unfinished:
            break
    that("whether any request is unfinished", scheduler.has_unfinished).gives(False)
    that("used blocks", scheduler.pool.num_used).gives(0)


def abort_one(scheduler, rng):
    """Once in ten times, abort any request."""
    unfinished = [*scheduler.running, *scheduler.waiting.values()]
    if unfinished and rng.random() < 0.1:
        scheduler.abort_request(rng.choice(unfinished).request_id)
        scheduler.check()
