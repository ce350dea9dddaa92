"""Phase 8, task 3: a prompt's beginning that some block holds already is not computed again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from minicache.course.checks import call, that
from minicache.memory.prefix import block_hash, root_hash
from minicache.request import Request
from minicache.scheduler.output import SchedulerOutput

# What is found


def test_a_prompt_of_exactly_three_blocks(unforked, serve, a_request):
    """48 tokens in blocks of 16, sent again: 32 are found, for one must be computed. With one token more: all 48."""
    scheduler = unforked(num_blocks=20, block_size=16)
    prompt = list(range(48))
    that("computed for the first", serve(scheduler, a_request("a", prompt, 2))).gives({"a": 48})
    again, longer = a_request("b", prompt, 1), a_request("c", [*prompt, 99], 1)
    call(scheduler.num_new_tokens, again).gives(16)
    that("computed for the same again", serve(scheduler, again)).gives({"b": 16})
    call(scheduler.num_new_tokens, longer).gives(1)
    that("computed for one token more", serve(scheduler, longer)).gives({"c": 1})
    that("num_cached_tokens of both", (again.num_cached_tokens, longer.num_cached_tokens)).gives((32, 48))


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_a_token_is_left(unforked, serve, a_request, num_tokens):
    """Whatever its length, a prompt that is sent again computes at least one token, and less than a block and one."""
    scheduler = unforked()
    serve(scheduler, a_request("a", num_tokens, 1))
    request = a_request("b", num_tokens, 1)
    blocks = call(scheduler.find_prefix, request).value
    that("blocks of 4 that are found", len(blocks)).gives({0: 0, 1: 1, 2: 2, 3: 3}[(num_tokens - 1) // 4])
    scheduler.hashes(request, num_tokens // 4)
    call(scheduler.find_prefix, request).gives(blocks)  # also when it has a name for its last block
    call(scheduler.num_new_tokens, request).gives(num_tokens - 4 * len(blocks))
    that("computed", serve(scheduler, request)).gives({"b": num_tokens - 4 * len(blocks)})


def test_in_order_and_up_to_the_first_difference(unforked, serve, a_request):
    """Three blocks are cached. A prompt that leaves them in the second finds one, however it goes on."""
    scheduler = unforked()
    serve(scheduler, a_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 1))
    call(scheduler.find_prefix, a_request("b", [*range(1, 13), 13])).gives([0, 1, 2])
    call(scheduler.find_prefix, a_request("c", [1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13])).gives([0])
    call(scheduler.find_prefix, a_request("d", [0, 2, 3, 4, 5, 6, 7, 8, 9])).gives([])
    call(scheduler.find_prefix, a_request("e", [5, 6, 7, 8, 9, 10, 11, 12, 13])).gives([])


def test_asking_changes_nothing(unforked, serve, a_request):
    """Found blocks are owned by nobody for it; the request has none."""
    scheduler = unforked()
    serve(scheduler, a_request("a", 9, 1))
    request = a_request("b", 9)
    before = scheduler.pool.num_free, scheduler.pool.ref_count(0)
    call(scheduler.find_prefix, request).gives([0, 1])
    that("free blocks, owners of block 0", (scheduler.pool.num_free, scheduler.pool.ref_count(0))).gives(before)
    seen = request.block_ids, request.num_computed_tokens, request.num_cached_tokens
    that("the request's blocks, computed and cached tokens", seen).gives(([], 0, 0))
    that("requests in the stats", scheduler.stats.num_requests).gives(1)


def test_whoever_asks(unforked, a_request, a_step):
    """Only who is swapped out finds nothing. A request in the batch finds its own blocks; so does one that ended."""
    request = a_request("a", 9)
    scheduler = unforked([request])
    a_step(scheduler)
    that("its status", request.status.name).gives("RUNNING")
    call(scheduler.find_prefix, request).gives([0, 1])
    scheduler.abort_request("a")
    call(scheduler.find_prefix, request).gives([0, 1])


def test_looking_names_first(unforked, a_request, a_step):
    """What decode has filled is noted down and has no name yet: find_prefix calls name_blocks before it looks."""
    scheduler = unforked([a_request("a", 6, 9)])
    for _ in range(3):
        a_step(scheduler)  # 6 tokens of prompt, and two that were generated: the second block is full
    found = call(scheduler.find_prefix, a_request("b", [*[1] * 6, 7, 7, 0])).value
    that("blocks found while a, which filled them, still runs", found).gives([0, 1])


def test_leaving_names_first(unforked, serve, a_request):
    """Who ends gives its blocks away, and what it has filled gets its name before that: release calls name_blocks."""
    scheduler = unforked()
    serve(scheduler, a_request("a", 6, 7))  # 12 tokens are computed: three full blocks, two of them by decode
    that("cached blocks when a has ended, and nobody has looked yet", scheduler.pool.num_cached).gives(3)


def test_answers_are_found_too(unforked, serve, a_request):
    """The second turn of a chat is the first prompt, its answer, and new words: 12 of its 15 tokens are there."""
    scheduler = unforked()
    first = a_request("a", 6, 7)
    serve(scheduler, first)
    second = a_request("b", [*first.prompt_token_ids, *first.output_token_ids, 5, 5], 1)
    that("computed for the second turn", serve(scheduler, second)).gives({"b": 15 - 12})


def test_the_last_token_of_an_answer_is_never_computed(unforked, serve, a_request):
    """6 tokens and an answer of 2 are 8, but of these only 7 were ever computed: the second block is not full."""
    scheduler = unforked()
    first = a_request("a", 6, 2)
    serve(scheduler, first)
    second = a_request("b", [*first.prompt_token_ids, *first.output_token_ids, 5], 1)
    that("computed for the second turn", serve(scheduler, second)).gives({"b": 9 - 4})


def test_tenants_and_adapters(unforked, serve, a_request):
    """Tenant a's prompt, sent by others. Only one who has the same salt and the same adapter finds it."""
    scheduler = unforked(num_blocks=60)
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
    that("tokens computed for tenant a with his adapter, again", serve(scheduler, again)).gives({"poems": 4})


# Names, each once


def test_the_names_of_a_request(unforked, a_request):
    """A chain from its root, with prompt and output one sequence; kept in block_hashes."""
    scheduler, request = unforked(), a_request("a", [1, 2, 3, 4, 5], cache_salt="x", adapter="y")
    request.output_token_ids += [6, 7, 8]
    names = call(scheduler.hashes, request, 2).value
    first = names[0]
    that("different from the first block without its keys", first != block_hash(root_hash(), [1, 2, 3, 4])).gives(True)
    that("the second", names[1]).gives(block_hash(first, [5, 6, 7, 8]))
    that("block_hashes", request.block_hashes).gives([first, names[1]])
    twin = a_request("b", [1, 2, 3, 4], cache_salt="x", adapter="y")
    that("the first of a request with the same keys", call(scheduler.hashes, twin, 1).value[0]).gives(first)
    swapped = a_request("c", [1, 2, 3, 4], cache_salt="y", adapter="x")
    that("with salt and adapter swapped it is the same", scheduler.hashes(swapped, 1)[0] == first).gives(False)


def test_what_is_known_is_not_computed_again(unforked, a_request):
    """Names that stand in block_hashes are taken as they are; what is missing is added behind them."""
    scheduler, request = unforked(), a_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    known = [b"1" * 32, b"2" * 32]
    request.block_hashes = list(known)
    that("the first two of one", call(scheduler.hashes, request, 1).value[:2]).gives(known)
    that("block_hashes", request.block_hashes).gives(known)
    names = call(scheduler.hashes, request, 3).value
    that("the first two of three", names[:2]).gives(known)
    that("the third", names[2]).gives(block_hash(known[1], [9, 10, 11, 12]))
    that("how many are kept", len(request.block_hashes)).gives(3)


def test_no_names_yet(unforked, a_request):
    """Of no block there is no name."""
    call(unforked().hashes, a_request("a", 3), 0).gives([])


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
def test_a_step_caches_what_it_fills(unforked, a_request, num_computed, num_new, cached):
    """A block of 4 is cached by the step that computes its last token. Twelve tokens, of which some are computed."""
    scheduler, request = unforked(), a_request("a", range(12))
    request.block_ids = scheduler.pool.allocate(3)
    request.num_computed_tokens = num_computed
    call(scheduler.cache_blocks, request, num_computed, num_computed + num_new).gives(None)
    name, found = root_hash(None, None), []
    for place in range(3):
        name = block_hash(name, range(4 * place, 4 * place + 4))
        found += scheduler.pool.find(scheduler.hashes(request, 3)[place : place + 1])
    that("cached blocks", found).gives(cached)
    that("num_cached of the pool", scheduler.pool.num_cached).gives(len(cached))


def test_cached_when_scheduled(unforked, a_request, a_step):
    """Two equal prompts come at once: the second finds, in the same step, what the first is about to compute."""
    a, b = a_request("a", 9), a_request("b", 9)
    scheduler = unforked([a, b])
    that("step 0", a_step(scheduler).num_scheduled_tokens).gives({"a": 9, "b": 1})
    that("the first two blocks of both", (a.block_ids[:2], b.block_ids[:2])).gives(([0, 1], [0, 1]))
    that("their third blocks are different", a.block_ids[2] != b.block_ids[2]).gives(True)
    that("owners of block 0", scheduler.pool.ref_count(0)).gives(2)


def test_without_a_prefix_cache(unforked, serve, a_request):
    """prefix_caching=False: it is phase 6's scheduler. Nothing is found, nothing cached, nothing counted."""
    scheduler = unforked(prefix_caching=False)
    serve(scheduler, a_request("a", 9, 3))
    call(scheduler.find_prefix, a_request("b", 9)).gives([])
    that("computed for the same again", serve(scheduler, a_request("c", 9, 1))).gives({"c": 9})
    that("requests in the stats", scheduler.stats.num_requests).gives(0)


# What it costs to admit


def test_found_and_used_costs_nothing(unforked, a_request, a_step):
    """Of three blocks that it needs it finds two, which somebody uses: one is taken. Found and free: all three are."""
    running = a_request("a", 9)
    scheduler = unforked([running])
    a_step(scheduler)
    request = a_request("b", 11)
    call(scheduler.blocks_to_take, request).gives(1)
    call(scheduler.num_new_tokens, request).gives(3)
    scheduler.abort_request("a")
    call(scheduler.blocks_to_take, request).gives(3)
    call(scheduler.num_new_tokens, request).gives(3)


def test_computed_is_not_found_again(unforked, serve, a_request):
    """In the middle of an admission it has two blocks that it had found: these tokens are subtracted once."""
    scheduler = unforked()
    serve(scheduler, a_request("a", 8, 1))
    request = a_request("b", 11)
    for num_computed, num_new in ((0, 3), (8, 3), (9, 2)):
        request.num_computed_tokens = num_computed
        call(scheduler.num_new_tokens, request).gives(num_new)


def test_a_step_has_room_for_it(unforked, a_request, a_step):
    """12 tokens a step, one taken by the batch. A prompt of 12 of which 8 are found needs 4 of them, and 1 block."""
    scheduler = unforked([a_request("a", 11)], num_blocks=4, max_num_batched_tokens=12)
    a_step(scheduler)
    scheduler.add_request(a_request("b", 12))
    that("step 1", a_step(scheduler).num_scheduled_tokens).gives({"a": 1, "b": 4})
    that("used blocks", scheduler.pool.num_used).gives(4)


def test_free_and_found_is_not_free_twice(unforked, serve, a_request, a_step):
    """4 blocks, one of them used, three free, of which two are found. It needs these two and two more: it waits."""
    scheduler = unforked(num_blocks=4)
    serve(scheduler, a_request("a", [1] * 8, 1))
    scheduler.add_request(a_request("old", [5, 5], 4))
    a_step(scheduler)
    scheduler.add_request(a_request("new", [1] * 13, 1))
    that("step 1", call(scheduler.schedule).value.num_scheduled_tokens).gives({"old": 1})
    that("the line", list(scheduler.waiting)).gives(["new"])


def test_share_before_you_allocate(unforked, serve, a_request):
    """The two blocks that it finds have been free longest of all, so they would be the next to be handed out."""
    scheduler = unforked(num_blocks=4)
    serve(scheduler, a_request("a", [1] * 8, 1))
    serve(scheduler, a_request("b", [2] * 5, 1))
    output, request = SchedulerOutput(), a_request("c", [1] * 10)
    scheduler.add_request(request)
    call(scheduler.admit, output).gives(None)
    that("admitted", output.num_scheduled_tokens).gives({"c": 2})
    that("its blocks", request.block_ids).gives([0, 1, 3])
    scheduler.check()


def test_what_an_admission_sets(unforked, serve, a_request):
    """Found tokens are computed tokens; the request is in the batch, in the step, and in the stats."""
    scheduler = unforked()
    serve(scheduler, a_request("a", 8, 1))
    request, output = a_request("b", 11), SchedulerOutput()
    scheduler.add_request(request)
    call(scheduler.admit, output).gives(None)
    that("status", request.status.name).gives("RUNNING")
    that("computed, cached tokens", (request.num_computed_tokens, request.num_cached_tokens)).gives((8, 8))
    that("in the step", output.num_scheduled_tokens).gives({"b": 3})
    that("its blocks", request.block_ids[:2]).gives([0, 1])
    stats = scheduler.stats
    seen = stats.num_requests, stats.num_queried_tokens, stats.num_hit_tokens
    that("requests, queried, hit", seen).gives((2, 19, 8))
    that("hit rate", stats.hit_rate).is_close(8 / 19)


# Victims


def test_a_victim_finds_its_own_blocks(unforked, a_request, a_step):
    """Two prompts of 80 in 10 blocks of 16. The second is preempted, and its blocks are handed out from the tail.

    The first takes one block after 80 and one after 96 tokens, and one after 112 if it gets there. Of the victim's five
    full blocks the others are still there when it comes back, so of its 81 tokens only few are computed again.
    """
    requests = [a_request(n, [n] * 80, 20) for n in range(2)]
    scheduler = unforked(requests, num_blocks=10, block_size=16)
    that("step 0", a_step(scheduler).num_scheduled_tokens).gives({0: 80, 1: 80})
    output = a_step(scheduler)
    that("step 1", (output.num_scheduled_tokens, output.preempted)).gives(({0: 1}, [1]))
    that("the victim's computed tokens, cached tokens", (requests[1].num_computed_tokens, 0)).gives((0, 0))
    steps = 0
    while 1 not in output.num_scheduled_tokens and steps < 30:
        output, steps = a_step(scheduler), steps + 1
    that("computed when it comes back", output.num_scheduled_tokens.get(1)).gives(81 - 3 * 16)
    that("found when it was admitted first", requests[1].num_cached_tokens).gives(0)
    that("tokens that it had generated", len(requests[1].output_token_ids)).gives(2)
    that("requests in the stats: each admission counts", scheduler.stats.num_requests).gives(3)
    that("queried, hit", (scheduler.stats.num_queried_tokens, scheduler.stats.num_hit_tokens)).gives((241, 48))


def test_preempted_at_the_end_of_a_block(unforked, a_request, a_step):
    """A victim whose tokens fill its blocks to the last slot: it finds all but the last block, and computes that."""
    requests = [a_request(0, [5] * 4, 3), a_request(1, [6] * 7, 9)]
    scheduler = unforked(requests, num_blocks=3)
    that("step 0", a_step(scheduler).num_scheduled_tokens).gives({0: 4, 1: 7})
    that("preempted in step 1", a_step(scheduler).preempted).gives([1])
    that("tokens of the victim", requests[1].num_tokens).gives(8)
    a_step(scheduler)
    output = a_step(scheduler)
    # Its second block was never full: the first is found, unless it was handed out.
    that("step 3", output.num_scheduled_tokens).gives({1: 4})


def test_what_a_victim_computes_again_is_cached_again(unforked, serve, a_request, a_step):
    """Its blocks were handed out while it waited. It fills new ones when it comes back, and these are found."""
    requests = [a_request("old", [5] * 8, 8), a_request("young", [6] * 8, 9)]
    scheduler = unforked(requests, num_blocks=4)
    a_step(scheduler)
    that("preempted in step 1", a_step(scheduler).preempted).gives(["young"])
    output, steps = a_step(scheduler), 0
    while "young" not in output.num_scheduled_tokens and steps < 30:
        output, steps = a_step(scheduler), steps + 1
    num_computed = output.num_scheduled_tokens.get("young", 0)
    that("it computes a block of its prompt again", 9 >= num_computed > 4).gives(True)
    that("blocks of its prompt that are found", len(scheduler.find_prefix(a_request("c", [6] * 9)))).gives(2)


def test_swapped_out(unforked, a_request, a_step):
    """Who is swapped out has its blocks on the host: it looks for none, and computes its newest token only."""
    requests = [a_request(n, [n + 1] * 8, 6) for n in range(2)]
    scheduler = unforked(requests, num_blocks=4, preemption="swap", num_host_blocks=8)
    a_step(scheduler)
    that("preempted in step 1", a_step(scheduler).preempted).gives([1])
    that("status", requests[1].status.name).gives("SWAPPED")
    call(scheduler.find_prefix, requests[1]).gives([])
    call(scheduler.num_new_tokens, requests[1]).gives(1)
    call(scheduler.blocks_to_take, requests[1]).gives(3)
    output, steps = a_step(scheduler), 0
    while 1 not in output.num_scheduled_tokens and steps < 30:
        output, steps = a_step(scheduler), steps + 1
    that("computed when it comes back", output.num_scheduled_tokens.get(1)).gives(1)
    copied = output.swapped_in.get(1, [])
    that("blocks that are copied back", [block for _, block in copied]).gives(requests[1].block_ids[:2])
    that("requests in the stats", scheduler.stats.num_requests).gives(2)


def test_ended_while_swapped_out(unforked, a_request, a_step):
    """It gives back all that it holds, and that is on the host."""
    scheduler = unforked([a_request(n, 8) for n in range(2)], num_blocks=4, preemption="swap", num_host_blocks=8)
    a_step(scheduler)
    a_step(scheduler)
    that("host blocks in use", scheduler.host_pool.num_used).gives(2)
    scheduler.abort_request(1)
    that("host blocks in use", scheduler.host_pool.num_used).gives(0)
    scheduler.check()


def test_swapped_in_at_the_end_of_a_block(unforked, a_request, a_step):
    """It comes back with a token to compute that fills its second block: that block is cached, like anybody's."""
    requests = [a_request(0, [5] * 4, 3), a_request(1, [6] * 7, 9)]
    scheduler = unforked(requests, num_blocks=3, preemption="swap", num_host_blocks=8)
    that("step 0", a_step(scheduler).num_scheduled_tokens).gives({0: 4, 1: 7})
    that("preempted in step 1", a_step(scheduler).preempted).gives([1])
    a_step(scheduler)
    that("step 3", a_step(scheduler).num_scheduled_tokens).gives({1: 1})
    name = scheduler.hashes(requests[1], 2)[1:2]  # of its second block: the first may have been handed out meanwhile
    that("what the pool finds under its second block's name", scheduler.pool.find(name)).gives(
        requests[1].block_ids[1:2]
    )
    scheduler.abort_request(1)
    scheduler.check()


# Steps whose tokens never come


def test_a_step_is_ordered_again(unforked, a_request, a_step):
    """The model failed, and the step is scheduled once more: it orders the same, and one who came meanwhile."""
    scheduler = unforked([a_request("a", 9), a_request("b", 9)])
    that("the first time", scheduler.schedule().num_scheduled_tokens).gives({"a": 9, "b": 1})
    scheduler.add_request(a_request("c", 9))
    that("the second time", a_step(scheduler).num_scheduled_tokens).gives({"a": 9, "b": 1, "c": 1})


def test_promised_and_never_written(unforked, a_request, a_step, serve):
    """The step failed and a's client left: its blocks hold nothing, and b, who had found them, computes all itself."""
    a, b = a_request("a", 9, 3), a_request("b", 11, 3)
    scheduler = unforked([a, b])
    that("the step that fails", scheduler.schedule().num_scheduled_tokens).gives({"a": 9, "b": 3})
    scheduler.abort_request("a")
    scheduler.check()
    that("blocks that are still cached", scheduler.pool.num_cached).gives(0)
    call(scheduler.find_prefix, a_request("c", 9)).gives([])
    that("b's computed tokens", b.num_computed_tokens).gives(0)
    that("the step after it", a_step(scheduler).num_scheduled_tokens).gives({"b": 11})
    that("computed for one more", serve(scheduler, a_request("d", 9, 1))["d"]).gives(1)


def test_all_who_had_found_it(unforked, a_request, a_step):
    """Three equal prompts at once, and the first leaves before the report: neither of the others has read anything."""
    requests = [a_request(name, 9, 3) for name in "abc"]
    scheduler = unforked(requests)
    that("the step that fails", scheduler.schedule().num_scheduled_tokens).gives({"a": 9, "b": 1, "c": 1})
    scheduler.abort_request("a")
    that("computed tokens of b and c", [each.num_computed_tokens for each in requests[1:]]).gives([0, 0])


def test_all_who_had_found_it_may_write(unforked, a_request):
    """b and c are about to fill blocks that both hold: whoever writes first needs a copy, and somebody must look."""
    scheduler = unforked([a_request(name, 9, 3) for name in "abc"])
    scheduler.schedule()
    that("_may_share_tails while a is to fill them", scheduler._may_share_tails).gives(False)
    scheduler.abort_request("a")
    that("_may_share_tails when release has left them to b and c", scheduler._may_share_tails).gives(True)


def test_what_is_lost_stays_lost(unforked, a_request):
    """c found a block of a's and one of b's. a leaves, so c has 0 computed tokens. Then b leaves: 0 is not made 4."""
    requests = [a_request("a", 5, 3), a_request("b", 9, 3), a_request("c", 13, 3)]
    scheduler = unforked(requests)
    that("the step that fails", scheduler.schedule().num_scheduled_tokens).gives({"a": 5, "b": 5, "c": 5})
    that("c's computed tokens", requests[2].num_computed_tokens).gives(8)
    scheduler.abort_request("a")
    that("c's computed tokens without a, who was to fill block 0", requests[2].num_computed_tokens).gives(0)
    scheduler.abort_request("b")
    that("c's computed tokens without b either, who was to fill block 1", requests[2].num_computed_tokens).gives(0)


def test_preempted_before_the_report(unforked, a_request, a_step):
    """Who loses its place leaves nothing written behind either, whatever its end."""
    scheduler = unforked([a_request("old", [5] * 3), a_request("young", 9)])
    scheduler.schedule()
    call(scheduler.preempt, scheduler.running[-1], SchedulerOutput()).gives(None)
    scheduler.check()
    call(scheduler.find_prefix, a_request("c", 9)).gives([])


def test_what_was_written_before_stays(unforked, a_request, a_step):
    """Only what the lost step was to fill is forgotten. a had a block from before, and so have all who found it."""
    a, b = a_request("a", 7), a_request("b", [1, 1, 1, 1, 1, 1, 1, 7, 3, 3, 3])
    scheduler = unforked([a])
    a_step(scheduler)
    scheduler.add_request(b)
    that("the step that fails", scheduler.schedule().num_scheduled_tokens).gives({"a": 1, "b": 3})
    that("b's computed tokens", b.num_computed_tokens).gives(8)
    scheduler.abort_request("a")
    that("b's computed tokens without a", b.num_computed_tokens).gives(4)
    that("blocks that are found", len(call(scheduler.find_prefix, a_request("c", 9)).value)).gives(1)
    that("the step after it", a_step(scheduler).num_scheduled_tokens).gives({"b": 7})


def test_taken_back_from_the_whole_batch(unforked, a_request, a_step):
    """Nobody leaves, but the next step cannot order the same: take_back(running). Who was to fill a block keeps all."""
    a, b = a_request("a", 7), a_request("b", [1, 1, 1, 1, 1, 1, 1, 7, 3, 3, 3])
    scheduler = unforked([a])
    a_step(scheduler)
    scheduler.add_request(b)
    that("the step that fails", scheduler.schedule().num_scheduled_tokens).gives({"a": 1, "b": 3})
    call(scheduler.take_back, scheduler.running).gives(None)
    that("computed tokens of a and b", (a.num_computed_tokens, b.num_computed_tokens)).gives((7, 4))
    that("blocks that are found", len(call(scheduler.find_prefix, a_request("c", 9)).value)).gives(1)
    that("_may_share_tails", scheduler._may_share_tails).gives(True)


def test_the_reader_may_leave(unforked, a_request, a_step):
    """Not a but b, who had found a's blocks, leaves before the report: a goes on to fill them, and they keep names."""
    a, b = a_request("a", 9), a_request("b", 9)
    scheduler = unforked([a, b])
    output = scheduler.schedule()
    scheduler.abort_request("b")
    scheduler.check()
    that("blocks that are found", call(scheduler.find_prefix, a_request("c", 9)).value).gives([0, 1])
    that("a's computed tokens", a.num_computed_tokens).gives(0)
    scheduler.update_from_output(output, {"a": 7})
    that("a's computed tokens after the report", a.num_computed_tokens).gives(9)


def test_an_end_after_the_report(unforked, a_request, a_step):
    """Reported is written: who leaves then leaves its blocks behind, with their names, and readers lose nothing."""
    a, b = a_request("a", 9), a_request("b", 9)
    scheduler = unforked([a, b])
    a_step(scheduler)
    scheduler.abort_request("a")
    that("b's computed tokens", b.num_computed_tokens).gives(9)
    that("blocks that are found", call(scheduler.find_prefix, a_request("c", 9)).value).gives([0, 1])


# Against a model


@dataclass
class Model:
    """What a production scheduler does, written with lists and whole prefixes, and without a hash."""

    num_blocks: int
    max_num_seqs: int
    budget: int
    waiting: list[dict[str, Any]] = field(default_factory=list)
    running: list[dict[str, Any]] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)
    cached: list[tuple[Any, int]] = field(default_factory=list)  # (salt and whole prefix, block), oldest first

    def __post_init__(self):
        self.free = list(range(self.num_blocks))

    def find(self, it):
        found = []
        for end in range(4, len(it["tokens"]), 4):  # the last token is never in it
            blocks = [block for name, block in self.cached if name == (it["salt"], it["tokens"][:end])]
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def take(self):
        block = self.free.pop(0)
        self.cached = [(name, each) for name, each in self.cached if each != block]
        self.owners[block] = 1
        return block

    def let_go(self, it):
        for block in reversed(it["blocks"]):
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)
        it["blocks"], it["computed"] = [], 0

    def name(self, it, num_new):
        for end in range(4, it["computed"] + num_new + 1, 4):
            block = it["blocks"][end // 4 - 1]
            if end > it["computed"] and all(each != block for _, each in self.cached):
                self.cached.append(((it["salt"], it["tokens"][:end]), block))

    def step(self):
        """[(id, tokens, blocks)], and who is preempted."""
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
            self.name(it, 1)
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
                self.owners[block] = self.owners.get(block, 0) + 1
            it["blocks"], it["computed"] = found + [self.take() for _ in range(missing)], 4 * len(found)
            self.name(it, num_new)
            self.running.append(self.waiting.pop(0))
            work.append((it["id"], num_new, list(it["blocks"])))
            left -= num_new
        return work, preempted

    def report(self, work, token_ids):
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
def test_a_production_scheduler_does_the_same(unforked, seed):
    """The same blocks, hits and victims, in the same order, in every step of a random run."""
    rng = random.Random(seed)
    num_blocks, seats, budget = rng.randint(8, 20), rng.randint(1, 6), rng.choice([24, 40, 200])
    model = Model(num_blocks, seats, budget)
    scheduler = unforked(num_blocks=num_blocks, max_num_seqs=seats, max_num_batched_tokens=budget)
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
        model.report(work, token_ids)
        scheduler.check()
        that(f"free blocks after step {step}", scheduler.pool.num_free).gives(len(model.free))
        if not scheduler.has_unfinished and not coming:
            return
    that("requests that are left after 400 steps", scheduler.num_running + scheduler.num_waiting).gives(0)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(12))
def test_everybody_reads_his_own(unforked, memory, preemption, seed):
    """Random runs in which clients leave and steps fail, on a memory that knows what every slot really holds."""
    rng = random.Random(seed)
    scheduler = unforked(
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
        unfinished = [*scheduler.running, *scheduler.waiting.values()]
        if unfinished and rng.random() < 0.1:
            scheduler.abort_request(rng.choice(unfinished).request_id)
            scheduler.check()
        output = call(scheduler.schedule).value
        fails = rng.random() < 0.1
        device.run(output, fails=fails)
        if not fails:
            token_ids = {request_id: rng.randrange(2) for request_id in output.num_scheduled_tokens}
            scheduler.update_from_output(output, token_ids)
        scheduler.check()
        if turn >= 60 and not scheduler.has_unfinished:
            break
    that("unfinished requests", scheduler.has_unfinished).gives(False)
    that("used blocks", scheduler.pool.num_used).gives(0)
