"""Speculation in the engine: the answers are those without it, in fewer steps, whatever happens to the requests."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from tests.engine.conftest import Watch
from tests.engine.test_recovery import WHERE, sabotage, serve
from tests.grid import grid
from torch import Tensor, nn

from minicache.engine.answers import Completion
from minicache.engine.beam import BeamSearchParams
from minicache.engine.beam_requests import beam_search
from minicache.engine.drafting import SpeculativeConfig
from minicache.engine.llm import LLM
from minicache.engine.options import ReplicaOptions
from minicache.engine.runners.gpu import GPUModelRunner
from minicache.engine.runners.verify import EagerRunner, lookahead
from minicache.engine.sampling import SamplingParams, TokenSampler
from minicache.engine.speculative import rows_to_verify, verify
from minicache.grammar import Tokenizer
from minicache.model import Decoder, DecoderConfig, MiniGPT, load_minigpt
from minicache.model.checkpoint import SHIPPED_DRAFT
from minicache.model.training import draft_config
from minicache.scheduler import ChunkedPrefillScheduler, SpeculativeScheduler
from minicache.scheduler.audit_speculation import SpeculationAuditor
from minicache.serving.replica.llm import make_llm
from minicache.serving.replica.stats import SchedulerStats

DRAFTERS = ("ngram", "minigpt-draft")

SMALL: dict[str, Any] = {"num_blocks": 16, "block_size": 4}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 200},
    "tiny": SMALL,
    "tiny, chunks": SMALL | {"max_num_batched_tokens": 9, "num_blocks": 12},
    "tiny, swap": SMALL | {"preemption": "swap", "num_host_blocks": 40},
    "tiny, swap, prefixes, chunks": SMALL
    | {
        "preemption": "swap",
        "num_host_blocks": 8,
        "num_blocks": 13,
        "prefix_caching": True,
        "max_num_batched_tokens": 12,
    },
    "tiny, prefixes, few slots": SMALL | {"prefix_caching": True, "max_num_seqs": 3},
}


@pytest.fixture(scope="module")
def draft_model() -> MiniGPT:
    return load_minigpt(SHIPPED_DRAFT)


def told(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [(each.token_ids, each.text, each.finish_reason) for each in completions]


def params_of(index: int, **options: Any) -> SamplingParams:
    given = {"max_tokens": 10 + 3 * index, "ignore_eos": True, "seed": index, "n": 1 + (index == 2)}
    return SamplingParams(**(given | options))


# --- the same answers -------------------------------------------------------------------------------------------------


@grid({"engine": list(ENGINES), "drafter": DRAFTERS, "temperature": [0.0, 1.0]})
def test_the_answers_are_those_without_speculation(
    model: MiniGPT,
    draft_model: MiniGPT,
    tokenizer: Tokenizer,
    prompts: Any,
    drafter: str,
    engine: str,
    temperature: float,
) -> None:
    """Sampled ones too, seed by seed: a draft token decides whether a token comes early, not which one comes."""
    wishes = [
        params_of(index, temperature=temperature, top_p=(1.0, 0.9)[index % 2], top_k=(0, 5)[index == 4])
        for index in range(8)
    ]
    prompts = [*prompts[:6], prompts[2], [*prompts[2], *prompts[1]]]
    expected = told(LLM(model, tokenizer=tokenizer, num_blocks=400).generate(prompts, wishes))
    watch, auditor = Watch(), SpeculationAuditor()
    source: Any = "ngram" if drafter == "ngram" else draft_model
    llm = LLM(model, tokenizer=tokenizer, speculative=source, observers=[watch, auditor], **ENGINES[engine])
    assert told(llm.generate(prompts, wishes)) == expected
    stats = llm.scheduler.draft_stats  # type: ignore[attr-defined]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert llm.scheduler.pool.num_used == 0
    if engine.startswith("tiny") and "few" not in engine:
        assert watch.num_preempted
    if "swap" in engine:
        assert watch.num_swapped_in


LLAMA = DecoderConfig(
    vocab_size=97,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_seq_len=128,
)


@pytest.fixture(scope="module")
def llama() -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Decoder(LLAMA).eval()


class Unknown(nn.Module):
    """A model of unknown make: no runner knows it, so it is called as any is."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, token_ids: Tensor, cache: Any) -> Tensor:
        logits: Tensor = self.model(token_ids, cache)
        return logits


@pytest.mark.parametrize("known", [True, False])
def test_a_random_llama_that_drafts_for_itself(llama: Decoder, known: bool) -> None:
    """All draft tokens are accepted: 5 tokens a step. So the draft model has followed every token and every block."""
    rng = random.Random(0)
    prompts = [[rng.randrange(97) for _ in range(length)] for length in (3, 17, 40, 5)]
    params = SamplingParams(max_tokens=41)
    expected = told(LLM(llama, num_blocks=200).generate(prompts, params))
    model = llama if known else Unknown(llama)
    llm = LLM(model, num_blocks=200, block_size=4, speculative=model, observers=[SpeculationAuditor()])
    assert isinstance(llm.speculation._runner, EagerRunner) is not known  # type: ignore[union-attr]
    assert told(llm.generate(prompts, params)) == expected
    assert llm.memory.num_steps == 1 + 8
    assert llm.scheduler.draft_stats.num_accepted_per_position == [32] * 4  # type: ignore[attr-defined]


def test_the_draft_model_follows_chunks_copies_and_swaps(llama: Decoder) -> None:
    """With forks, prefixes and preemption by swap it misses next to nothing: as good as all is accepted."""
    rng = random.Random(1)
    shared = [rng.randrange(97) for _ in range(12)]
    prompts = [shared + [rng.randrange(97) for _ in range(length)] for length in (3, 17, 30, 5)]
    wishes = [SamplingParams(max_tokens=20, temperature=0.8, seed=index, n=1 + index % 2) for index in range(4)]
    expected = told(LLM(llama, num_blocks=200).generate(prompts, wishes))
    watch = Watch()
    options: Any = {"preemption": "swap", "num_host_blocks": 60, "prefix_caching": True, "max_num_batched_tokens": 24}
    llm = LLM(llama, num_blocks=22, block_size=4, speculative=llama, observers=[watch, SpeculationAuditor()], **options)
    assert told(llm.generate(prompts, wishes)) == expected
    assert watch.num_swapped_in
    assert llm.scheduler.draft_stats.acceptance_rate > 0.95  # type: ignore[attr-defined]


def test_the_runner_of_a_gpu_gives_logits_for_draft_tokens(model: MiniGPT, prompts: Any) -> None:
    """Here over blocks in host memory, without graphs: decodes, prompts and drafts in steps that it reorders."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    options: Any = {"num_blocks": 300, "block_size": 4, "max_num_batched_tokens": 12}
    expected = told(LLM(model, **options).generate(prompts, params))
    llm = LLM(model, speculative="minigpt-draft", **options)
    assert llm.speculation is not None
    llm.speculation._runner = GPUModelRunner(model, llm.memory, 256, None)  # type: ignore[arg-type]
    assert told(llm.generate(prompts, params)) == expected
    assert llm.scheduler.draft_stats.acceptance_rate > 0.4  # type: ignore[attr-defined]


def test_rejected_draft_tokens_change_nothing(llama: Decoder) -> None:
    """Proposals out of the air, in random numbers: what is in the cache of a rejected one is never read."""
    rng = random.Random(2)
    prompts = [[rng.randrange(97) for _ in range(length)] for length in (3, 17, 40, 5)]
    params = SamplingParams(max_tokens=40)
    expected = told(LLM(llama, num_blocks=200).generate(prompts, params))
    config = SpeculativeConfig(num_speculative_tokens=9)
    llm = LLM(
        llama, num_blocks=26, block_size=4, speculative=config, observers=[SpeculationAuditor()], prefix_caching=True
    )
    llm.scheduler.scheduler.propose = lambda request, limit: [  # type: ignore[attr-defined]
        rng.randrange(97) for _ in range(rng.randint(0, limit))
    ]
    assert told(llm.generate(prompts, params)) == expected


# --- where an answer ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_tokens_stop_strings_and_limits_in_the_middle_of_a_step(
    model: MiniGPT, tokenizer: Tokenizer, prompts: Any, drafter: str
) -> None:
    plain = LLM(model, tokenizer=tokenizer, num_blocks=400)
    longest = plain.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    kinds: Counter[str] = Counter()
    for cut in range(2, 20, 3):
        wishes = [
            SamplingParams(
                max_tokens=24,
                stop=[each.text[2 * cut : 2 * cut + 5] or "xyz"],
                stop_token_ids=[each.token_ids[cut + 2]],
            )
            for each in longest
        ]
        expected = told(plain.generate(prompts, wishes))
        llm = LLM(model, tokenizer=tokenizer, num_blocks=400, speculative=drafter, observers=[SpeculationAuditor()])
        assert told(llm.generate(prompts, wishes)) == expected
        assert llm.scheduler.pool.num_used == 0
        kinds.update(reason for *_, reason in expected)
    assert kinds["stop"] > 20


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stream_has_a_chunk_for_each_token_in_order(
    model: MiniGPT, tokenizer: Tokenizer, prompts: Any, drafter: str
) -> None:
    wishes = [params_of(index, stop=("the",) if index % 2 else ()) for index in range(8)]
    plain = LLM(model, tokenizer=tokenizer, num_blocks=400).generate(prompts, wishes)
    llm = LLM(model, tokenizer=tokenizer, num_blocks=400, speculative=drafter)
    chunks = list(llm.stream(prompts, wishes))
    for index, answer in enumerate(plain):
        its = [chunk for chunk in chunks if chunk.index == index]
        assert [chunk.token_id for chunk in its] == answer.token_ids
        assert "".join(chunk.text for chunk in its) == answer.text
        assert [chunk.finish_reason for chunk in its] == [None] * (len(its) - 1) + [answer.finish_reason]
    assert llm.memory.num_steps < sum(len(answer.token_ids) for answer in plain)


def test_every_token_has_its_log_probabilities(model: MiniGPT, prompts: Any) -> None:
    def served(**options: Any) -> dict[Any, list[Any]]:
        llm = LLM(model, num_blocks=400, **options)
        names = [
            llm.add_request(prompt, params_of(index, temperature=0.7), num_logprobs=(None, 0, 3)[index % 3])
            for index, prompt in enumerate(prompts)
        ]
        got: dict[Any, list[Any]] = {name: [] for name in names}
        while llm.has_unfinished:
            for chunk in llm.step():
                got[chunk.request_id].append((chunk.index, chunk.token_id, chunk.logprobs))
        return {name: sorted(its, key=lambda each: each[0]) for name, its in got.items()}

    plain, speculated = served(), served(speculative="minigpt-draft")
    for name, expected in plain.items():
        assert [each[:2] for each in speculated[name]] == [each[:2] for each in expected]
        for (_, token_id, one), (*_, other) in zip(speculated[name], expected, strict=True):
            assert (one is None) == (other is None) == (name % 3 == 0)
            if one is not None:
                assert one.token_id == token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [each for each, _ in one.top] == [each for each, _ in other.top]


def test_abort(model: MiniGPT, prompts: Any, alone: Any) -> None:
    llm = LLM(model, num_blocks=40, block_size=4, speculative="minigpt-draft", observers=[SpeculationAuditor()])
    names = [llm.add_request(prompt, SamplingParams(max_tokens=30, ignore_eos=True)) for prompt in prompts]
    got: dict[Any, list[int]] = {name: [] for name in names}
    for step in range(200):
        if step in (3, 5):
            assert llm.abort_request(names.pop())
        for chunk in llm.step():
            got[chunk.request_id].append(chunk.token_id)  # type: ignore[arg-type]
        if not llm.has_unfinished:
            break
    assert len(names) == 6
    assert llm.scheduler.pool.num_used == 0
    for name, prompt in zip(names, prompts, strict=False):
        assert got[name] == alone(prompt, 30)


@grid({"drafter": DRAFTERS, "temperature": [0.0, 1.0]})
def test_steps_that_fail_lose_no_token_and_give_none_twice(
    model: MiniGPT, prompts: Any, drafter: str, temperature: float
) -> None:
    wishes = [params_of(index, max_tokens=40, temperature=temperature) for index in range(4)]
    expected = serve(LLM(model, num_blocks=200), prompts[:4], wishes)
    for where in WHERE:
        if where == "update" and temperature:
            continue  # its tokens were drawn already
        llm = LLM(model, num_blocks=40, block_size=4, speculative=drafter, prefix_caching=True)
        failing = sabotage(llm, where, first=3, every=5)
        assert serve(llm, prompts[:4], wishes) == expected, where
        assert failing.num_failures > 1, where
        assert llm.scheduler.pool.num_used == 0


def test_beam_search_is_without_draft_tokens(model: MiniGPT, prompts: Any) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    expected = beam_search(LLM(model, num_blocks=400), prompts[:3], params)
    llm = LLM(model, num_blocks=400, speculative="minigpt-draft")
    found = beam_search(llm, prompts[:3], params)
    assert [[beam.token_ids for beam in each] for each in found] == [
        [beam.token_ids for beam in each] for each in expected
    ]
    assert llm.scheduler.draft_stats.num_drafts == 0  # type: ignore[attr-defined]


def test_a_request_whose_logits_are_not_finite_fails_alone(model: MiniGPT, prompts: Any, alone: Any) -> None:
    llm = LLM(model, num_blocks=400, speculative="minigpt-draft")
    names = [llm.add_request(prompt, SamplingParams(max_tokens=30, ignore_eos=True)) for prompt in prompts[:3]]
    runner = llm.speculation._runner  # type: ignore[union-attr]
    run_model, got = runner.run_model, {name: [] for name in names}  # type: ignore[var-annotated]

    def broken(output: Any) -> Tensor:
        logits: Tensor = run_model(output).clone()
        row = 0
        for request in output.scheduled:
            if request.request_id == names[1] and request.num_tokens > 12:
                logits[row] = torch.nan
            row += 1 + len(request.draft_token_ids)
        return logits

    runner.run_model = broken
    reasons = {}
    while llm.has_unfinished:
        for chunk in llm.step():
            got[chunk.request_id].append(chunk.token_id)
            reasons[chunk.request_id] = chunk.finish_reason
    assert list(reasons.values()) == ["length", "error", "length"] or set(reasons.values()) == {"length", "error"}
    assert reasons[names[1]] == "error"
    *tokens, last = got[names[1]]
    assert last is None
    assert tokens == alone(prompts[1], 30)[: len(tokens)]
    assert got[names[0]] == alone(prompts[0], 30)


# --- the distribution -------------------------------------------------------------------------------------------------


def chi_square(counts: Counter[Any], expected: dict[Any, float], num_runs: int) -> float:
    """Pearson's statistic. What cannot be must not have been."""
    assert all(expected[key] > 0 for key in counts)
    return sum((counts[key] - num_runs * p) ** 2 / (num_runs * p) for key, p in expected.items() if p > 0)


@grid(
    {"drafts_by": ["the likeliest", "another model"], "options": [{}, {"top_k": 3}, {"top_p": 0.8, "temperature": 1.7}]}
)
def test_tokens_come_from_the_models_own_distribution(drafts_by: str, options: dict[str, Any]) -> None:
    """Three tokens jointly, enumerated: a vocabulary of 4, whose logits depend on the token before."""
    generator = torch.Generator().manual_seed(5)
    table, draft_table = (1.5 * torch.randn(5, 4, generator=generator) for _ in range(2))
    shape = SamplingParams(**({"temperature": 1.0} | options))
    rows = [TokenSampler(shape).probabilities(logits).tolist() for logits in table]
    joint = {(a, b, c): rows[4][a] * rows[a][b] * rows[b][c] for a in range(4) for b in range(4) for c in range(4)}
    assert math.isclose(sum(joint.values()), 1)
    num_runs, counts, num_accepted = 2000, Counter[Any](), 0
    for seed in range(num_runs):
        sampler = TokenSampler(SamplingParams(**({"temperature": 1.0, "seed": seed} | options)))
        tokens = [4]  # what stands before the first
        while len(tokens) < 4:
            drafts: list[int] = []
            guess, last = lookahead(sampler), tokens[-1]
            for _ in range(3 - len(tokens)):
                is_drawn = drafts_by == "another model"
                last = guess.draw(draft_table[last]) if is_drawn else int(table[last].argmax())
                drafts.append(last)
            [given] = verify(table[[tokens[-1], *drafts]], [drafts], [sampler])
            num_accepted += len(given) - 1
            tokens += given
        counts[tuple(tokens[1:4])] += 1
    degrees = sum(p > 0 for p in joint.values()) - 1
    assert chi_square(counts, joint, num_runs) < degrees + 4 * math.sqrt(2 * degrees)  # 4 standard deviations
    assert num_accepted > num_runs / 2


def test_the_statistic_would_notice() -> None:
    """A sampler that draws from p where it should from p without the rejected token: too much of that token."""
    p, draft, rng, counts = [0.5, 0.3, 0.2], 0, random.Random(0), Counter[Any]()
    for _ in range(3000):
        counts[draft if rng.random() < p[draft] else rng.choices(range(3), p)[0]] += 1
    assert chi_square(counts, dict(enumerate(p)), 3000) > 2 + 4 * math.sqrt(4)


def test_a_sampler_draws_once_for_each_token() -> None:
    """So its tokens are those that it would draw one by one, however many draft tokens were wrong."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(60, 9, generator=generator)
    alone = TokenSampler(SamplingParams(temperature=1, seed=3))
    expected = [alone.draw(row) for row in logits]
    rng, sampler, tokens = random.Random(4), TokenSampler(SamplingParams(temperature=1, seed=3)), list[int]()
    while len(tokens) < 50:
        right = expected[len(tokens) : len(tokens) + 5]
        drafts = [token if rng.random() < 0.8 else (token + 1) % 9 for token in right]
        [given] = verify(logits[len(tokens) : len(tokens) + 6], [drafts], [sampler])
        tokens += given
    assert tokens == expected[: len(tokens)]


# --- the parts --------------------------------------------------------------------------------------------------------


def test_rows_to_verify() -> None:
    assert rows_to_verify([5, 1, 3, 4], [0, 0, 2, 3]) == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert rows_to_verify([7, 3], [2, 1]) == [4, 5, 6, 8, 9]


def test_verify_a_batch() -> None:
    greedy = TokenSampler(SamplingParams())
    picked = [3, 4, 1, 2, 2, 5, 0, 1]
    logits = torch.eye(6)[picked]
    assert verify(logits, [[3, 4], [], [0], [5]], [greedy] * 4) == [[3, 4, 1], [2], [2], [0]]
    logits[1] = torch.nan
    logits[3] = torch.inf
    assert verify(logits, [[3, 4], [], [0], [5]], [greedy] * 4) == [[3], [], [2], [0]]
    with pytest.raises(ValueError, match=r"1 \+ k rows"):
        verify(logits, [[3, 4], []], [greedy] * 2)


def test_the_counters_of_the_server_are_those_of_the_scheduler(model: MiniGPT, prompts: Any) -> None:
    llm = LLM(model, num_blocks=40, block_size=4, speculative="minigpt-draft")
    totals: Counter[Any] = Counter()

    def note(updates: Any) -> None:
        for name, value, label in updates:
            if "spec_decode" in name or name == "vllm:generation_tokens":
                totals[name.removeprefix("vllm:spec_decode_"), label] += value

    from minicache.scheduler.observe import observe

    llm.scheduler = observe(llm.scheduler, SchedulerStats(llm.scheduler, note))
    answers = llm.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True))
    stats = llm.scheduler.draft_stats  # type: ignore[attr-defined]
    assert totals["num_drafts", ""] == stats.num_drafts
    assert totals["num_draft_tokens", ""] == stats.num_draft_tokens
    assert totals["num_accepted_tokens", ""] == stats.num_accepted_tokens
    for position, count in enumerate(stats.num_accepted_per_position):
        assert totals["num_accepted_tokens_per_pos", str(position)] == count
    assert totals["vllm:generation_tokens", ""] == sum(len(each.token_ids) for each in answers)


def test_the_shipped_draft_model(draft_model: MiniGPT, model: MiniGPT) -> None:
    assert SHIPPED_DRAFT.stat().st_size < 300_000
    assert draft_model.config == draft_config()
    assert draft_model.num_parameters() < model.num_parameters() / 10


def test_a_server_s_engine_speculates_as_it_is_asked_to() -> None:
    llm = make_llm(ReplicaOptions(speculative="minigpt-draft", num_speculative_tokens=3, num_blocks=40))
    assert isinstance(llm.scheduler, SpeculativeScheduler)
    assert llm.scheduler.num_speculative_tokens == 3
    llm.generate([[3, 4]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert llm.scheduler.draft_stats.num_draft_tokens
    assert make_llm(ReplicaOptions(num_blocks=40)).speculation is None


def test_what_does_not_go_together(model: MiniGPT, llama: Decoder) -> None:
    for options, message in (
        ({"speculative": llama}, "same tokenizer"),
        ({"speculative": "ngram", "cache": "dense"}, 'cache="paged"'),
        ({"speculative": "ngram", "scheduler": "fair"}, 'take "chunked"'),
        ({"speculative": "ngram", "scheduler": ChunkedPrefillScheduler(num_blocks=9)}, "SpeculativeScheduler"),
        ({"scheduler": SpeculativeScheduler(num_blocks=9, num_speculative_tokens=2)}, "speculative="),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(model, num_blocks=40, **options) if "scheduler" not in options else LLM(model, **options)
    short = Decoder(DecoderConfig(**{**LLAMA.__dict__, "max_seq_len": 64}))
    with pytest.raises(ValueError, match="takes 64 tokens"):
        LLM(llama, num_blocks=40, speculative=short)
    for wrong, error in (({"num_speculative_tokens": 0}, ValueError), ({"prompt_lookup_max": 1.5}, TypeError)):
        with pytest.raises(error):
            SpeculativeConfig(**wrong)  # type: ignore[arg-type]


def test_a_scheduler_of_ones_own(model: MiniGPT, prompts: Any, alone: Any) -> None:
    scheduler = SpeculativeScheduler(num_blocks=60, block_size=4, num_speculative_tokens=2)
    llm = LLM(model, scheduler=scheduler, speculative="ngram")
    answers = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    assert [each.token_ids for each in answers] == [alone(prompt, 12) for prompt in prompts]
    assert len(scheduler.draft_stats.num_accepted_per_position) <= 2
