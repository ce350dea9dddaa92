"""Sharing: hits, forks and copies, by cases with known outcomes and by random runs, checked after every step."""

from __future__ import annotations

import random

import pytest

from minicache.request import Request, RequestStatus
from minicache.scheduler import ChunkedPrefillScheduler, SharingScheduler, create_scheduler
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.observe import observe

each_stage = pytest.mark.parametrize("cls", [SharingScheduler, ChunkedPrefillScheduler], ids=["sharing", "chunked"])


def step(scheduler, token=7):
    output = scheduler.schedule()
    ended = scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, token))
    scheduler.check()
    return output, ended


def run(scheduler, *requests):
    """Serve these to their end, and say how many tokens each computed in its first step."""
    firsts = {}
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished:
        output, _ = step(scheduler)
        for request_id, num_new in output.num_scheduled_tokens.items():
            firsts.setdefault(request_id, num_new)
    return firsts


# The prefix cache


@each_stage
def test_a_prompt_of_exactly_three_blocks(cls):
    """48 tokens, cached and sent again: 32 are found, because one token must be computed. With one more: 48."""
    scheduler = cls(num_blocks=20, prefix_caching=True)
    prompt = list(range(48))
    assert run(scheduler, Request("a", prompt, 2)) == {"a": 48}
    b, c = Request("b", prompt, 1), Request("c", [*prompt, 99], 1)
    assert run(scheduler, b) == {"b": 16}
    assert run(scheduler, c) == {"c": 1}
    assert (b.num_cached_tokens, c.num_cached_tokens) == (32, 48)
    assert (scheduler.stats.num_requests, scheduler.stats.num_queried_tokens, scheduler.stats.num_hit_tokens) == (
        3,
        48 + 48 + 49,
        80,
    )


@each_stage
def test_two_that_are_admitted_in_one_step_share(cls):
    scheduler = cls(num_blocks=20, block_size=4, prefix_caching=True)
    a, b = Request("a", [1] * 9, 3), Request("b", [1] * 9, 3)
    scheduler.add_request(a)
    scheduler.add_request(b)
    output, _ = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 9, "b": 1}
    assert a.block_ids[:2] == b.block_ids[:2]
    assert a.block_ids[2] != b.block_ids[2]


@each_stage
def test_answers_are_found_too(cls):
    """The second turn of a chat: the first prompt, its answer, and new words."""
    scheduler = cls(num_blocks=20, block_size=4, prefix_caching=True)
    first = Request("a", [1] * 6, 7)
    run(scheduler, first)
    assert run(scheduler, Request("b", [*first.prompt_token_ids, *first.output_token_ids, 5, 5], 1)) == {"b": 15 - 12}


@each_stage
def test_salts_and_adapters_keep_apart(cls):
    scheduler = cls(num_blocks=40, block_size=4, prefix_caching=True)
    prompt = [1] * 12
    run(scheduler, Request("a", prompt, 1, cache_salt="x"))
    options = [{}, {"cache_salt": "y"}, {"adapter": "x"}, {"cache_salt": "x", "adapter": "z"}, {"cache_salt": "x"}]
    computed = [run(scheduler, Request(n, prompt, 1, **each))[n] for n, each in enumerate(options)]
    assert computed == [12, 12, 12, 12, 4]


@each_stage
def test_a_victim_finds_its_own_blocks(cls):
    """10 blocks of 16, two prompts of 80: the second is preempted, and computes what of its blocks was handed out."""
    scheduler = cls(num_blocks=10, prefix_caching=True)
    for number in (0, 1):
        scheduler.add_request(Request(number, [number] * 80, 20))
    assert step(scheduler)[0].num_scheduled_tokens == {0: 80, 1: 80}
    output, _ = step(scheduler)
    assert (output.num_scheduled_tokens, output.preempted) == ({0: 1}, [1])
    while 1 not in output.num_scheduled_tokens:
        output, _ = step(scheduler)
    # It had 5 full blocks. The first request took two of them in its 20 steps, from the tail: 81 − 3 · 16.
    assert output.num_scheduled_tokens[1] == 81 - 3 * 16


@each_stage
def test_after_a_failed_step_nothing_is_found(cls):
    """Two equal prompts in one step, which fails: nothing that was to be written is found, nor anything from before."""
    scheduler = cls(num_blocks=20, block_size=4, prefix_caching=True)
    run(scheduler, Request("before", [2] * 9, 1))
    requests = [Request(name, [1] * 9, 3) for name in "ab"]
    for request in requests:
        scheduler.add_request(request)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 9, "b": 1}
    scheduler.recover()
    scheduler.check()
    assert [each.status for each in requests] == [RequestStatus.WAITING] * 2
    assert (scheduler.pool.num_cached, scheduler.pool.num_used) == (0, 0)
    assert scheduler.find_prefix(Request("c", [2] * 9, 1)) == []
    output, _ = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 9, "b": 1}


@each_stage
def test_a_step_that_was_never_committed_is_given_up(cls):
    """schedule() recovers by itself; a request that came meanwhile is admitted behind those of the batch."""
    scheduler = cls(num_blocks=20, block_size=4, prefix_caching=True)
    for name in "ab":
        scheduler.add_request(Request(name, [1] * 9, 3))
    scheduler.schedule()
    scheduler.abort_request("a")
    scheduler.add_request(Request("c", [1] * 9, 3))
    output, _ = step(scheduler)
    assert output.num_scheduled_tokens == {"b": 9, "c": 1}


@each_stage
def test_tokens_stay_when_a_step_fails(cls):
    """A request and its child recover to two requests that wait with all their tokens, and share only a prefix."""
    scheduler, a = decoding(cls, 6, prefix_caching=True)
    b = scheduler.fork_request("a", "b", [7, 8])
    step(scheduler, 9)
    scheduler.recover()
    assert (a.output_token_ids, b.output_token_ids) == ([7, 9], [7, 8, 9])
    assert [*scheduler.waiting] == ["a", "b"]
    output, _ = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 8, "b": 5}


@each_stage
def test_a_failed_request_leaves_nothing_cached(cls):
    """FINISHED_ERROR: its blocks lose their hashes, also the one that another request shares, which goes on."""
    scheduler = cls(num_blocks=20, block_size=4, prefix_caching=True)
    a, b = Request("a", [1] * 9, 5), Request("b", [1] * 4 + [2] * 6, 5)
    for request in (a, b):
        scheduler.add_request(request)
    step(scheduler)
    assert scheduler.pool.num_cached == 3
    scheduler.finish_request("a", RequestStatus.FINISHED_ERROR)
    assert (a.finish_reason, scheduler.pool.num_cached) == ("error", 1)
    assert scheduler.find_prefix(Request("c", [1] * 9, 1)) == []
    run(scheduler)
    assert b.finish_reason == "length"


@each_stage
def test_an_abort_before_the_commit_leaves_its_blocks_cached(cls):
    """The step computes what it was scheduled to, and its tokens are committed: the blocks hold what they should."""
    scheduler = cls(num_blocks=20, block_size=4, prefix_caching=True)
    scheduler.add_request(Request("a", [1] * 9, 3))
    output = scheduler.schedule()
    scheduler.abort_request("a")
    scheduler.update_from_output(output, {})
    scheduler.check()
    assert len(scheduler.find_prefix(Request("b", [1] * 9, 1))) == 2


@each_stage
def test_a_preempted_request_with_output_computes_what_is_not_found(cls):
    """It is preempted with 4 + 5 tokens, of which one block of 4 is found when it comes back: 5 are computed."""
    scheduler = cls(num_blocks=4, block_size=4, prefix_caching=True)
    a, b = Request("a", [1] * 4, 9), Request("b", [2] * 4, 9)
    for request in (a, b):
        scheduler.add_request(request)
    output, _ = step(scheduler)
    while not output.preempted:
        output, _ = step(scheduler)
    assert (output.preempted, b.num_tokens) == (["b"], 9)
    while "b" not in output.num_scheduled_tokens:
        output, _ = step(scheduler)
    assert output.num_scheduled_tokens["b"] == 9 - 4


@each_stage
def test_a_request_that_waits_finds_what_is_filled_meanwhile(cls):
    """Its hashes are known from the first look on; each later look first caches what decode has filled since."""
    scheduler = cls(num_blocks=20, block_size=4, max_num_seqs=1, prefix_caching=True)
    scheduler.add_request(Request("a", [1] * 4, 9))
    waiting = Request("b", [1] * 4 + [7] * 5, 1)
    step(scheduler)
    assert len(scheduler.find_prefix(waiting)) == 1
    for _ in range(4):
        step(scheduler)
    assert len(scheduler.find_prefix(waiting)) == 2


@each_stage
def test_a_hit_pays_for_tokens_and_blocks(cls):
    """A step of 10 tokens has room for a prompt of 12 of which 8 are found; 2 blocks in use need not be free again."""
    scheduler = cls(num_blocks=6, block_size=4, max_num_batched_tokens=12, prefix_caching=True)
    a, b = Request("a", [1] * 11, 9), Request("b", [1] * 11, 9)
    scheduler.add_request(a)
    step(scheduler)
    scheduler.add_request(b)
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 3}
    assert scheduler.pool.num_used == 4


@each_stage
def test_evictions_are_counted(cls):
    """4 blocks of 4: the second prompt takes the two that were never used, and the first one's two."""
    scheduler = cls(num_blocks=4, block_size=4, prefix_caching=True)
    run(scheduler, Request("a", [1] * 8, 1))
    assert scheduler.stats.num_evicted_blocks == 0
    run(scheduler, Request("b", [2] * 15, 1))
    assert scheduler.stats.num_evicted_blocks == 2


@each_stage
def test_reset(cls):
    scheduler = cls(num_blocks=20, prefix_caching=True)
    run(scheduler, Request("a", [1] * 40, 2))
    scheduler.add_request(Request("b", [1] * 40, 2))
    step(scheduler)
    with pytest.raises(ValueError, match="in use"):
        scheduler.reset_prefix_cache()
    run(scheduler)
    scheduler.reset_prefix_cache()
    assert run(scheduler, Request("c", [1] * 40, 2)) == {"c": 40}
    with pytest.raises(ValueError, match="prefix_caching=True"):
        cls(num_blocks=20).reset_prefix_cache()


def test_only_what_shares_blocks_has_a_prefix_cache():
    for name in ("static", "continuous"):
        with pytest.raises(ValueError, match="reserves blocks"):
            create_scheduler(name, num_blocks=8, prefix_caching=True)
    with pytest.raises(TypeError, match="prefix_caching"):
        create_scheduler("fair", num_blocks=8, prefix_caching=1)  # type: ignore[arg-type]
    for name in ("paged", "fair"):
        assert type(create_scheduler(name, num_blocks=8, prefix_caching=True)) is SharingScheduler


# Forks


def decoding(cls, num_prompt, max_tokens=20, **options):
    scheduler = cls(**{"num_blocks": 20, "block_size": 4} | options)
    request = Request("a", [1] * num_prompt, max_tokens)
    scheduler.add_request(request)
    step(scheduler)
    return scheduler, request


@each_stage
def test_a_fork_takes_no_block_and_the_first_write_copies(cls):
    """6 tokens in blocks of 4: both share two blocks, and the second is half full. The first write copies."""
    scheduler, a = decoding(cls, 6)
    b = scheduler.fork_request("a", "b")
    assert (b.block_ids, b.num_computed_tokens, b.output_token_ids) == ([0, 1], 6, [7])
    assert scheduler.pool.num_used == 2
    output, _ = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 1, "b": 1}
    assert output.blocks_to_copy == [(1, 2)]
    assert (a.block_ids, b.block_ids) == ([0, 2], [0, 1])
    output, _ = step(scheduler)
    assert output.blocks_to_copy == []


@each_stage
def test_a_full_tail_is_never_copied(cls):
    scheduler, a = decoding(cls, 8)
    b = scheduler.fork_request("a", "b")
    output, _ = step(scheduler)
    assert output.blocks_to_copy == []
    assert (a.block_ids, b.block_ids) == ([0, 1, 2], [0, 1, 3])


@each_stage
@pytest.mark.parametrize(
    ("num_prompt", "outputs", "num_computed", "blocks", "copies"),
    [
        (6, [], 4, [0], 0),  # the parent has gone on in that block, and filled it
        (8, [], 7, [0, 1], 1),  # in a block that is full of what both have
        (6, [7, 7, 8, 9], 8, [0, 1], 0),  # the same up to the end of a block
        (6, [7, 8], 4, [0], 0),
        (9, [], 8, [0, 1], 0),  # the prompt's last token again, in a block of its own
        (9, [7, 8], 10, [0, 1, 2], 1),
        (9, [8, 7], 9, [0, 1, 2], 1),
        (7, [7, 8, 9, 9], 8, [0, 1], 0),
        (7, [8, 9], 4, [0], 0),  # the parent has gone on in that block with another token, and filled it
        (1, [], 0, [], 0),
    ],
)
def test_a_fork_may_differ_from_its_parent(cls, num_prompt, outputs, num_computed, blocks, copies):
    """What both have in common is shared, as far as it is computed; the child computes the rest."""
    scheduler, _ = decoding(cls, num_prompt)
    step(scheduler)
    step(scheduler)  # the parent has three tokens 7, of which two are computed
    b = scheduler.fork_request("a", "b", outputs)
    assert (b.num_computed_tokens, b.block_ids, b.output_token_ids) == (num_computed, blocks, outputs)
    output, _ = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 1, "b": num_prompt + len(outputs) - num_computed}
    assert len(output.blocks_to_copy) == copies


@each_stage
def test_a_copy_is_paid_for_before_anything_is_promised(cls):
    """Two blocks, both shared by two, no block free: the copy needs one, so the child is preempted, and comes back."""
    scheduler, a = decoding(cls, 6, num_blocks=2, max_tokens=2)
    b = scheduler.fork_request("a", "b")
    output, ended = step(scheduler)
    assert (output.num_scheduled_tokens, output.preempted, output.blocks_to_copy) == ({"a": 1}, ["b"], [])
    assert ended == [a]
    assert b.status is RequestStatus.WAITING
    output, ended = step(scheduler)
    assert output.num_scheduled_tokens == {"b": 7}
    assert ended == [b]


@each_stage
def test_siblings_that_outgrow_the_pool_together(cls):
    """12 tokens fill all 3 blocks, which two requests share. The 13th has no room, not even for one alone."""
    scheduler, a = decoding(cls, 8, num_blocks=3)
    while a.num_tokens < 13:
        step(scheduler)
    b = scheduler.fork_request("a", "b")
    output, _ = step(scheduler)
    assert (output.num_scheduled_tokens, output.finished, output.preempted) == ({}, ["a"], ["b"])
    assert step(scheduler)[0].finished == ["b"]  # it can never be admitted again
    assert {a.status, b.status} == {RequestStatus.FINISHED_CAPACITY}
    assert scheduler.pool.num_free == 3


@each_stage
def test_siblings_stay_together(cls):
    """Forks stand behind their parent and before who came later; the youngest of all is preempted first."""
    scheduler, _ = decoding(cls, 6)
    scheduler.add_request(Request("z", [2] * 4, 9))
    step(scheduler)
    scheduler.fork_request("a", "b")
    scheduler.fork_request("a", "c")
    scheduler.fork_request("b", "d")
    assert [each.request_id for each in scheduler.running] == ["a", "b", "c", "d", "z"]


@each_stage
def test_what_cannot_be_forked(cls):
    scheduler, _ = decoding(cls, 6, max_tokens=3)
    scheduler.add_request(Request("w", [1] * 4, 2))
    for arguments, says in [
        (("w", "b"), "cannot be forked"),
        (("x", "b"), "cannot be forked"),
        (("a", "a"), "already here"),
        (("a", "w"), "already here"),
        (("a", "b", [7, 7, 7]), "at most 2"),
    ]:
        with pytest.raises(ValueError, match=says):
            scheduler.fork_request(*arguments)
    small, _ = decoding(cls, 6, max_num_seqs=1)
    with pytest.raises(ValueError, match="no slot"):
        small.fork_request("a", "b")
    output = scheduler.schedule()
    with pytest.raises(ValueError, match="between two steps"):
        scheduler.fork_request("a", "b")
    scheduler.update_from_output(output, {"a": 7, "w": 7})
    scheduler.check()
    assert scheduler.fork_request("a", "b").request_id == "b"


@each_stage
def test_a_child_has_room_within_max_model_len(cls):
    """A request ends at max_model_len tokens. A child with as many would be past its end and run on."""
    scheduler, _ = decoding(cls, 6, max_tokens=40, max_model_len=10)
    for num_outputs in (4, 5, 6, 39):
        with pytest.raises(ValueError, match=f"at most 3 tokens of output; got {num_outputs}"):
            scheduler.fork_request("a", "b", [7] * num_outputs)
    scheduler.check()
    assert scheduler.num_running == 1
    b = scheduler.fork_request("a", "b", [7] * 3)
    step(scheduler)
    assert (b.num_tokens, b.status) == (10, RequestStatus.FINISHED_LENGTH)
    short, _ = decoding(cls, 6, max_tokens=3, max_model_len=10)  # max_tokens comes first here
    with pytest.raises(ValueError, match="at most 2 tokens of output"):
        short.fork_request("a", "b", [7] * 3)


# Random runs


class Device:
    """What a device would hold: for every slot the salt, the adapter, and all tokens up to the one stored there."""

    def __init__(self):
        self.slots, self.host = {}, {}

    def run(self, output, block_size, *, fails=False):
        """Carry out a step in the order that `SchedulerOutput` says; then every request must read its own tokens."""
        for pairs in output.swapped_out.values():
            self.host |= {host: self.block(block, block_size) for block, host in pairs}
        for pairs in output.swapped_in.values():
            for host, block in pairs:
                self.slots |= {(block, offset): held for offset, held in enumerate(self.host[host])}
        for source, target in output.blocks_to_copy:
            self.slots |= {(target, offset): held for offset, held in enumerate(self.block(source, block_size))}
        spans = [
            (each, each.num_computed_tokens, output.num_scheduled_tokens[each.request_id]) for each in output.scheduled
        ]
        for request, start, count in spans:
            for position in range(start, start + count):
                index, offset = divmod(position, block_size)
                self.slots[request.block_ids[index], offset] = None if fails else held(request, position)
        for request, start, count in spans if not fails else ():
            self.holds(request, request.block_ids, start + count, block_size)

    def block(self, block_id, block_size):
        return [self.slots.get((block_id, offset)) for offset in range(block_size)]

    def holds(self, request, block_ids, num_tokens, block_size):
        for position in range(num_tokens):
            index, offset = divmod(position, block_size)
            assert self.slots.get((block_ids[index], offset)) == held(request, position), (request, position)


def held(request, position):
    return request.cache_salt, request.adapter, tuple(request.token_ids(0, position + 1))


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@each_stage
@pytest.mark.parametrize("seed", range(25))
def test_every_request_reads_its_own_tokens(cls, preemption, prefix_caching, seed):
    """Forks, aborts at any time, failed requests, failed steps and preemptions; no hash is trusted."""
    rng = random.Random(seed)
    scheduler = cls(
        num_blocks=rng.randint(6, 24),
        block_size=4,
        max_num_seqs=rng.randint(1, 8),
        preemption=preemption,
        num_host_blocks=rng.randint(1, 8) if preemption == "swap" else 0,
        prefix_caching=prefix_caching,
        **({"max_num_batched_tokens": rng.choice([3, 8, 40])} if cls is ChunkedPrefillScheduler else {}),
    )
    scheduler = observe(scheduler, SharingAuditor())
    device, ids, served, num_finished = Device(), iter(range(10**6)), [], 0

    def end_any(chance):
        unfinished = [*scheduler.running, *scheduler.waiting.values()]
        if unfinished and rng.random() < chance:
            request = rng.choice(unfinished)
            blocks = list(request.block_ids)
            failed = rng.random() < 0.4
            scheduler.finish_request(
                request.request_id, RequestStatus.FINISHED_ERROR if failed else RequestStatus.FINISHED_ABORTED
            )
            if failed:  # no one may read its blocks any more, unless another request has them too
                for block in (block for block in blocks if not scheduler.pool.ref_count(block)):
                    device.slots |= {(block, offset): None for offset in range(4)}
            scheduler.check()

    for iteration in range(300):
        if iteration < 60 and rng.random() < 0.3:
            prompt = [rng.randrange(2)] * rng.randint(1, 10) + [rng.randrange(2)] * rng.randint(0, 6)
            served.append(Request(next(ids), prompt, rng.randint(1, 9), cache_salt=rng.choice([None, None, "salt"])))
            scheduler.add_request(served[-1])
        parents = [each for each in scheduler.running if each.output_token_ids]
        may_fork = scheduler.outstanding is None and scheduler.num_running < scheduler.max_num_seqs
        if iteration < 60 and parents and may_fork and rng.random() < 0.4:
            parent = rng.choice(parents)
            outputs = parent.output_token_ids[: rng.randint(0, len(parent.output_token_ids))]
            outputs = (outputs + [rng.randrange(2)] * rng.randint(0, 3))[: parent.max_tokens - 1]
            served.append(scheduler.fork_request(parent.request_id, next(ids), outputs))
            scheduler.check()
        end_any(0.08)
        # What is found is there; between a failed step and the recovery no one looks.
        for request in [*scheduler.waiting.values()][:2] if scheduler.outstanding is None else ():
            blocks = scheduler.find_prefix(request)
            device.holds(request, blocks, 4 * len(blocks), 4)
        output = scheduler.schedule()
        scheduler.check()
        fails = rng.random() < 0.07
        device.run(output, 4, fails=fails)
        end_any(0.08)
        if fails:
            if rng.random() < 0.5:  # else schedule() does
                scheduler.recover()
            scheduler.check()
            continue
        token_ids = {each.request_id: rng.randrange(2) for each in output.scheduled}
        num_finished += len(scheduler.update_from_output(output, token_ids))
        scheduler.check()
        if iteration >= 60 and not scheduler.has_unfinished:
            break
    assert not scheduler.has_unfinished
    assert scheduler.pool.num_used == 0
    assert all(each.status.is_finished for each in served)
    assert num_finished > 0
