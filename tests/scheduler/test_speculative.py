"""Speculation in the scheduler: budget, blocks and limits of draft tokens, and random runs that an auditor watches."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from minicache.errors import InvariantError
from minicache.request import Request, RequestStatus
from minicache.scheduler import SpeculativeScheduler, create_scheduler
from minicache.scheduler.audit_speculation import SpeculationAuditor
from minicache.scheduler.audit_trace import audit_trace
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Recorder, observe
from minicache.trace import from_json, to_json

STOP = 5


def speculative(**options):
    return SpeculativeScheduler(**{"num_blocks": 1000, "block_size": 4, "num_speculative_tokens": 3} | options)


def decoding(scheduler, *requests):
    """Have these generate their first token, 7."""
    for request in requests:
        scheduler.add_request(request)
    while any(not request.output_token_ids for request in requests):
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))


def next_token(tokens):
    """What a made-up model generates behind these tokens: it depends on all of them."""
    return hash(tuple(tokens)) % 6


def generated(prompt, outputs, num_tokens, stops=()):
    """What it generates behind a prompt and some outputs, token by token."""
    outputs = list(outputs)
    while len(outputs) < num_tokens:
        outputs.append(next_token([*prompt, *outputs]))
        if outputs[-1] in stops:
            break
    return outputs


def verified(request, drafts):
    """The tokens that it gives a request with draft tokens: accepted ones, and one more."""
    tokens = request.token_ids(0, request.num_tokens)
    given = []
    for draft in (*drafts, None):
        given.append(next_token([*tokens, *given]))
        if given[-1] != draft:
            break
    return given


# --- what a step has --------------------------------------------------------------------------------------------------


def test_a_request_in_decode_computes_draft_tokens():
    scheduler, request = speculative(), Request("a", [1] * 6, 20)
    decoding(scheduler, request)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 4}
    assert output.draft_token_ids == {"a": [-1, -1, -1]}
    assert request.draft_token_ids is output.draft_token_ids["a"]
    assert request.token_ids(5, 10) == [1, 7, -1, -1, -1]
    assert len(request.block_ids) == 3  # 6 + 1 + 3 tokens
    assert scheduler.accept(output, {"a": [8, 9]}) == {"a": 9}
    assert (output.num_scheduled_tokens, request.output_token_ids) == ({"a": 2}, [7, 8])
    assert len(request.block_ids) == 2
    scheduler.update_from_output(output, {"a": 9})
    assert (request.output_token_ids, request.num_computed_tokens) == ([7, 8, 9], 8)
    scheduler.check()


def test_a_prompt_and_a_request_just_admitted_have_none():
    """Of b's 8 tokens two a step are computed, behind a's newest token and draft token."""
    scheduler = speculative(max_num_batched_tokens=4, num_speculative_tokens=1)
    decoding(scheduler, Request("a", [1], 20))
    scheduler.add_request(Request("b", [1] * 8, 20))
    work = []
    for _ in range(5):
        output = scheduler.schedule()
        work.append((dict(output.num_scheduled_tokens), list(output.draft_token_ids)))
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    assert work == [({"a": 2, "b": 2}, ["a"])] * 4 + [({"a": 2, "b": 2}, ["a", "b"])]


def test_the_last_token_of_a_prompt_has_none():
    """Alone in a step it is one token, as in decode; but the model has said nothing yet that could be continued."""
    scheduler = speculative(max_num_batched_tokens=4)
    scheduler.add_request(Request("a", [1] * 5, 20))
    work = []
    for _ in range(3):
        output = scheduler.schedule()
        work.append(dict(output.num_scheduled_tokens))
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    assert work == [{"a": 4}, {"a": 1}, {"a": 4}]


def test_the_blocks_that_a_victim_was_missing_are_spare():
    """Each holds two blocks of the 6. a and c need a third; c is preempted, and one of its blocks is left for b."""
    scheduler = speculative(num_blocks=6)
    decoding(scheduler, *(Request(name, [1] * num_prompt, 20) for name, num_prompt in (("a", 8), ("b", 7), ("c", 8))))
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.preempted) == ({"a": 4, "b": 4}, ["c"])


def test_the_budget_counts_draft_tokens_and_leaves_every_request_its_own():
    scheduler = speculative(max_num_batched_tokens=6)
    decoding(scheduler, *(Request(number, [number + 1], 20) for number in range(4)))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {0: 3, 1: 1, 2: 1, 3: 1}
    assert scheduler.token_budget == 0


@pytest.mark.parametrize(
    ("options", "max_tokens", "num_drafts"),
    [({}, 5, 3), ({}, 4, 2), ({}, 2, 0), ({"max_model_len": 9}, 20, 1)],
)
def test_no_more_than_the_answer_may_have(options, max_tokens, num_drafts):
    scheduler = speculative(**options)
    decoding(scheduler, Request("a", [1] * 6, max_tokens))
    drafts = scheduler.schedule().draft_token_ids
    assert drafts == ({"a": [-1] * num_drafts} if num_drafts else {})


def test_the_threshold_counts_draft_tokens():
    """While there is another request."""
    scheduler = speculative(long_prefill_threshold=3)
    decoding(scheduler, Request("a", [1] * 6, 20))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 4}
    scheduler.update_from_output(output, {"a": 7})
    scheduler.add_request(Request("b", [2] * 6, 20))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 3, "b": 3}


def test_draft_tokens_take_only_blocks_that_no_request_needs():
    """5 blocks of 4. Two requests hold 2 each; each needs another for its own next token, and one is free."""
    scheduler = speculative(num_blocks=5)
    first, second = Request("a", [1] * 7, 9), Request("b", [2] * 6, 9)
    decoding(scheduler, first, second)
    output = scheduler.schedule()
    # a: 8 tokens, so no room in its blocks, and b needs none: the free one is a's. b: 7 tokens, room for one.
    assert output.num_scheduled_tokens == {"a": 4, "b": 2}
    scheduler.update_from_output(output, {"a": 7, "b": 7})
    output = scheduler.schedule()
    # a's own token needs the free block; b has 8 tokens and no block behind them.
    assert (output.num_scheduled_tokens, output.preempted) == ({"a": 4, "b": 1}, [])


def test_a_proposal_is_cut():
    scheduler = speculative(propose=lambda request, limit: [1, 2, 3, 4, 5])
    decoding(scheduler, Request("a", [1], 20))
    assert scheduler.schedule().draft_token_ids == {"a": [1, 2, 3]}
    scheduler = speculative(propose=lambda request, limit: [])
    decoding(scheduler, Request("a", [1], 20))
    assert scheduler.schedule().draft_token_ids == {}


# --- accepting --------------------------------------------------------------------------------------------------------


def test_a_stop_token_among_the_accepted_ones_is_the_last():
    scheduler, request = speculative(), Request("a", [1] * 6, 20, stop_token_ids=[STOP])
    decoding(scheduler, request)
    output = scheduler.schedule()
    assert scheduler.accept(output, {"a": [8, STOP, 9, 10]}) == {"a": STOP}
    assert scheduler.update_from_output(output, {"a": STOP}) == [request]
    assert (request.output_token_ids, request.status) == ([7, 8, STOP], RequestStatus.FINISHED_STOPPED)
    scheduler = speculative()
    ignoring = Request("a", [1] * 6, 20, stop_token_ids=[STOP], ignore_eos=True)
    decoding(scheduler, ignoring)
    assert scheduler.accept(scheduler.schedule(), {"a": [8, STOP, 9, 10]}) == {"a": 10}


def test_a_step_without_accept_rejects_them():
    scheduler, request = speculative(), Request("a", [1] * 6, 20)
    decoding(scheduler, request)
    output = scheduler.schedule()
    scheduler.update_from_output(output, {"a": 8})
    assert (request.output_token_ids, request.num_computed_tokens, len(request.block_ids)) == ([7, 8], 7, 2)
    assert scheduler.draft_stats.num_draft_tokens == 3
    assert scheduler.draft_stats.acceptance_rate == 0


def test_accept_refuses_what_cannot_be_and_changes_nothing():
    scheduler, request = speculative(), Request("a", [1] * 6, 20)
    decoding(scheduler, request)
    output = scheduler.schedule()
    for wrong in ({"a": [8] * 5}, {"b": [8]}):
        with pytest.raises(ValueError, match="draft tokens"):
            scheduler.accept(output, wrong)
    assert request.output_token_ids == [7]
    scheduler.accept(output, {"a": [8]})
    with pytest.raises(ValueError, match="accepted before"):
        scheduler.accept(output, {"a": [8]})


def test_a_failed_step_takes_accepted_tokens_back():
    scheduler, request = speculative(), Request("a", [1] * 6, 20)
    decoding(scheduler, request)
    scheduler.accept(scheduler.schedule(), {"a": [8, 9, 10]})
    assert request.output_token_ids == [7, 8, 9]
    scheduler.recover()
    assert (request.output_token_ids, request.draft_token_ids, request.status) == ([7], [], RequestStatus.WAITING)
    assert scheduler.draft_stats.num_drafts == 0


def test_the_counts():
    scheduler = speculative()
    decoding(scheduler, Request("a", [1] * 6, 30), Request("b", [2] * 6, 30))
    for given in ({"a": [8, 9, 10], "b": [8]}, {"a": [8, 9, 10, 11], "b": [8, 9]}):
        output = scheduler.schedule()
        scheduler.update_from_output(output, scheduler.accept(output, given))
    stats = scheduler.draft_stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 12, 6)
    assert stats.num_accepted_per_position == [3, 2, 1]
    assert (stats.acceptance_rate, stats.mean_acceptance_length) == (0.5, 2.5)


def test_the_prefix_cache_has_accepted_tokens_and_no_others():
    """8 tokens fill two blocks. The third is filled by accepted tokens in one run, by draft tokens in the other."""
    for given, num_found in (([8, 9, 10, 11], 12), ([8], 8)):
        scheduler = speculative(prefix_caching=True, propose=lambda request, limit: [8, 9, 10])
        request = Request("a", range(10, 18), 20)
        decoding(scheduler, request)
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": 4}
        scheduler.update_from_output(output, scheduler.accept(output, {"a": given}))
        again = Request("b", [*range(10, 18), 7, 8, 9, 10, 11, 12], 9)
        assert len(scheduler.find_prefix(again)) * 4 == num_found


def test_options():
    assert create_scheduler("chunked", num_blocks=9, num_speculative_tokens=2).num_speculative_tokens == 2
    for stage in ("static", "continuous", "paged", "fair"):
        with pytest.raises(ValueError, match='take "chunked"'):
            create_scheduler(stage, num_blocks=9, num_speculative_tokens=2)
    for wrong, error in ((0, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="num_speculative_tokens"):
            speculative(num_speculative_tokens=wrong)


def test_the_auditor_changes_nothing():
    """While its rules run, the requests are as they were: the draft tokens are in copies."""
    seen = []

    class Looking(SpeculationAuditor):
        def check_work(self, audited, output):
            super().check_work(audited, output)
            seen.append((list(request.output_token_ids), len(audited.running[0].output_token_ids)))

    request = Request("a", [1] * 5, 20)
    scheduler = observe(speculative(propose=lambda request, num_tokens: [7] * num_tokens), Looking())
    decoding(scheduler, request)
    scheduler.schedule()
    outputs, num_audited = seen[-1]
    assert outputs == request.output_token_ids
    assert num_audited == len(outputs) + len(request.draft_token_ids) > len(outputs)


def test_drive():
    """Two of three are accepted: 3 tokens a step, of 19 after the first."""
    scheduler = speculative()
    tally = drive(scheduler, [Request("a", [1] * 6, 20)], num_accepted=lambda request, num_drafts: min(2, num_drafts))
    assert tally.num_steps == 1 + 7
    assert tally.num_prefill_tokens == 6
    assert drive(speculative(), [Request("a", [1] * 6, 20)]).num_steps == 20


# --- random runs ------------------------------------------------------------------------------------------------------


def run(seed, preemption, kinds):
    """Forks, aborts, lost steps, stop tokens, and pools and budgets of next to nothing; most proposals are right."""
    rng = random.Random(seed)
    steps = []
    stages = {
        "num_blocks": rng.randint(6, 20),
        "num_speculative_tokens": rng.randint(1, 6),
        "max_num_seqs": rng.randint(1, 8),
        "max_num_batched_tokens": rng.choice([2, 4, 9, 30, 60]),
        "long_prefill_threshold": rng.choice([0, 0, 1, 3, 8]),
        "max_model_len": rng.choice([None, None, 25]),
        "preemption": preemption,
        "num_host_blocks": 6 if preemption == "swap" else 0,
        "prefix_caching": rng.random() < 0.6,
        "reserve_full_prompt": rng.random() < 0.5,
    }

    def propose(request, limit):
        right = generated(request.prompt_token_ids, request.output_token_ids, len(request.output_token_ids) + limit)
        drafts = right[len(request.output_token_ids) :]
        return [token if rng.random() < 0.7 else rng.randrange(6) for token in drafts][: rng.randint(0, 7)]

    forks = rng.random() < 0.5
    recorder = [] if forks or stages["prefix_caching"] else [Recorder(steps.append)]  # a trace knows neither
    scheduler = observe(speculative(**stages, propose=propose), SpeculationAuditor(), *recorder)
    names, requests, given, awaited = iter(range(10**6)), [], {}, False
    for step in range(4000):
        if step < 60 and rng.random() < 0.3:
            prompt, stops = [rng.randrange(2)] * rng.randint(1, 20), rng.choice([(), (STOP,)])
            options = {"priority": rng.choice([0, 0, 1]), "group": rng.choice(["text", "text", "image"])}
            requests.append(Request(next(names), prompt, rng.randint(1, 19), stop_token_ids=stops, **options))
            scheduler.add_request(requests[-1])
        parents = [each for each in scheduler.running if each.output_token_ids]
        if forks and step < 60 and parents and not awaited and scheduler.num_running < scheduler.max_num_seqs:
            parent = rng.choice(parents)
            outputs = parent.output_token_ids[: rng.randint(0, len(parent.output_token_ids))]
            longest = parent.max_tokens if scheduler.max_model_len is None else 25 - parent.num_prompt_tokens
            if rng.random() < 0.2 and len(outputs) < min(parent.max_tokens, longest):
                requests.append(scheduler.fork_request(parent.request_id, next(names), outputs))
        unfinished = [*scheduler.running, *scheduler.waiting.values()]
        if unfinished and rng.random() < 0.04:
            scheduler.abort_request(rng.choice(unfinished).request_id)
        output = scheduler.schedule()
        scheduler.check()
        kinds["drafts"] += len(output.draft_token_ids)
        kinds["preempted"] += len(output.preempted)
        kinds["copies"] += len(output.blocks_to_copy)
        if awaited := rng.random() < 0.03:
            continue  # the step's tokens never come
        tokens = {
            request.request_id: next_token(request.token_ids(0, request.num_tokens))
            for request in output.scheduled
            if request.num_computed_tokens + output.num_scheduled_tokens[request.request_id] >= request.num_tokens
        }
        if output.draft_token_ids and rng.random() < 0.9:
            drafting = {each.request_id: each for each in output.scheduled}
            given = {name: verified(drafting[name], drafts) for name, drafts in output.draft_token_ids.items()}
            tokens |= scheduler.accept(output, given)
            kinds["accepted"] += sum(map(len, given.values())) - len(given)
            scheduler.check()
            if awaited := rng.random() < 0.03:
                kinds["lost after accept"] += 1
                continue
        scheduler.update_from_output(output, tokens)
        scheduler.check()
        if step >= 60 and not scheduler.has_unfinished:
            break
    return scheduler, requests, steps, stages


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(40))
def test_random_runs(preemption, seed):
    scheduler, requests, steps, stages = run(seed, preemption, Counter())
    assert {request.status.is_finished for request in requests} == {True}
    assert scheduler.pool.num_used == 0
    for request in requests:  # whatever was proposed and accepted, they have the model's tokens
        longest = len(request.output_token_ids)
        assert request.output_token_ids == generated(request.prompt_token_ids, (), longest, request.stop_token_ids)
        if request.status is RequestStatus.FINISHED_STOPPED:
            assert request.output_token_ids[-1] == STOP
        elif request.status is RequestStatus.FINISHED_LENGTH:
            assert longest == request.max_tokens or request.num_tokens == stages["max_model_len"]
    if steps:
        lines = [from_json(to_json(step)) for step in steps]
        limits = {name: stages[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
        assert audit_trace(lines, **limits) == len(steps)


def test_the_runs_are_worth_their_name():
    kinds = Counter()
    for seed in range(20):
        run(seed, "swap" if seed % 2 else "recompute", kinds)
    assert all(kinds[kind] >= 20 for kind in ("drafts", "accepted", "preempted", "copies"))
    assert kinds["lost after accept"] >= 3


# --- the auditor ------------------------------------------------------------------------------------------------------


class Greedy(SpeculativeScheduler):
    """Has draft tokens take blocks that a later request needs."""

    def max_drafts(self, request, output):
        self._num_missing = 0
        return super().max_drafts(request, output)


class TooLong(SpeculativeScheduler):
    """Has draft tokens for one token more than the answer may have."""

    def max_drafts(self, request, output):
        return self.num_speculative_tokens


class KeepsBlocks(SpeculativeScheduler):
    """Keeps the blocks of rejected draft tokens."""

    def accept(self, output, tokens):
        more = {each.request_id: each.block_ids.copy() for each in output.scheduled}
        last = super().accept(output, tokens)
        for request in output.scheduled:
            missing = len(more[request.request_id]) - len(request.block_ids)
            request.block_ids += self.pool.allocate(max(0, missing))
        return last


@pytest.mark.parametrize(
    ("broken", "num_blocks", "rule"),
    [(Greedy, 5, "drafts: .* is preempted"), (TooLong, 50, "drafts: .* has 6"), (KeepsBlocks, 50, "holdings: ")],
)
def test_the_auditor_notices(broken, num_blocks, rule):
    def audited():
        scheduler = broken(num_blocks=num_blocks, block_size=4, num_speculative_tokens=6)
        watched = observe(scheduler, SpeculationAuditor())
        for name, num_tokens in (("a", 7), ("b", 8)):  # in decode, both hold 2 blocks, and b needs the one that is left
            watched.add_request(Request(name, [1] * num_tokens, 9))
        for _ in range(30):
            output = watched.schedule()
            tokens = dict.fromkeys(output.num_scheduled_tokens, 7)
            watched.update_from_output(
                output, tokens | watched.accept(output, {}) if output.draft_token_ids else tokens
            )

    with pytest.raises(InvariantError, match=rule):
        audited()
