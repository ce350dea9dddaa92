"""Several answers to one prompt: each is what a request of its own would get, and the prompt is in memory once."""

from __future__ import annotations

import pytest
from tests.grid import grid

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.scheduler import ChunkedPrefillScheduler, SharingScheduler
from minicache.scheduler.observe import Observer

N, SEED = 3, 11


class Forks(Observer):
    """Counts forks, copies and used blocks, and checks the books."""

    def __init__(self):
        self.num_forks = self.num_copies = self.num_preempted = self.most_used = 0

    def on_fork(self, scheduler, parent, child):
        self.num_forks += 1
        scheduler.check()

    def on_schedule(self, scheduler, output):
        self.num_copies += len(output.blocks_to_copy)
        self.num_preempted += len(output.preempted)
        self.most_used = max(self.most_used, scheduler.pool.num_used)
        scheduler.check()


@pytest.fixture
def forks():
    return Forks()


@pytest.fixture(scope="module")
def expected(prompts, alone):
    """For each prompt and each answer: a request with a seed of its own, alone and without a cache."""
    return [alone(prompt, 12, params_of(seed=SEED + turn)) for prompt in prompts for turn in range(N)]


def params_of(n=1, seed=SEED, **options):
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.9, "seed": seed, "ignore_eos": True, "n": n} | options)


def token_ids(completions):
    return [completion.token_ids for completion in completions]


def sharing(cls=SharingScheduler, **options):
    return cls(**{"num_blocks": 128, "block_size": 4, "max_model_len": 200} | options)


@grid(
    {
        "prefix_caching": [False, True],
        "cls": [SharingScheduler, ChunkedPrefillScheduler],
        "max_num_seqs,slots_for_forks": [(2, False), (64, True)],
    }
)
def test_each_is_what_it_would_be_alone(
    model, prompts, expected, forks, cls, max_num_seqs, slots_for_forks, prefix_caching
):
    scheduler = sharing(cls, max_num_seqs=max_num_seqs, prefix_caching=prefix_caching)
    llm = LLM(model, scheduler=scheduler, observers=[forks])
    assert token_ids(llm.generate(prompts, params_of(N))) == expected
    assert (forks.num_forks == 2 * len(prompts)) == slots_for_forks
    assert scheduler.pool.num_used == 0


def test_a_fork_waits_for_a_batch_slot(model, prompts, alone, forks):
    """Two slots: the second answer waits while the first and a short request hold them, and gets the next free one."""
    scheduler = sharing(max_num_seqs=2)
    llm = LLM(model, scheduler=scheduler, observers=[forks])
    params = [params_of(2), params_of(1, max_tokens=3, seed=5)]
    got = token_ids(llm.generate(prompts[:2], params))
    assert got[:2] == [alone(prompts[0], 12, params_of(seed=SEED + turn)) for turn in range(2)]
    assert forks.num_forks == 1


@pytest.mark.parametrize(
    "options", [{"num_blocks": 22}, {"num_blocks": 22, "preemption": "swap", "num_host_blocks": 9}]
)
@pytest.mark.parametrize("cls", [SharingScheduler, ChunkedPrefillScheduler])
def test_though_they_are_preempted(model, prompts, expected, forks, cls, options):
    llm = LLM(model, scheduler=sharing(cls, **options), observers=[forks])
    assert token_ids(llm.generate(prompts, params_of(N))) == expected
    assert forks.num_forks > 0
    assert forks.num_preempted > 3


@pytest.mark.parametrize("options", [{"scheduler": "fair"}, {"scheduler": "continuous"}, {"cache": "dense"}])
def test_where_nothing_can_be_forked_they_are_requests_like_others(model, prompts, expected, options):
    assert token_ids(LLM(model, **options).generate(prompts, params_of(N))) == expected


def test_without_a_word_about_the_scheduler(model, prompts, expected, forks):
    """The default one forks, and computes prompts in chunks next to the answers; with a prefix cache and without."""
    for prefix_caching in (False, True):
        forks.num_forks = 0
        llm = LLM(model, max_num_batched_tokens=7, prefix_caching=prefix_caching, observers=[forks])
        assert token_ids(llm.generate(prompts, params_of(N))) == expected
        assert forks.num_forks > 0


def test_the_prompt_is_in_memory_once(model, tokenizer, forks):
    """20 prompt tokens in blocks of 4, 8 answers of 4 tokens: 5 blocks for all, one or two more for each."""
    prompt = [tokenizer.encode("the")[0]] * 20
    llm = LLM(model, scheduler=sharing(), observers=[forks])
    llm.generate([prompt], params_of(8, max_tokens=4))
    assert forks.num_forks == 7
    assert 5 + 8 <= forks.most_used <= 5 + 8 * 2  # 48 without sharing


def test_different_lengths_in_one_call(model, prompts, alone):
    """Answers come in the order of the prompts, those of one prompt together; chunks say which is whose."""
    params = [params_of(2), params_of(1, seed=5), params_of(3, max_tokens=1)]
    llm = LLM(model, scheduler=sharing())
    wanted = [
        *(alone(prompts[0], 12, params_of(seed=SEED + turn)) for turn in range(2)),
        alone(prompts[1], 12, params_of(seed=5)),
        *(alone(prompts[2], 1, params_of(seed=SEED + turn, max_tokens=1)) for turn in range(3)),
    ]
    assert token_ids(llm.generate(prompts[:3], params)) == wanted
    got: dict[int, list[int]] = {index: [] for index in range(6)}
    for chunk in llm.stream(prompts[:3], params):
        got[chunk.index].append(chunk.token_id)
    assert list(got.values()) == wanted


def test_an_answer_that_ends_at_once_is_forked_no_more(model, prompts, alone, forks):
    """The first answer ends with its first token: the others begin as requests of their own."""
    prompt = prompts[3]
    stop = alone(prompt, 1, params_of(seed=SEED))[0]
    llm = LLM(model, scheduler=sharing(), observers=[forks])
    got = token_ids(llm.generate([prompt], params_of(4, stop_token_ids=[stop])))
    wanted = []
    for turn in range(4):
        tokens = alone(prompt, 12, params_of(seed=SEED + turn))
        wanted.append(tokens[: tokens.index(stop) + 1] if stop in tokens else tokens)
    assert got == wanted
    assert got[0] == [stop]
    assert forks.num_forks == 0


def test_leaving_a_stream_ends_them_all(model, prompts):
    llm = LLM(model, scheduler=sharing())
    stream = llm.stream(prompts, params_of(N))
    for _ in range(20):
        next(stream)
    stream.close()
    assert not llm.has_unfinished
    assert llm.scheduler.pool.num_used == 0


def test_the_largest_seed_has_successors():
    assert SamplingParams(n=2, seed=2**64 - 1).of_answer(1).seed == 0
    assert SamplingParams(n=2).of_answer(1).seed is None


def test_a_dense_cache_has_no_blocks_to_share(model):
    with pytest.raises(ValueError, match="dense cache"):
        LLM(model, cache="dense", prefix_caching=True)
