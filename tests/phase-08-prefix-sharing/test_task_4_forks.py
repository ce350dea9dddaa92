"""Phase 8, task 4: a request is forked, and who writes into a block with two owners gets a copy first."""

from __future__ import annotations

import random

import pytest

from minicache.course.checks import call, that
from minicache.errors import InvariantError
from minicache.request import Request
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.observe import observe
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.sharing import FairSharingScheduler, SharingScheduler


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


def test_a_twin(decoding):
    """The same prompt, options and tokens under another id, in the batch at once."""
    scheduler, a = decoding(6, num_steps=2)
    b = call(scheduler.fork_request, "a", "b").value
    that("id, prompt, max_tokens", (b.request_id, b.prompt_token_ids, b.max_tokens)).gives(("b", [1] * 6, 20))
    that("generated so far", b.output_token_ids).gives([7, 7])
    that("status, computed tokens", (b.status.name, b.num_computed_tokens)).gives(("RUNNING", 7))
    that("the batch, the line", (ids(scheduler.running), list(scheduler.waiting))).gives((["a", "b"], []))
    that("their arrival_index", (a.arrival_index, b.arrival_index)).gives((0, 0))
    that("their fork_index", (a.fork_index, b.fork_index)).gives((0, 1))
    scheduler.check()


def test_a_twin_waits_in_no_line(decoding):
    """`withdraw` takes it out of all the lines that its scheduler has. `del self.waiting[…]` knows one of them."""
    scheduler, _ = decoding(6)
    scheduler.fork_request("a", "b")
    that("who waits", list(scheduler.waiting)).gives([])
    call(scheduler.head).gives(None)


def test_a_twin_wants_what_its_parent_wants(sharing, a_request, a_step):
    """Stop tokens, priority, group, salt and adapter are the parent's: a twin with no salt would read for everybody."""
    options = {"stop_token_ids": (3,), "ignore_eos": True, "priority": 2, "group": "g", "arrival_time": 1.5}
    scheduler = sharing([a_request("a", 6, cache_salt="s", adapter="l", **options)], prefix_caching=True)
    a_step(scheduler)
    b = call(scheduler.fork_request, "a", "b").value
    seen = b.stop_token_ids, b.ignore_eos, b.priority, b.group, b.arrival_time, b.cache_salt, b.adapter
    that("stops, ignore_eos, priority, group, time, salt, adapter", seen).gives(
        (frozenset({3}), True, 2, "g", 1.5, "s", "l")
    )


def test_a_fork_takes_no_block(decoding):
    """Both have the same blocks, the unfinished last one too, in lists of their own."""
    scheduler, a = decoding(6)
    b = call(scheduler.fork_request, "a", "b").value
    that("blocks of both", (a.block_ids, b.block_ids)).gives(([0, 1], [0, 1]))
    that("used blocks", scheduler.pool.num_used).gives(2)
    that("owners of both blocks", [scheduler.pool.ref_count(block) for block in (0, 1)]).gives([2, 2])
    b.block_ids.append(99)
    b.output_token_ids.append(99)
    that("a's blocks and tokens when b's lists grow", (a.block_ids, a.output_token_ids)).gives(([0, 1], [7]))


def test_the_first_who_writes_gets_a_copy(decoding, a_step):
    """6 tokens in blocks of 4: the second block is half full, and both write slot 2 of it. a is first, and copies."""
    scheduler, a = decoding(6)
    b = scheduler.fork_request("a", "b")
    output = a_step(scheduler)
    that("the step", output.num_scheduled_tokens).gives({"a": 1, "b": 1})
    that("blocks_to_copy", output.blocks_to_copy).gives([(1, 2)])
    that("blocks of both", (a.block_ids, b.block_ids)).gives(([0, 2], [0, 1]))
    that("owners of blocks 0, 1, 2", [scheduler.pool.ref_count(block) for block in range(3)]).gives([2, 1, 1])
    that("blocks_to_copy of the next step", a_step(scheduler).blocks_to_copy).gives([])


def test_a_family_of_four(decoding, a_step):
    """Of four who share a block, three get copies, and the last writes into the old one."""
    scheduler, _ = decoding(6)
    for name in "bcd":
        scheduler.fork_request("a", name)
    output = a_step(scheduler)
    that("blocks_to_copy", output.blocks_to_copy).gives([(1, 2), (1, 3), (1, 4)])
    that("second blocks", [request.block_ids[1] for request in scheduler.running]).gives([2, 3, 4, 1])


def test_a_full_block_is_never_copied(decoding, a_step):
    """8 tokens fill two blocks of 4: nobody writes into them any more. Both go on in blocks of their own."""
    scheduler, a = decoding(8)
    b = scheduler.fork_request("a", "b")
    output = a_step(scheduler)
    that("blocks_to_copy", output.blocks_to_copy).gives([])
    that("blocks of both", (a.block_ids, b.block_ids)).gives(([0, 1, 2], [0, 1, 3]))


def test_each_has_a_future_of_its_own(decoding, memory):
    """Other tokens from the fork on, and at every step both read their own."""
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


def test_the_last_owner_needs_no_copy(decoding, a_step):
    """The twin has gone before anybody wrote: the block is a's alone again."""
    scheduler, a = decoding(6)
    scheduler.fork_request("a", "b")
    scheduler.abort_request("b")
    scheduler.check()
    that("blocks_to_copy", a_step(scheduler).blocks_to_copy).gives([])
    that("a's blocks", a.block_ids).gives([0, 1])


# A twin that differs


@pytest.mark.parametrize(
    ("num_prompt", "outputs", "num_computed", "blocks", "copies"),
    [
        (6, [7, 7, 7], 8, [0, 1], 0),  # all the same, and the blocks are full
        (5, [7, 7, 7], 7, [0, 1], 1),
        (5, [7, 7, 9], 7, [0, 1], 1),  # another newest token: it is not computed yet
        (8, [], 7, [0, 1], 1),  # the prompt's last token once more, in a block that is full of what both have
        (9, [], 8, [0, 1], 0),  # the same, in a block of its own
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
    """a has generated 7 7 7, of which two are computed. Its twin has other tokens, and computes what differs."""
    scheduler, _ = decoding(num_prompt, num_steps=3)
    b = call(scheduler.fork_request, "a", "b", outputs).value
    whose = f"of b: {num_prompt} tokens of prompt, then {outputs}, where a has [7, 7, 7]"
    that(f"tokens {whose}", b.output_token_ids).gives(outputs)
    that(f"computed tokens {whose}", b.num_computed_tokens).gives(num_computed)
    that(f"blocks {whose}", b.block_ids).gives(blocks)
    scheduler.check()
    output = a_step(scheduler)
    that(f"the step of a, and {whose}", output.num_scheduled_tokens).gives(
        {"a": 1, "b": num_prompt + len(outputs) - num_computed}
    )
    that(f"copies beside a {whose}", len(output.blocks_to_copy)).gives(copies)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_prompt", range(3, 7))
def test_any_twin_reads_its_own(sharing, a_request, memory, num_prompt, prefix_caching):
    """a has generated 5 tokens; twins part from it after 0, 1, … of them, with other tokens or with none."""
    for num_same in range(6):
        for more in ([], [90], [90, 91, 92, 93, 94]):
            scheduler = sharing([a_request("a", num_prompt, 30)], prefix_caching=prefix_caching)
            device = memory(scheduler)
            for step in range(12):
                if step == 5:
                    outputs = [50, 51, 52, 53, 54][:num_same] + more
                    b = call(scheduler.fork_request, "a", "b", outputs).value
                output = call(scheduler.schedule).value
                device.run(output)
                token_ids = {name: 50 + step + 20 * (name == "b") for name in output.num_scheduled_tokens}
                scheduler.update_from_output(output, token_ids)
                scheduler.check()
                if step == 8:
                    scheduler.abort_request("a")
            that("b's tokens", b.output_token_ids).gives([*outputs, *range(75, 82)])


def test_what_the_parent_filled_keeps_its_name(sharing, a_request, a_step):
    """A block is cached under a's tokens. A twin with others leaves it alone, and so it can be found for ever."""
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


def test_outputs_are_copied(decoding):
    """The caller's list is the caller's."""
    scheduler, _ = decoding(6)
    outputs = [7, 8]
    b = scheduler.fork_request("a", "b", outputs)
    outputs.append(9)
    that("b's tokens", b.output_token_ids).gives([7, 8])


# Its place


def test_a_family_stays_together(decoding, a_request, a_step):
    """Forks stand behind their family and before who came later, in the order in which they were made."""
    scheduler, _ = decoding(6)
    scheduler.add_request(a_request("z", 4))
    a_step(scheduler)
    made = [scheduler.fork_request(*pair) for pair in (("a", "b"), ("a", "c"), ("b", "d"), ("z", "y"))]
    that("the batch", ids(scheduler.running)).gives(["a", "b", "c", "d", "z", "y"])
    that("fork_index of b, c, d, y", [request.fork_index for request in made]).gives([1, 2, 3, 4])
    that("arrival_index", [request.arrival_index for request in scheduler.running]).gives([0, 0, 0, 0, 1, 1])
    scheduler.check()


def test_a_family_stays_together_with_priorities(a_request, a_step):
    """x came after y, and stands before it, for its priority is lower. So does its twin: `seniority` is the order."""
    scheduler = FairSharingScheduler(num_blocks=20, block_size=4)
    for request in (a_request("y", 5, priority=1), a_request("x", 5, priority=0)):
        scheduler.add_request(request)
    a_step(scheduler)
    that("the batch", ids(scheduler.running)).gives(["x", "y"])
    twin = call(scheduler.fork_request, "x", "x's twin").value
    that("the batch after the fork", ids(scheduler.running)).gives(["x", twin.request_id, "y"])


def test_who_comes_after_a_fork(decoding, a_request, a_step):
    """The next request that is added has arrived after all of them."""
    scheduler, _ = decoding(6)
    scheduler.fork_request("a", "b")
    late = a_request("late", 4)
    scheduler.add_request(late)
    a_step(scheduler)
    that("the batch", ids(scheduler.running)).gives(["a", "b", "late"])
    that("late's arrival_index is after a's", late.arrival_index > 0).gives(True)


def test_the_youngest_of_a_family_is_preempted_first(decoding, a_step):
    """Room for a and two twins, and then no more: c goes, and comes back when there is room."""
    scheduler, _ = decoding(8, num_blocks=5)
    scheduler.fork_request("a", "b")
    scheduler.fork_request("a", "c")
    that("blocks", a_step(scheduler).num_scheduled_tokens).gives({"a": 1, "b": 1, "c": 1})
    for _ in range(3):
        a_step(scheduler)
    that("preempted when a needs one more", a_step(scheduler).preempted[:1]).gives(["c"])
    that("the head of the batch", ids(scheduler.running)[:1]).gives(["a"])


def test_the_name_is_free_again(decoding, a_step):
    """A twin that has ended is forgotten, like any request."""
    scheduler, _ = decoding(6)
    scheduler.fork_request("a", "b")
    scheduler.abort_request("b")
    that("forked again", call(scheduler.fork_request, "a", "b").value.fork_index).gives(2)
    a_step(scheduler)


# Who cannot be forked


@pytest.mark.parametrize("arguments", [("x", "b"), ("w", "b"), ("a", "a"), ("a", "w"), ("a", "b", [7, 7, 7])])
def test_what_cannot_be_forked(sharing, a_request, a_step, arguments):
    """Nobody of that name, one who still waits, a name that is taken, an answer as long as it may be: ValueError."""
    scheduler = sharing([a_request("a", 6, 3)])
    a_step(scheduler)
    scheduler.add_request(a_request("w", 4))
    call(scheduler.fork_request, *arguments).raises(ValueError)
    scheduler.check()
    seen = ids(scheduler.running), list(scheduler.waiting), scheduler.pool.ref_count(1)
    that("the batch, the line, owners of block 1", seen).gives((["a"], ["w"], 1))
    that("fork_index of the next fork", scheduler.fork_request("a", "b").fork_index).gives(1)


def test_no_room_within_max_model_len(sharing, a_request, a_step):
    """At 10 tokens a request ends. A twin that has them already would run on: nobody looks for an end behind it."""
    scheduler = sharing([a_request("a", 6, 40)], max_model_len=10)
    a_step(scheduler)
    for outputs in ([7] * 6, [7] * 4):
        call(scheduler.fork_request, "a", "b", outputs).raises(ValueError)
    that("the batch", ids(scheduler.running)).gives(["a"])
    b = call(scheduler.fork_request, "a", "b", [7] * 3).value
    a_step(scheduler)
    that("b's tokens, of max_model_len 10", b.num_tokens).gives(10)
    that("b's status", b.status.name).gives("FINISHED_LENGTH")


def test_in_the_batch_and_not_in_decode(sharing, a_request):
    """b had found a's blocks, and a left before the report: b must compute its prompt again, and has no token yet."""
    a, b = a_request("a", 9), a_request("b", 9)
    scheduler = sharing([a, b], prefix_caching=True)
    output = scheduler.schedule()
    scheduler.abort_request("a")
    scheduler.update_from_output(output, {"a": 7, "b": 7})
    that("b's status and output", (b.status.name, b.output_token_ids)).gives(("RUNNING", []))
    call(scheduler.fork_request, "b", "c").raises(ValueError)


def test_not_in_the_middle_of_a_step(decoding):
    """Between schedule and report nobody knows what is computed: not now, and a step later again."""
    scheduler, _ = decoding(6)
    output = scheduler.schedule()
    call(scheduler.fork_request, "a", "b").raises(ValueError)
    scheduler.update_from_output(output, {"a": 7})
    that("after the report", call(scheduler.fork_request, "a", "b").value.output_token_ids).gives([7, 7])


def test_no_seat_is_left(decoding):
    """A batch of at most two, and two are in it."""
    scheduler, _ = decoding(6, max_num_seqs=2)
    scheduler.fork_request("a", "b")
    call(scheduler.fork_request, "a", "c").raises(ValueError)
    that("the batch, the line", (ids(scheduler.running), list(scheduler.waiting))).gives((["a", "b"], []))
    scheduler.check()


# The copy is paid for


def test_two_families(sharing, a_request, a_step):
    """a's last block is half full, z's is full. a is forked, then z: a's is copied, though z has nothing to copy."""
    scheduler = sharing([a_request("a", 6), a_request("z", 8)])
    a_step(scheduler)
    scheduler.fork_request("a", "a's twin")
    scheduler.fork_request("z", "z's twin")
    that("blocks_to_copy", a_step(scheduler).blocks_to_copy).gives([(1, 4)])


def test_who_looks(a_request, a_step):
    """`written_and_shared` is not asked while nobody can share a tail: before a fork, and when all have ended."""
    asked = []

    class Asked(SharingScheduler):
        """Notes for whom it is asked."""

        def written_and_shared(self, request):
            asked.append(request.request_id)
            return super().written_and_shared(request)

    scheduler = Asked(num_blocks=20, block_size=4)
    scheduler.add_request(a_request("a", 6, 20))
    for _ in range(4):
        a_step(scheduler)
    that("asked for, before any fork", asked).gives([])
    scheduler.fork_request("a", "b")
    a_step(scheduler)
    that("asked for, with a twin", sorted({*asked})).gives(["a", "b"])
    for request_id in "ab":
        scheduler.abort_request(request_id)
    a_step(scheduler)
    asked.clear()
    scheduler.add_request(a_request("c", 6))
    for _ in range(4):
        a_step(scheduler)
    that("asked for, when the batch was empty in between", asked).gives([])


def test_what_will_be_written(decoding):
    """Places, not ids: of a's blocks the second is written next, and b has it too. A block that is only read is not."""
    scheduler, a = decoding(6)
    call(scheduler.written_and_shared, a).gives([])
    b = scheduler.fork_request("a", "b")
    call(scheduler.written_and_shared, a).gives([1])
    call(scheduler.written_and_shared, b).gives([1])
    scheduler.pool.free([1])
    call(scheduler.written_and_shared, a).gives([])
    scheduler.pool.share([1])


def test_nothing_is_written_into_full_blocks(decoding):
    """8 tokens, all computed: the next goes into a third block, which nobody has yet."""
    scheduler, a = decoding(8)
    scheduler.fork_request("a", "b")
    call(scheduler.written_and_shared, a).gives([])
    call(scheduler.blocks_missing, a).gives(1)


def test_a_copy_is_a_block_that_is_missing(decoding):
    """The last block of both has room, so phase 6 would say 0; but it has two owners."""
    scheduler, a = decoding(6)
    call(scheduler.blocks_missing, a).gives(0)
    b = scheduler.fork_request("a", "b")
    call(scheduler.blocks_missing, a).gives(1)
    call(scheduler.blocks_missing, b).gives(1)
    that("free blocks: asking takes none", scheduler.pool.num_free).gives(18)


def test_copy_and_growth(decoding, a_step):
    """b has five tokens more than a, from the middle of a block on: it lacks a copy, and a block behind it."""
    scheduler, a = decoding(6)
    b = scheduler.fork_request("a", "b", [7, 8, 8, 8, 8])
    call(scheduler.written_and_shared, b).gives([1])
    call(scheduler.blocks_missing, b).gives(2)
    call(scheduler.blocks_missing, a).gives(1)
    output = a_step(scheduler)
    that("the step", output.num_scheduled_tokens).gives({"a": 1, "b": 5})
    that("copies: a's, and b has the old block alone then", len(output.blocks_to_copy)).gives(1)
    that("blocks that they hold", (len(a.block_ids), len(b.block_ids))).gives((2, 3))


def test_two_copies_are_two_blocks(sharing, a_request):
    """b and c are about to write two blocks that both hold: the first of them needs two copies, and one block is free.

    z was to fill them, and left before the report. Then c leaves too, and b has both blocks to itself.
    """
    z, b, c = (a_request(name, 9, 3) for name in "zbc")
    scheduler = sharing([z, b, c], num_blocks=5, prefix_caching=True)
    that("the step that fails", scheduler.schedule().num_scheduled_tokens).gives({"z": 9, "b": 1, "c": 1})
    scheduler.abort_request("z")
    call(scheduler.written_and_shared, b).gives([0, 1])
    call(scheduler.blocks_missing, b).gives(2)
    output = call(scheduler.schedule).value
    seen = output.num_scheduled_tokens, output.preempted, output.blocks_to_copy
    that("work, preempted, copies", seen).gives(({"b": 9}, ["c"], []))


def test_copy_on_write_alone(decoding):
    """The old block loses an owner, the new one stands in its place, and the pair says from where to where."""
    scheduler, a = decoding(6)
    scheduler.fork_request("a", "b")
    output = SchedulerOutput()
    call(scheduler.copy_on_write, a, output).gives(None)
    that("blocks_to_copy", output.blocks_to_copy).gives([(1, 2)])
    that("a's blocks", a.block_ids).gives([0, 2])
    that("owners of blocks 0, 1, 2", [scheduler.pool.ref_count(block) for block in range(3)]).gives([2, 1, 1])
    call(scheduler.copy_on_write, a, output).gives(None)
    that("blocks_to_copy, asked again", output.blocks_to_copy).gives([(1, 2)])
    scheduler.check()


def test_a_copy_that_nobody_can_pay(decoding, a_step):
    """Two blocks, both shared by two, and none free. The copy needs one: the twin leaves, and a has the block alone."""
    scheduler, _ = decoding(6, num_blocks=2, max_tokens=2)
    b = scheduler.fork_request("a", "b")
    output = call(scheduler.schedule).value
    seen = output.num_scheduled_tokens, output.preempted, output.blocks_to_copy
    that("work, preempted, copies", seen).gives(({"a": 1}, ["b"], []))
    that("who has ended", ids(scheduler.update_from_output(output, {"a": 7}))).gives(["a"])
    that("b's status and blocks", (b.status.name, b.block_ids)).gives(("WAITING", []))
    that("the next step: b computes all that it has", a_step(scheduler).num_scheduled_tokens).gives({"b": 7})
    that("b's tokens, and why it ended", (b.output_token_ids, b.finish_reason)).gives(([7, 7], "length"))


def test_preempted_for_a_copy_and_found_again(decoding, a_step):
    """The same with a prefix cache: the block that a filled is found when b comes back."""
    scheduler, _ = decoding(6, num_blocks=3, max_tokens=2, prefix_caching=True)
    scheduler.fork_request("a", "b")
    scheduler.fork_request("a", "c")
    output = a_step(scheduler)
    that("work and preempted", (output.num_scheduled_tokens, output.preempted)).gives(({"a": 1, "b": 1}, ["c"]))
    that("blocks_to_copy", output.blocks_to_copy).gives([(1, 2)])
    that("the next step: of c's 7 tokens 4 are found", a_step(scheduler).num_scheduled_tokens).gives({"c": 3})


# The batch


def test_it_still_grows(decoding, a_step):
    """Without a fork it is phase 6's batch: a block when the last one is full, not a step earlier."""
    scheduler, a = decoding(3, num_steps=0)
    blocks = []
    for _ in range(8):
        a_step(scheduler)
        blocks.append(len(a.block_ids))
    that("blocks in steps 0 … 7, of 3 … 10 tokens", blocks).gives([1, 1, 2, 2, 2, 2, 3, 3])


def test_a_stage_that_counts_in_another_way():
    """A later stage may lack more blocks, or fewer: it says so in blocks_missing, and that is what it gets."""

    class OneAhead(SharingScheduler):
        """Wants a block in hand behind that of its newest token."""

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


def test_decode_fills_blocks_too(sharing, a_request, a_step):
    """With a prefix cache, whatever the batch has filled is found: another turn of a chat, with one token more."""
    requests = [a_request("a", 6, 20), a_request("b", [2] * 5, 20)]
    scheduler = sharing(requests, prefix_caching=True)
    found = []
    for _ in range(8):
        a_step(scheduler)
        turns = [a_request("turn", each.token_ids(0, each.num_tokens)) for each in requests]
        found.append(sum(len(scheduler.find_prefix(turn)) for turn in turns))
    that("blocks found after steps 0 … 7", found).gives([2, 2, 3, 4, 4, 4, 5, 6])


def test_found_in_the_step_that_fills_it(sharing, a_request, a_step):
    """a's second block is filled by the decode step in which the second turn of its chat arrives, and is found."""
    a = a_request("a", 6, 20)
    scheduler = sharing([a], prefix_caching=True)
    a_step(scheduler)
    a_step(scheduler)
    scheduler.add_request(a_request("turn", [*a.token_ids(0, 8), 0], 1))
    that("tokens of the step", a_step(scheduler).num_scheduled_tokens).gives({"a": 1, "turn": 1})


def test_a_twin_fills_blocks_too(sharing, a_request, a_step):
    """A twin with other tokens computes five of its own in one step: the block in the middle of them is found later."""
    scheduler = sharing([a_request("a", 6, 20)], prefix_caching=True)
    for _ in range(3):
        a_step(scheduler)
    twin = call(scheduler.fork_request, "a", "twin", [7, 8, 8]).value
    that("tokens of the step", a_step(scheduler).num_scheduled_tokens).gives({"a": 1, "twin": 5})
    found = scheduler.find_prefix(a_request("turn", [*[1] * 6, 7, 8, 8]))
    that("blocks of the twin's first eight tokens that are found", found).gives(twin.block_ids[:2])


def test_cached_though_the_last_one_left(sharing, a_request, a_step):
    """The last of the batch is its own victim: what the others fill in this step is cached all the same."""
    requests = [a_request("old", 7, 20), a_request("young", [2] * 4, 20)]
    scheduler = sharing(requests, num_blocks=3, prefix_caching=True)
    a_step(scheduler)
    output = a_step(scheduler)
    that("work and preempted", (output.num_scheduled_tokens, output.preempted)).gives(({"old": 1}, ["young"]))
    found = scheduler.find_prefix(a_request("c", [*[1] * 7, 7, 0]))
    that("blocks of the old one's eight tokens that are found", found).gives(requests[0].block_ids[:2])


def test_a_step_that_is_lost_leaves_nothing_behind(sharing, a_request):
    """A step's tokens never come. The next is scheduled, and preempts a for a copy: what a was to fill is still open.

    Until a report comes, `_unfilled` says whose part is missing. Whoever empties it lets a leave its names behind.
    """
    a = a_request("a", [2] * 13, 3)
    scheduler = sharing([*(a_request(name, 5, 3) for name in "zbcd"), a], num_blocks=9, prefix_caching=True)
    first = scheduler.schedule().num_scheduled_tokens
    that("the step that fails", first).gives({"z": 5, "b": 1, "c": 1, "d": 1, "a": 13})
    scheduler.abort_request("z")
    that("preempted in the step after it", call(scheduler.schedule).value.preempted).gives(["a"])
    call(scheduler.find_prefix, a).gives([])


def test_two_who_must_write_what_a_third_had_promised(sharing, a_request, memory):
    """b and c found two blocks that a was to fill; the step failed, and a left. Both write now, one into copies."""
    _, b, c = requests = [a_request(name, 9, 5) for name in "abc"]
    scheduler = sharing(requests, prefix_caching=True)
    device = memory(scheduler)
    output = call(scheduler.schedule).value
    that("the step that fails", output.num_scheduled_tokens).gives({"a": 9, "b": 1, "c": 1})
    device.run(output, fails=True)
    scheduler.abort_request("a")
    output = call(scheduler.schedule).value
    device.run(output)
    that("the step after it", output.num_scheduled_tokens).gives({"b": 9, "c": 9})
    that("copies", len(output.blocks_to_copy)).gives(2)
    that("blocks that they hold", (len(b.block_ids), len(c.block_ids))).gives((3, 3))
    that("blocks that both have", [block for block in b.block_ids if block in c.block_ids]).gives([])
    scheduler.update_from_output(output, {"b": 7, "c": 7})
    scheduler.check()


# Anything at all


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(6))
def test_random_forks_ends_and_failures(sharing, memory, preemption, prefix_caching, seed):
    """Random runs under the auditor, on a memory that knows what every slot holds: forks, ends, steps that fail."""
    rng = random.Random(seed)
    options = {"preemption": preemption, "num_host_blocks": 6 if preemption == "swap" else 0}
    options |= {"num_blocks": rng.randint(6, 24), "max_num_seqs": rng.randint(2, 8), "prefix_caching": prefix_caching}
    scheduler = observe(sharing(**options), SharingAuditor())
    device, names, everybody, awaited = memory(scheduler), iter(range(10**6)), [], False
    for turn in range(200):
        if turn < 60 and rng.random() < 0.3:
            everybody.append(Request(next(names), [rng.randrange(2)] * rng.randint(1, 16), rng.randint(1, 9)))
            scheduler.add_request(everybody[-1])
        parents = [each for each in scheduler.running if each.output_token_ids]
        if turn < 60 and parents and not awaited and rng.random() < 0.4:
            everybody += fork(rng, scheduler, rng.choice(parents), names)
        unfinished = [*scheduler.running, *scheduler.waiting.values()]
        if unfinished and rng.random() < 0.05:
            scheduler.abort_request(rng.choice(unfinished).request_id)
        awaited = audited(scheduler, device, rng)
        if turn >= 60 and not scheduler.has_unfinished:
            break
    that("requests that have not ended", [each for each in everybody if not each.status.is_finished]).gives([])
    that("used blocks", scheduler.pool.num_used).gives(0)


def fork(rng, scheduler, parent, names):
    """Fork somebody, with some of its tokens and perhaps another one, if there is a seat. The twin, in a list."""
    outputs = parent.output_token_ids[: rng.randint(0, len(parent.output_token_ids))]
    outputs += [rng.randrange(9)] * rng.randint(0, 3)
    if len(outputs) >= parent.max_tokens or scheduler.num_running >= scheduler.max_num_seqs:
        return []
    return [call(scheduler.fork_request, parent.request_id, next(names), outputs).value]


def audited(scheduler, device, rng):
    """A step, whose tokens come or do not. Whether they are awaited."""
    __tracebackhide__ = True
    try:
        output = call(scheduler.schedule).value
        fails = rng.random() < 0.07
        device.run(output, fails=fails)
        if not fails:
            token_ids = {request_id: rng.randrange(3) for request_id in output.num_scheduled_tokens}
            scheduler.update_from_output(output, token_ids)
        scheduler.check()
    except InvariantError as error:
        that("the auditor", f"InvariantError: {error}").gives("no error")
    return fails
