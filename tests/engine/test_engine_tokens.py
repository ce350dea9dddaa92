"""Whatever the scheduler, the cache and the batch composition: the tokens are those of one request at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.grid import grid

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.errors import RequestTooLargeError
from minicache.kernels import cpu
from minicache.model import MiniGPT, MiniGPTConfig, save_minigpt
from minicache.scheduler import SCHEDULERS
from minicache.scheduler.observe import Observer

LENGTHS = (14, 3, 11, 1, 18, 6, 8, 16)


def params_of(**options):
    return [SamplingParams(max_tokens=length, ignore_eos=True, **options) for length in LENGTHS]


def token_ids(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def expected(prompts, alone):
    return [alone(prompt, length) for prompt, length in zip(prompts, LENGTHS, strict=True)]


@grid(
    {
        "scheduler": list(SCHEDULERS),
        "cache,block_size": [("paged", 1), ("paged", 3), ("paged", 16), ("dense", 16)],
        "max_num_seqs": [3, 64],
    }
)
def test_greedy_tokens(model, prompts, expected, watch, scheduler, cache, block_size, max_num_seqs):
    options = {"num_blocks": 256 // block_size, "block_size": block_size, "max_num_seqs": max_num_seqs}
    llm = LLM(model, scheduler=scheduler, cache=cache, observers=[watch], **options)
    assert token_ids(llm.generate(prompts, params_of())) == expected
    assert max(map(len, watch.batches)) == min(max_num_seqs, len(prompts))
    assert llm.scheduler.pool.num_used == 0


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [3, 1, 4, 0, 5, 2, 6, 7]])
def test_the_order_of_requests_does_not_matter(model, prompts, expected, order):
    llm = LLM(model, max_num_seqs=3, num_blocks=64)
    params = params_of()
    got = token_ids(llm.generate([prompts[i] for i in order], [params[i] for i in order]))
    assert got == [expected[i] for i in order]


def test_without_numba_the_tokens_are_the_same_and_it_is_said_once(model, prompts, expected, monkeypatch, caplog):
    monkeypatch.setattr(cpu, "why_unavailable", lambda: "numba is away for this test")
    for llm in [LLM(model, num_blocks=64) for _ in range(2)]:
        assert token_ids(llm.generate(prompts, params_of())) == expected
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.getMessage().endswith("several times slower: numba is away for this test")


# In chunks


@grid({"cache": ["paged", "dense"], "max_num_batched_tokens": [1, 5, 8], "long_prefill_threshold": [0, 2]})
def test_prompts_longer_than_a_step(
    model, prompts, expected, watch, cache, max_num_batched_tokens, long_prefill_threshold
):
    """Anyone who names no scheduler gets one that computes a prompt of 12 tokens in steps of 1, 5 or 8."""
    assert max(map(len, prompts)) > 8
    limits = {"max_num_batched_tokens": max_num_batched_tokens, "long_prefill_threshold": long_prefill_threshold}
    llm = LLM(model, cache=cache, num_blocks=64, observers=[watch], **limits)
    assert token_ids(llm.generate(prompts, params_of())) == expected
    assert max(sum(batch.values()) for batch in watch.batches) == max_num_batched_tokens
    if long_prefill_threshold:
        most = max(max(batch.values()) for batch in watch.batches)
        assert most == min(max_num_batched_tokens, long_prefill_threshold)


def test_the_other_schedulers_refuse_a_prompt_longer_than_a_step(model, prompts):
    for scheduler in ("static", "continuous", "paged", "fair"):
        llm = LLM(model, scheduler=scheduler, max_num_batched_tokens=8)
        with pytest.raises(RequestTooLargeError, match="max_num_batched_tokens"):
            llm.generate([max(prompts, key=len)], params_of()[0])


# Preempted


@grid({"cache": ["paged", "dense"], "scheduler": ["paged", "fair", "chunked"], "block_size": [1, 4]})
def test_preempted_by_recompute(model, prompts, expected, watch, scheduler, cache, block_size):
    llm = LLM(
        model, scheduler=scheduler, cache=cache, num_blocks=36 // block_size, block_size=block_size, observers=[watch]
    )
    assert token_ids(llm.generate(prompts, params_of())) == expected
    assert watch.num_preempted >= 2
    assert llm.scheduler.pool.num_used == 0


@pytest.mark.parametrize("scheduler", ["paged", "fair", "chunked"])
@pytest.mark.parametrize(("block_size", "num_host_blocks"), [(1, 200), (4, 50), (4, 5)])
def test_preempted_by_swap(model, prompts, expected, watch, scheduler, block_size, num_host_blocks):
    llm = LLM(
        model,
        scheduler=scheduler,
        num_blocks=36 // block_size,
        block_size=block_size,
        preemption="swap",
        num_host_blocks=num_host_blocks,
        observers=[watch],
    )
    assert token_ids(llm.generate(prompts, params_of())) == expected
    assert watch.num_swapped_in >= 2
    assert llm.scheduler.host_pool.num_used == 0


def test_a_swapped_request_does_not_need_its_old_blocks(model, prompts, expected, watch):
    """All that is free is overwritten before each step: what comes back from the host is all there is of it."""
    llm = LLM(
        model, scheduler="paged", num_blocks=9, block_size=4, preemption="swap", num_host_blocks=50, observers=[watch]
    )
    for prompt, params in zip(prompts, params_of(), strict=True):
        llm.add_request(prompt, params)
    got = {request_id: [] for request_id in range(len(prompts))}
    while llm.has_unfinished:
        free = [block for block in range(9) if not llm.scheduler.pool.ref_count(block)]
        for layer in range(model.config.num_layers):
            llm.storage.k(layer)[free] = float("nan")
            llm.storage.v(layer)[free] = float("nan")
        for chunk in llm.step():
            got[chunk.request_id].append(chunk.token_id)
    assert list(got.values()) == expected
    assert watch.num_swapped_in >= 2


# Sampled


@grid(
    {
        "options": [
            {"temperature": 1.0},
            {"temperature": 0.7, "top_k": 5},
            {"temperature": 1.5, "top_p": 0.8},
            {"temperature": 2.0, "top_k": 20, "top_p": 0.9},
        ],
        "engine": [
            {},
            {"scheduler": "static", "cache": "dense", "max_num_seqs": 3},
            {"scheduler": "paged", "num_blocks": 9, "block_size": 4},
            {"scheduler": "fair", "num_blocks": 9, "block_size": 4, "preemption": "swap", "num_host_blocks": 40},
            {"num_blocks": 9, "block_size": 4, "max_num_batched_tokens": 6},
        ],
    }
)
def test_a_seed_gives_the_same_tokens_in_any_company(model, prompts, alone, watch, engine, options):
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, seed=seed, **options) for seed, length in enumerate(LENGTHS)
    ]
    expected = [alone(prompt, each.max_tokens, each) for prompt, each in zip(prompts, params, strict=True)]
    assert (
        token_ids(LLM(model, observers=[watch], **{"num_blocks": 64, **engine}).generate(prompts, params)) == expected
    )
    assert (watch.num_preempted > 0) == ("num_blocks" in engine)


def test_greedy_and_sampled_side_by_side(model, prompts, alone):
    params = [
        SamplingParams(max_tokens=10, ignore_eos=True, temperature=float(i % 2), seed=i) for i in range(len(prompts))
    ]
    expected = [
        alone(prompt, 10, each if each.temperature else None) for prompt, each in zip(prompts, params, strict=True)
    ]
    assert token_ids(LLM(model, num_blocks=64).generate(prompts, params)) == expected


def test_without_a_seed_draws_differ(model, prompts):
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    answers = token_ids(LLM(model, num_blocks=64).generate([prompts[0]] * 4, params))
    assert len(set(map(tuple, answers))) > 1


def test_one_params_object_with_a_seed_for_all_prompts(model, prompts, alone):
    """Each request has a generator of its own: equal prompts with an equal seed give equal answers."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    answers = token_ids(LLM(model, num_blocks=64).generate([prompts[0], prompts[1], prompts[0]], params))
    assert answers == [alone(prompt, 12, params) for prompt in (prompts[0], prompts[1], prompts[0])]


# Coming and going


@pytest.mark.parametrize(
    "engine",
    [{"scheduler": name} for name in SCHEDULERS]
    + [{"cache": "dense"}, {"num_blocks": 9, "block_size": 4}, {"num_blocks": 20, "block_size": 4, "max_num_seqs": 3}],
    ids=str,
)
def test_requests_that_come_while_others_run(model, prompts, expected, engine):
    llm = LLM(model, **{"max_num_seqs": 4, "num_blocks": 64, **engine})
    arrivals = {0: [0], 1: [1, 2], 2: [3], 6: [4, 5], 30: [6], 90: [7]}
    got = [[] for _ in prompts]
    params = params_of()
    for step in itertools.count():
        for index in arrivals.pop(step, []):
            assert llm.add_request(prompts[index], params[index], request_id=f"r{index}") == f"r{index}"
        if not llm.has_unfinished and not arrivals:
            break
        for chunk in llm.step():
            got[int(chunk.request_id[1:])].append(chunk.token_id)
    assert got == expected


@pytest.mark.parametrize("engine", [{}, {"cache": "dense"}, {"num_blocks": 9, "block_size": 4}], ids=str)
def test_requests_that_are_aborted(model, prompts, expected, watch, engine):
    """Waiting, in their prompt, in decode, preempted: what is left gets its tokens, and no block is lost."""
    llm = LLM(model, max_num_seqs=5, observers=[watch], **{"num_blocks": 64, **engine})
    got = {}
    for prompt, params in zip(prompts, params_of(), strict=True):
        got[llm.add_request(prompt, params)] = []
    gone = {0: [6], 3: [2], 8: [4]}
    for step in itertools.count():
        for request_id in gone.get(step, []):
            assert llm.abort_request(request_id)
            assert not llm.abort_request(request_id)
            got[request_id].append("gone")
        if not llm.has_unfinished:
            break
        for chunk in llm.step():
            got[chunk.request_id].append(chunk.token_id)
    for request_id, tokens in got.items():
        if "gone" in tokens:
            assert tokens[-1] == "gone"
            assert tokens[:-1] == expected[request_id][: len(tokens) - 1]
        else:
            assert tokens == expected[request_id]
    assert [request_id for request_id, tokens in got.items() if "gone" in tokens] == [2, 4, 6]
    assert llm.scheduler.pool.num_used == 0
    assert not llm.answers


# Other ways to the same tokens


def test_a_model_that_has_only_a_forward_pass(model, prompts, expected):
    class Plain:
        config = model.config
        parameters = model.parameters

        def __call__(self, token_ids, cache):
            return model(token_ids, cache)

    assert token_ids(LLM(Plain(), num_blocks=64).generate(prompts, params_of())) == expected


def test_float64(prompts, expected):
    llm = LLM("minigpt", dtype=torch.float64, num_blocks=64)
    assert llm.storage.dtype == torch.float64
    assert token_ids(llm.generate(prompts, params_of())) == expected


def test_a_scheduler_that_computes_prompts_in_chunks(model, prompts, alone):
    """Phase 9's business, but the engine must not pick a token before a prompt is complete."""
    from minicache.scheduler import ContinuousBatchScheduler

    class Chunks(ContinuousBatchScheduler):
        def order(self, request, output):
            num_new = min(3, request.num_tokens - request.num_computed_tokens)
            output.num_scheduled_tokens[request.request_id] = num_new
            output.scheduled.append(request)

    for options in ({}, {"temperature": 1.0, "seed": 9}):
        params = SamplingParams(max_tokens=8, ignore_eos=True, **options)
        for cache in ("paged", "dense"):
            llm = LLM(model, scheduler=Chunks(num_blocks=100, block_size=4, max_num_seqs=5), cache=cache)
            expected = [alone(prompt, 8, params if options else None) for prompt in prompts]
            assert token_ids(llm.generate(prompts, params)) == expected


def test_the_engines_weights_are_the_models_own(tmp_path):
    """They are laid out anew in memory, and by value, by name and in a file they are what they were."""
    torch.manual_seed(5)
    model = MiniGPT(MiniGPTConfig(vocab_size=40, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = list(model.parameters())
    save_minigpt(model, tmp_path / "before.safetensors")
    LLM(LLM(model).model)  # twice, which must be once
    save_minigpt(model, tmp_path / "after.safetensors")
    assert [after is own for after, own in zip(model.parameters(), parameters, strict=True)] == [True] * len(parameters)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (tmp_path / "before.safetensors").read_bytes() == (tmp_path / "after.safetensors").read_bytes()


class Preempted(Observer):
    """Notes the preempted requests."""

    def __init__(self, ids):
        self.ids = ids

    def on_schedule(self, scheduler, output):
        self.ids += output.preempted


def test_a_prompt_that_is_admitted_by_its_first_chunk(model, prompts, expected):
    """Without the rule requests are admitted that must be preempted; the tokens are the same."""
    preempted = []
    for reserve_full_prompt in (True, False):
        limits = {"num_blocks": 9, "block_size": 4, "max_num_batched_tokens": 8, "long_prefill_threshold": 2}
        preempted.append([])
        engine = LLM(model, reserve_full_prompt=reserve_full_prompt, observers=[Preempted(preempted[-1])], **limits)
        assert token_ids(engine.generate(prompts, params_of())) == expected
    assert len(preempted[0]) < len(preempted[1])
    with pytest.raises(ValueError, match="reserve_full_prompt"):
        LLM(model, scheduler="fair", reserve_full_prompt=False)
