"""Phase 8, task 4: a request is forked, and a request that writes into a shared block gets a copy first."""

from __future__ import annotations

import random

import pytest

from minicache.errors import InvariantError
from minicache.request import Request
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.chunked import ChunkedPrefillScheduler
from minicache.scheduler.observe import observe
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.sharing import SharingScheduler
from minicache_course.checks import call, that
from minicache_course.seeds import fresh


def ids(requests):
    return [request.request_id for request in requests]


@pytest.fixture
def decoding(sharing, a_request, a_step):
    """`decoding(num_prompt, num_steps=1, …)`: a scheduler in which request "a" has computed its prompt, and itself."""

    def create(num_prompt, num_steps=1, max_tokens=20, **options):
        request = a_request("a", num_prompt, max_tokens)
        scheduler = sharing([request], **options)
        for _ in range(num_steps):
            a_step(scheduler)
        return scheduler, request

    return create


# A fork


def test_a_child_goes_on_where_its_parent_stands(decoding):
    """A child has the same prompt, options and tokens under another id, and is in the batch at once."""
    scheduler, a = decoding(6, num_steps=2)
    b = call(scheduler.fork_request, "a", "b").value
    that("id, prompt, max_tokens", (b.request_id, b.prompt_token_ids, b.max_tokens)).gives(("b", [1] * 6, 20))
    that("generated so far", b.output_token_ids).gives([7, 7])
    that("status, computed tokens", (b.status.name, b.num_computed_tokens)).gives(("RUNNING", 7))
    that("the batch, the queue", (ids(scheduler.running), list(scheduler.waiting))).gives((["a", "b"], []))
    that("their arrival_index", (a.arrival_index, b.arrival_index)).gives((0, 0))
    that("their fork_index", (a.fork_index, b.fork_index)).gives((0, 1))
    scheduler.check()


def test_a_child_is_registered_and_not_queued(decoding):
    """A child is registered, but not queued: `add_request` would do both."""
    scheduler, _ = decoding(6)
    scheduler.fork_request("a", "b")
    that("the waiting queue", list(scheduler.waiting)).gives([])
    call(scheduler.head).gives(None)


def test_a_child_has_its_parents_options(sharing, a_request, a_step):
    """Stop tokens, priority, group, salt and adapter: a child without the salt would cache blocks for other tenants."""
    options = {"stop_token_ids": (3,), "ignore_eos": True, "priority": 2, "group": "g", "arrival_time": 1.5}
    scheduler = sharing([a_request("a", 6, cache_salt="s", adapter="l", **options)], prefix_caching=True)
    a_step(scheduler)
    b = call(scheduler.fork_request, "a", "b").value
    seen = b.stop_token_ids, b.ignore_eos, b.priority, b.group, b.arrival_time, b.cache_salt, b.adapter
    that("stops, ignore_eos, priority, group, time, salt, adapter", seen).gives(
        (frozenset({3}), True, 2, "g", 1.5, "s", "l")
    )


def test_a_fork_takes_no_block(decoding):
    """Both have the same blocks, including the unfinished last one, in separate lists."""
    scheduler, a = decoding(6)
    b = call(scheduler.fork_request, "a", "b").value
    that("blocks of both", (a.block_ids, b.block_ids)).gives(([0, 1], [0, 1]))
    that("used blocks", scheduler.pool.num_used).gives(2)
    that("references of both blocks", [scheduler.pool.ref_count(block) for block in (0, 1)]).gives([2, 2])
    b.block_ids.append(99)
    b.output_token_ids.append(99)
    that("a's blocks and tokens when b's lists grow", (a.block_ids, a.output_token_ids)).gives(([0, 1], [7]))


def test_the_first_write_copies(decoding, a_step):
    """6 tokens in blocks of 4: the second block is half full, and both write slot 2 of it. a is first, and copies."""
    scheduler, a = decoding(6)
    b = scheduler.fork_request("a", "b")
    output = a_step(scheduler)
    that("the step", output.num_scheduled_tokens).gives({"a": 1, "b": 1})
    that("blocks_to_copy", output.blocks_to_copy).gives([(1, 2)])
    that("blocks of both", (a.block_ids, b.block_ids)).gives(([0, 2], [0, 1]))
    that("references of blocks 0, 1, 2", [scheduler.pool.ref_count(block) for block in range(3)]).gives([2, 1, 1])
    that("blocks_to_copy of the next step", a_step(scheduler).blocks_to_copy).gives([])


def test_of_four_siblings_three_get_copies(decoding, a_step):
    """Of four requests that share a block, three get copies, and the last writes into the old one."""
    scheduler, _ = decoding(6)
    for name in "bcd":
        scheduler.fork_request("a", name)
    output = a_step(scheduler)
    that("blocks_to_copy", output.blocks_to_copy).gives([(1, 2), (1, 3), (1, 4)])
    that("second blocks", [request.block_ids[1] for request in scheduler.running]).gives([2, 3, 4, 1])


def test_a_full_block_is_never_copied(decoding, a_step):
    """8 tokens fill two blocks of 4, which are only read from now on. Both continue in new blocks."""
    scheduler, a = decoding(8)
    b = scheduler.fork_request("a", "b")
    output = a_step(scheduler)
    that("blocks_to_copy", output.blocks_to_copy).gives([])
    that("blocks of both", (a.block_ids, b.block_ids)).gives(([0, 1, 2], [0, 1, 3]))


def test_each_has_a_future_of_its_own(decoding, memory):
    """Different tokens from the fork on, and at every step each reads its own."""
    scheduler, a = decoding(6, num_steps=0)
    device = memory(scheduler)
    output = scheduler.schedule()
    device.run(output)
    scheduler.update_from_output(output, {"a": 7})
    b = scheduler.fork_request("a", "b")
    for step in range(9):
        output = call(scheduler.schedule).value
        device.run(output)
        scheduler.update_from_output(output, {"a": 10 + step, "b": 20 + step})
        scheduler.check()
    that("a's tokens", a.output_token_ids).gives([7, *range(10, 19)])
    that("b's tokens", b.output_token_ids).gives([7, *range(20, 29)])
    that("blocks that both have", [block for block in a.block_ids if block in b.block_ids]).gives([0])


def test_the_last_reference_needs_no_copy(decoding, a_step):
    """The child has finished before either wrote: the block is a's alone again."""
    scheduler, a = decoding(6)
    scheduler.fork_request("a", "b")
    scheduler.abort_request("b")
    scheduler.check()
    that("blocks_to_copy", a_step(scheduler).blocks_to_copy).gives([])
    that("a's blocks", a.block_ids).gives([0, 1])


# A child with other tokens


@pytest.mark.parametrize(
    ("num_prompt", "outputs", "num_computed", "blocks", "copies"),
    [
        (6, [7, 7, 7], 8, [0, 1], 0),  # equal, and the blocks are full
        (5, [7, 7, 7], 7, [0, 1], 1),
        (5, [7, 7, 9], 7, [0, 1], 1),  # another newest token: it is not computed yet
        (8, [], 7, [0, 1], 1),  # the prompt's last token again, in a block that is full of shared tokens
        (9, [], 8, [0, 1], 0),  # the same, in a separate block
        (9, [7, 8], 10, [0, 1, 2], 1),
        (9, [8, 7], 9, [0, 1, 2], 1),
        (6, [7, 7, 8, 9], 8, [0, 1], 0),  # the same up to the end of a block
        (7, [7, 8, 9, 9], 8, [0, 1], 0),
        (6, [], 4, [0], 0),  # a has filled block 1 with tokens that b has not: b begins that block anew
        (6, [7, 8], 4, [0], 0),
        (7, [8, 9], 4, [0], 0),
        (1, [], 0, [], 0),
        (4, [8], 4, [0], 0),
    ],
)
def test_what_both_have_is_shared(decoding, a_step, num_prompt, outputs, num_computed, blocks, copies):
    """a has generated 7 7 7, of which two are computed. Its child has other tokens, and computes what differs."""
    scheduler, _ = decoding(num_prompt, num_steps=3)
    b = call(scheduler.fork_request, "a", "b", list(outputs)).value
    whose = f"of b: {num_prompt} tokens of prompt, then {outputs}, where a has [7, 7, 7]"
    that(f"tokens {whose}", b.output_token_ids).gives(outputs)
    that(f"computed tokens {whose}", b.num_computed_tokens).gives(num_computed)
    that(f"blocks {whose}", b.block_ids).gives(blocks)
    scheduler.check()
    output = a_step(scheduler)
    that(f"the step of a, and {whose}", output.num_scheduled_tokens).gives(
        {"a": 1, "b": num_prompt + len(outputs) - num_computed}
    )
    that(f"copies in the step of a, and {whose}", len(output.blocks_to_copy)).gives(copies)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_prompt", range(3, 7))
def test_any_child_reads_its_own_tokens(sharing, a_request, memory, num_prompt, prefix_caching):
    """a has generated 5 tokens; children diverge after 0, 1, … of them, with other tokens or with none."""
    for num_same in range(6):
        for more in ([], [90], [90, 91, 92, 93, 94]):
            scheduler = sharing([a_request("a", num_prompt, 30)], prefix_caching=prefix_caching)
            device = memory(scheduler)
            for step in range(12):
                if step == 5:
                    outputs = [50, 51, 52, 53, 54][:num_same] + more
                    b = call(scheduler.fork_request, "a", "b", list(outputs)).value
                output = call(scheduler.schedule).value
                device.run(output)
                token_ids = {name: 50 + step + 20 * (name == "b") for name in output.num_scheduled_tokens}
                scheduler.update_from_output(output, token_ids)
                scheduler.check()
                if step == 8:
                    scheduler.abort_request("a")
            that("b's tokens", b.output_token_ids).gives([*outputs, *range(75, 82)])


def test_what_the_parent_filled_stays_right(sharing, a_request, a_step):
    """A block is cached under a's tokens. A child with other tokens does not share it, so it is never overwritten."""
    scheduler = sharing([a_request("a", [1, 2, 3, 4, 5, 6], 20)], prefix_caching=True)
    for _ in range(4):
        a_step(scheduler)
    scheduler.fork_request("a", "b", [7, 9])  # a has 1 2 3 4, 5 6 7 7, 7 …; b is to have 1 2 3 4, 5 6 7 9
    scheduler.abort_request("a")
    a_step(scheduler)
    scheduler.abort_request("b")
    for last, found in ((7, 2), (9, 2), (5, 1)):
        request = a_request("c", [1, 2, 3, 4, 5, 6, 7, last, 0])
        that(f"blocks found of 1 2 3 4, 5 6 7 {last}", len(scheduler.find_prefix(request))).gives(found)


def test_a_child_has_hashes_of_its_own_tokens(sharing, a_request, a_step):
    """The parent's block_hashes cover the parent's tokens: a child with other tokens computes its own."""
    scheduler = sharing([a_request("a", [1, 2, 3, 4, 5, 6], 20)], prefix_caching=True)
    for _ in range(4):
        a_step(scheduler)
    scheduler.find_prefix(scheduler.running[0])  # a has 1 2 3 4, 5 6 7 7, and the hashes of both blocks are known
    b = scheduler.fork_request("a", "b", [7, 9])
    fresh = a_request("fresh", [1, 2, 3, 4, 5, 6, 7, 9])
    same = scheduler.hashes(b, 2)[:2] == scheduler.hashes(fresh, 2)[:2]
    that("whether the hashes of b are those of 1 2 3 4, 5 6 7 9", same).gives(True)


def test_the_callers_list_of_outputs_is_copied(decoding):
    """The child's output_token_ids are a separate list: later changes to the caller's list do not affect it."""
    scheduler, _ = decoding(6)
    outputs = [7, 8]
    b = scheduler.fork_request("a", "b", outputs)
    outputs.append(9)
    that("b's tokens", b.output_token_ids).gives([7, 8])


# Its position


def test_siblings_stay_together(decoding, a_request, a_step):
    """Children follow their siblings and precede later arrivals, in the order in which they were forked."""
    scheduler, _ = decoding(6)
    scheduler.add_request(a_request("z", 4))
    a_step(scheduler)
    made = [scheduler.fork_request(*pair) for pair in (("a", "b"), ("a", "c"), ("b", "d"), ("z", "y"))]
    that("the batch", ids(scheduler.running)).gives(["a", "b", "c", "d", "z", "y"])
    that("fork_index of b, c, d, y", [request.fork_index for request in made]).gives([1, 2, 3, 4])
    that("arrival_index", [request.arrival_index for request in scheduler.running]).gives([0, 0, 0, 0, 1, 1])
    scheduler.check()


def test_siblings_stay_together_with_priorities(a_request, a_step):
    """x arrived after y, but precedes it by its priority. So does its child: `priority_key` decides."""
    scheduler = SharingScheduler(num_blocks=20, block_size=4)
    for request in (a_request("y", 5, priority=1), a_request("x", 5, priority=0)):
        scheduler.add_request(request)
    a_step(scheduler)
    that("the batch", ids(scheduler.running)).gives(["x", "y"])
    child = call(scheduler.fork_request, "x", "x's child").value
    that("the batch after the fork", ids(scheduler.running)).gives(["x", child.request_id, "y"])


def test_a_later_arrival_stands_behind_all_siblings(decoding, a_request, a_step):
    """The next request that is added has arrived after all of them."""
    scheduler, _ = decoding(6)
    scheduler.fork_request("a", "b")
    late = a_request("late", 4)
    scheduler.add_request(late)
    a_step(scheduler)
    that("the batch", ids(scheduler.running)).gives(["a", "b", "late"])
    that("whether late's arrival_index is after a's", late.arrival_index > 0).gives(True)


def test_the_youngest_sibling_is_preempted_first(decoding, a_step):
    """Blocks for a and two children, and then no more: c is preempted, and comes back when blocks are free."""
    scheduler, _ = decoding(8, num_blocks=5)
    scheduler.fork_request("a", "b")
    scheduler.fork_request("a", "c")
    that("the step", a_step(scheduler).num_scheduled_tokens).gives({"a": 1, "b": 1, "c": 1})
    for _ in range(3):
        a_step(scheduler)
    that("preempted when a needs one more", a_step(scheduler).preempted[:1]).gives(["c"])
    that("the head of the batch", ids(scheduler.running)[:1]).gives(["a"])


def test_the_id_of_a_finished_child_is_free_again(decoding, a_step):
    """A finished child is removed, like any request."""
    scheduler, _ = decoding(6)
    scheduler.fork_request("a", "b")
    scheduler.abort_request("b")
    that("forked again", call(scheduler.fork_request, "a", "b").value.fork_index).gives(2)
    a_step(scheduler)


# Refusals


@pytest.mark.parametrize("arguments", [("x", "b"), ("w", "b"), ("a", "a"), ("a", "w"), ("a", "b", [7, 7, 7])])
def test_a_refused_fork_changes_nothing(sharing, a_request, a_step, arguments):
    """No such request, one that still waits, an id in use, an output at its maximum length: ValueError."""
    scheduler = sharing([a_request("a", 6, 3)])
    a_step(scheduler)
    scheduler.add_request(a_request("w", 4))
    call(scheduler.fork_request, *arguments).raises(ValueError)
    scheduler.check()
    seen = ids(scheduler.running), list(scheduler.waiting), scheduler.pool.ref_count(1)
    that("the batch, the queue, references of block 1", seen).gives((["a"], ["w"], 1))
    that("fork_index of the next fork", scheduler.fork_request("a", "b").fork_index).gives(1)


def test_a_child_must_fit_into_max_model_len(sharing, a_request, a_step):
    """At 10 tokens a request finishes. A child that already has 10 would not: only a new token is checked."""
    scheduler = sharing([a_request("a", 6, 40)], max_model_len=10)
    a_step(scheduler)
    for outputs in ([7] * 6, [7] * 4):
        call(scheduler.fork_request, "a", "b", outputs).raises(ValueError)
    that("the batch", ids(scheduler.running)).gives(["a"])
    b = call(scheduler.fork_request, "a", "b", [7] * 3).value
    a_step(scheduler)
    that("b's tokens, of max_model_len 10", b.num_tokens).gives(10)
    that("b's status", b.status.name).gives("FINISHED_LENGTH")


def test_a_request_still_in_its_prompt_cannot_be_forked(a_request):
    """Phase 9's scheduler computes prompts in chunks: after the first one the request has no token yet."""
    scheduler = ChunkedPrefillScheduler(num_blocks=20, block_size=4, max_num_batched_tokens=5)
    request = a_request("a", 9)
    scheduler.add_request(request)
    scheduler.update_from_output(scheduler.schedule(), {"a": 7})
    that("its status and output", (request.status.name, request.output_token_ids)).gives(("RUNNING", []))
    call(scheduler.fork_request, "a", "b").raises(ValueError)


def test_no_fork_after_a_failed_step(decoding):
    """After a recovery every request waits with nothing computed: there is nothing to share."""
    scheduler, _ = decoding(6)
    scheduler.schedule()
    scheduler.recover()
    call(scheduler.fork_request, "a", "b").raises(ValueError)


def test_no_fork_in_the_middle_of_a_step(decoding):
    """Between schedule() and update_from_output() a fork is refused; after the commit it is allowed again."""
    scheduler, _ = decoding(6)
    output = scheduler.schedule()
    call(scheduler.fork_request, "a", "b").raises(ValueError)
    scheduler.update_from_output(output, {"a": 7})
    that("after the commit", call(scheduler.fork_request, "a", "b").value.output_token_ids).gives([7, 7])


def test_no_fork_without_a_batch_slot(decoding):
    """A batch of at most two requests, with two in it."""
    scheduler, _ = decoding(6, max_num_seqs=2)
    scheduler.fork_request("a", "b")
    call(scheduler.fork_request, "a", "c").raises(ValueError)
    that("the batch, the queue", (ids(scheduler.running), list(scheduler.waiting))).gives((["a", "b"], []))
    scheduler.check()


# The copy is paid for


def test_the_flag_outlives_a_later_fork(sharing, a_request, a_step):
    """a's last block is half full, z's is full. a is forked, then z: a's block is copied, though z needs no copy."""
    scheduler = sharing([a_request("a", 6), a_request("z", 8)])
    a_step(scheduler)
    scheduler.fork_request("a", "a's child")
    scheduler.fork_request("z", "z's child")
    that("blocks_to_copy", a_step(scheduler).blocks_to_copy).gives([(1, 4)])


def test_the_flag_outlives_a_request_that_finishes(decoding, a_step):
    """Three share an unfinished block, and one of them finishes. The other two still share it: the first one copies.

    `_may_share_tails` is cleared when the batch is empty, and not whenever a request leaves it.
    """
    scheduler, _ = decoding(6)
    for child_id in "bc":
        scheduler.fork_request("a", child_id)
    scheduler.abort_request("c")
    that("blocks_to_copy", a_step(scheduler).blocks_to_copy).gives([(1, 2)])


def test_shared_tails_are_looked_for_only_after_a_fork(a_request, a_step):
    """`written_and_shared` is called only while `_may_share_tails` is True, by `blocks_missing` and by `grow`."""
    asked = []

    class Asked(SharingScheduler):
        """Records the calls."""

        def written_and_shared(self, request):
            asked.append(request.request_id)
            return super().written_and_shared(request)

    scheduler = Asked(num_blocks=20, block_size=4)
    scheduler.add_request(a_request("a", 6, 20))
    for _ in range(4):
        a_step(scheduler)
    that("requests that written_and_shared was called for, before any fork", asked).gives([])
    scheduler.fork_request("a", "b")
    a_step(scheduler)
    that("requests that it was called for, after a fork", sorted({*asked})).gives(["a", "b"])
    for request_id in "ab":
        scheduler.abort_request(request_id)
    a_step(scheduler)
    asked.clear()
    scheduler.add_request(a_request("c", 6))
    for _ in range(4):
        a_step(scheduler)
    that("requests that it was called for, after the batch was empty", asked).gives([])


def test_written_and_shared_are_indices_of_blocks(decoding):
    """Indices, not ids: a writes its second block next, and b has it too. The first is only read."""
    scheduler, a = decoding(6)
    call(scheduler.written_and_shared, a).gives([])
    b = scheduler.fork_request("a", "b")
    call(scheduler.written_and_shared, a).gives([1])
    call(scheduler.written_and_shared, b).gives([1])
    scheduler.pool.free([1])
    call(scheduler.written_and_shared, a).gives([])
    scheduler.pool.share([1])


def test_nothing_is_written_into_full_blocks(decoding):
    """8 tokens, all computed: the next goes into a third block, which is not allocated yet."""
    scheduler, a = decoding(8)
    scheduler.fork_request("a", "b")
    call(scheduler.written_and_shared, a).gives([])
    call(scheduler.blocks_missing, a).gives(1)


def test_a_copy_is_a_block_that_is_missing(decoding):
    """The last block of both has room, so phase 6 would say 0; but it has two references."""
    scheduler, a = decoding(6)
    call(scheduler.blocks_missing, a).gives(0)
    b = scheduler.fork_request("a", "b")
    call(scheduler.blocks_missing, a).gives(1)
    call(scheduler.blocks_missing, b).gives(1)
    that("free blocks: blocks_missing takes none", scheduler.pool.num_free).gives(18)


def test_a_copy_and_a_new_block_are_both_missing(decoding, a_step):
    """b has five tokens more than a, from the middle of a block on: it lacks a copy, and a new block."""
    scheduler, a = decoding(6)
    b = scheduler.fork_request("a", "b", [7, 8, 8, 8, 8])
    call(scheduler.written_and_shared, b).gives([1])
    call(scheduler.blocks_missing, b).gives(2)
    call(scheduler.blocks_missing, a).gives(1)
    output = a_step(scheduler)
    that("the step", output.num_scheduled_tokens).gives({"a": 1, "b": 5})
    that("copies: a's, and b has the old block alone then", len(output.blocks_to_copy)).gives(1)
    that("blocks that they hold", (len(a.block_ids), len(b.block_ids))).gives((2, 3))


def test_two_copies_are_two_blocks(decoding, a_step):
    """b has three tokens to compute in two blocks that a third request has as well: it needs two copies."""
    scheduler, _ = decoding(6)
    b = scheduler.fork_request("a", "b")
    a_step(scheduler)
    a_step(scheduler)
    a_step(scheduler)  # 9 tokens of b are computed, in three blocks
    scheduler.fork_request("b", "c")
    b.num_computed_tokens = 7  # as if what it had computed last were lost
    call(scheduler.written_and_shared, b).gives([1, 2])
    call(scheduler.blocks_missing, b).gives(2)
    output = SchedulerOutput()
    call(scheduler.copy_on_write, b, output).gives(None)
    that("copies", len(output.blocks_to_copy)).gives(2)
    call(scheduler.written_and_shared, b).gives([])


def test_copy_on_write_replaces_the_block_and_names_the_pair(decoding):
    """The old block loses a reference, the new one takes its position, and the pair is (old, new)."""
    scheduler, a = decoding(6)
    scheduler.fork_request("a", "b")
    output = SchedulerOutput()
    call(scheduler.copy_on_write, a, output).gives(None)
    that("blocks_to_copy", output.blocks_to_copy).gives([(1, 2)])
    that("a's blocks", a.block_ids).gives([0, 2])
    that("references of blocks 0, 1, 2", [scheduler.pool.ref_count(block) for block in range(3)]).gives([2, 1, 1])
    call(scheduler.copy_on_write, a, output).gives(None)
    that("blocks_to_copy, asked again", output.blocks_to_copy).gives([(1, 2)])
    scheduler.check()


def test_without_a_free_block_the_child_is_preempted(decoding, a_step):
    """Two blocks, both shared by two, and none free. The copy needs one: the child is preempted, and none is needed."""
    scheduler, _ = decoding(6, num_blocks=2, max_tokens=2)
    b = scheduler.fork_request("a", "b")
    output = call(scheduler.schedule).value
    seen = output.num_scheduled_tokens, output.preempted, output.blocks_to_copy
    that("work, preempted, copies", seen).gives(({"a": 1}, ["b"], []))
    that("finished", ids(scheduler.update_from_output(output, {"a": 7}))).gives(["a"])
    that("b's status and blocks", (b.status.name, b.block_ids)).gives(("WAITING", []))
    that("the next step: b computes all that it has", a_step(scheduler).num_scheduled_tokens).gives({"b": 7})
    that("b's tokens, and its finish reason", (b.output_token_ids, b.finish_reason)).gives(([7, 7], "length"))


def test_a_preempted_child_finds_what_its_parent_filled(decoding, a_step):
    """The same with a prefix cache: the block that a filled is found when b comes back."""
    scheduler, _ = decoding(6, num_blocks=3, max_tokens=2, prefix_caching=True)
    scheduler.fork_request("a", "b")
    scheduler.fork_request("a", "c")
    output = a_step(scheduler)
    that("work and preempted", (output.num_scheduled_tokens, output.preempted)).gives(({"a": 1, "b": 1}, ["c"]))
    that("blocks_to_copy", output.blocks_to_copy).gives([(1, 2)])
    that("the next step: of c's 7 tokens 4 are found", a_step(scheduler).num_scheduled_tokens).gives({"c": 3})


# The batch


def test_without_a_fork_it_grows_as_in_phase_6(decoding, a_step):
    """Without a fork it is phase 6's batch: a block when the last one is full, not a step earlier."""
    scheduler, a = decoding(3, num_steps=0)
    blocks = []
    for _ in range(8):
        a_step(scheduler)
        blocks.append(len(a.block_ids))
    that("blocks in steps 0 … 7, of 3 … 10 tokens", blocks).gives([1, 1, 2, 2, 2, 2, 3, 3])


def test_grow_allocates_what_blocks_missing_says():
    """A later phase may override blocks_missing to need more blocks or fewer: grow allocates that many."""

    class OneAhead(SharingScheduler):
        """Needs a spare block after that of its newest token."""

        def blocks_missing(self, request):
            wanted = -(-request.num_tokens // 4) + 1
            return max(0, wanted - len(request.block_ids)) + len(self.written_and_shared(request))

    scheduler = OneAhead(num_blocks=20, block_size=4)
    scheduler.add_request(Request("a", [1] * 6, 20))
    for step in range(6):
        output = call(scheduler.schedule).value
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        if step == 0:
            scheduler.fork_request("a", "b")
    that("blocks of two requests with 12 tokens", [len(each.block_ids) for each in scheduler.running]).gives([4, 4])


def test_a_child_fills_blocks_too(sharing, a_request, a_step):
    """A child with other tokens computes five of them in one step: the block in the middle is found later."""
    scheduler = sharing([a_request("a", 6, 20)], prefix_caching=True)
    for _ in range(3):
        a_step(scheduler)
    child = call(scheduler.fork_request, "a", "child", [7, 8, 8]).value
    that("tokens of the step", a_step(scheduler).num_scheduled_tokens).gives({"a": 1, "child": 5})
    found = scheduler.find_prefix(a_request("turn", [*[1] * 6, 7, 8, 8]))
    that("blocks of the child's first eight tokens that are found", found).gives(child.block_ids[:2])


def test_siblings_recover_with_their_own_tokens(sharing, a_request, a_step):
    """After a failed step each waits with its own tokens, behind its parent, and they share found blocks."""
    scheduler = sharing([a_request("a", 6), a_request("z", [2] * 4)], prefix_caching=True)
    a_step(scheduler)
    b = scheduler.fork_request("a", "b", [7, 8])
    a_step(scheduler)
    scheduler.schedule()
    scheduler.recover()
    that("the waiting queue", list(scheduler.waiting)).gives(["a", "b", "z"])
    that("b's tokens", b.output_token_ids).gives([7, 8, 7])
    that("the step after it", a_step(scheduler).num_scheduled_tokens).gives({"a": 8, "b": 5, "z": 6})
    that("copies of the next", a_step(scheduler).blocks_to_copy).gives([])


# Anything at all


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(6))
def test_random_forks_ends_and_failures(sharing, memory, preemption, prefix_caching, seed):
    """Random runs under the auditor, on a memory that tracks every slot: forks, aborts, failing steps."""
    rng = random.Random(fresh(seed))
    options = {"preemption": preemption, "num_host_blocks": 6 if preemption == "swap" else 0}
    options |= {"num_blocks": rng.randint(6, 24), "max_num_seqs": rng.randint(2, 8), "prefix_caching": prefix_caching}
    scheduler = observe(sharing(**options), SharingAuditor())
    device, numbers, served = memory(scheduler), iter(range(10**6)), []
    for iteration in range(200):
        if iteration < 60 and rng.random() < 0.3:
            served.append(Request(next(numbers), [rng.randrange(2)] * rng.randint(1, 16), rng.randint(1, 9)))
            scheduler.add_request(served[-1])
        parents = [each for each in scheduler.running if each.output_token_ids]
        if iteration < 60 and parents and rng.random() < 0.4:
            served += fork(rng, scheduler, rng.choice(parents), numbers)
        unfinished = [*scheduler.running, *scheduler.waiting.values()]
        if unfinished and rng.random() < 0.05:
            scheduler.abort_request(rng.choice(unfinished).request_id)
        audited(scheduler, device, rng)
        if iteration >= 60 and not scheduler.has_unfinished:
            break
    that("unfinished requests", [each for each in served if not each.status.is_finished]).gives([])
    that("used blocks", scheduler.pool.num_used).gives(0)


def fork(rng, scheduler, parent, numbers):
    """Fork a request, with some of its tokens and perhaps another one, if there is a slot. The child, in a list."""
    outputs = parent.output_token_ids[: rng.randint(0, len(parent.output_token_ids))]
    outputs += [rng.randrange(9)] * rng.randint(0, 3)
    if len(outputs) >= parent.max_tokens or scheduler.num_running >= scheduler.max_num_seqs:
        return []
    return [call(scheduler.fork_request, parent.request_id, next(numbers), outputs).value]


def audited(scheduler, device, rng):
    """A step, which is committed, or fails and is recovered."""
    __tracebackhide__ = True
    try:
        output = call(scheduler.schedule).value
        fails = rng.random() < 0.07
        device.run(output, fails=fails)
        if fails:
            scheduler.recover()
        else:
            token_ids = {request_id: rng.randrange(3) for request_id in output.num_scheduled_tokens}
            scheduler.update_from_output(output, token_ids)
        scheduler.check()
    except InvariantError as error:
        that("the auditor", f"InvariantError: {error}").gives("no error")
