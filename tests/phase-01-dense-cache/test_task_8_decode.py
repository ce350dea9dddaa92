"""Phase 1, task 8: the decode loop, with and without a cache."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.cache.dense import KVCache
from minicache.engine.decoding import decode
from minicache.errors import CacheOverflowError
from minicache.model import MiniGPT, MiniGPTConfig
from minicache_course import scenario
from minicache_course.checks import call, that

VOCAB = 97
repeatable = settings(max_examples=40, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)


def rule(history):
    """The token that follows `history`, a list of ids: it depends on every token, on their order and number."""
    state = 1
    for token in history:
        state = (31 * state + token + 7) % 9973
    return state % VOCAB


def by_the_rule(prompt, num_new):
    """What decoding has to give for each row of `prompt`: `num_new` lists of one id per row."""
    histories = [list(row) for row in prompt]
    steps = []
    for _ in range(num_new):
        step = [rule(history) for history in histories]
        steps.append(step)
        for history, token in zip(histories, step, strict=True):
            history.append(token)
    return steps


class RuleModel:
    """A model that follows `rule` at each position. Its cache keeps the token ids as keys. It records its inputs."""

    def __init__(self):
        self.shown, self.caches = [], []

    def __call__(self, tokens, cache):  # both, always: the contract is model(token_ids, cache)
        self.shown.append(tokens.tolist())
        told = f"{tokens.tolist()}"
        scenario.done("the model was shown", told if cache is None else f"{told} with a cache")
        self.caches.append(cache)
        history = tokens
        if cache is not None:
            rows = tokens[:, None, :, None].float()
            cache.append(0, rows, rows)
            history = cache.read(0)[0][:, 0, :, 0].long()
        batch, num_new = tokens.shape
        logits = torch.zeros(batch, num_new, VOCAB)
        for b in range(batch):
            for t in range(num_new):
                seen = history.shape[1] - num_new + t + 1
                logits[b, t, rule(history[b, :seen].tolist())] = 1.0
        return logits


def a_cache(max_seq_len=32, batch=1):
    return KVCache(1, batch, 1, max_seq_len, 1)


def run(prompt, num_new, *, cache=None, model=None, **options):
    """All tokens of one decode as lists; errors, at the call or at the first step, are passed on."""
    return [token.tolist() for token in decode(model or RuleModel(), prompt, num_new, cache=cache, **options)]


@pytest.mark.parametrize("cached", [False, True], ids=["recomputed", "cached"])
def test_the_tokens_follow_the_rule(cached):
    """A model with a known rule: the tokens are those that the rule gives."""
    prompt = torch.tensor([[5, 11, 2]])
    call(run, prompt, 6, cache=a_cache(64) if cached else None).gives(by_the_rule(prompt.tolist(), 6))


@repeatable
@given(
    prompt=st.integers(1, 3).flatmap(
        lambda batch: st.integers(1, 5).flatmap(
            lambda length: st.lists(
                st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length), min_size=batch, max_size=batch
            )
        )
    ),
    num_new=st.integers(0, 6),
    spare=st.sampled_from([0, 0, 1, 4]),
)
def test_with_and_without_a_cache_the_tokens_are_the_same(prompt, num_new, spare):
    """Any prompt, batch and number of tokens: both ways give the rule's tokens, up to an exactly full cache."""
    expected = by_the_rule(prompt, num_new)
    cache = a_cache(len(prompt[0]) + max(num_new - 1, 0) + spare, batch=len(prompt))
    call(run, torch.tensor(prompt), num_new).gives(expected)
    call(run, torch.tensor(prompt), num_new, cache=cache).gives(expected)
    held = len(prompt[0]) + num_new - 1 if num_new else 0
    that(f"cache.num_tokens after {num_new} tokens", cache.num_tokens).gives(held)


def test_without_a_cache_every_step_shows_the_whole_text():
    """Recomputation: P, P + 1, P + 2, … positions; the model's input is the prompt and all tokens so far."""
    model, prompt = RuleModel(), [5, 11, 2]
    tokens = [step[0] for step in call(run, torch.tensor([prompt]), 4, model=model).value]
    that("what the model was shown", model.shown).gives([[prompt + tokens[:n]] for n in range(4)])
    that("the caches that the model was given", model.caches).gives([None] * 4)


def test_with_a_cache_each_token_is_shown_once():
    """One prefill of P positions, then 1 position per step: the token picked last."""
    model, prompt, cache = RuleModel(), [5, 11, 2], a_cache()
    tokens = [step[0] for step in call(run, torch.tensor([prompt]), 4, model=model, cache=cache).value]
    that("what the model was shown", model.shown).gives([[prompt], [tokens[:1]], [tokens[1:2]], [tokens[2:3]]])
    that("whether the model got the cache in every step", [given is cache for given in model.caches]).gives([True] * 4)


def test_positions_computed():
    """P = 2, N = 50: 50 · 2 + (0 + … + 49) = 1325 positions without a cache, 2 + 49 = 51 with one."""
    for cache, total in ((None, 1325), (a_cache(51), 51)):
        model = RuleModel()
        call(run, torch.tensor([[3, 4]]), 50, model=model, cache=cache)
        way = "without a cache" if cache is None else "with a cache"
        that(f"positions that the model computed {way}", sum(len(rows[0]) for rows in model.shown)).gives(total)


@pytest.mark.parametrize("cached", [False, True], ids=["recomputed", "cached"])
def test_each_token_comes_as_soon_as_it_is_picked(cached):
    """The n-th token needs exactly n forward passes, and a caller that stops early stops the work."""
    model, cache = RuleModel(), a_cache() if cached else None
    tokens = decode(model, torch.tensor([[5, 11, 2]]), 10, cache=cache)
    for n in range(1, 4):
        call(next, tokens)
        that(f"calls of the model after {n} tokens", len(model.shown)).gives(n)
    if cache is not None:
        that("cache.num_tokens after 3 tokens: the third is not in it", cache.num_tokens).gives(5)


@pytest.mark.parametrize("cached", [False, True], ids=["recomputed", "cached"])
def test_between_tokens_the_caller_is_in_no_special_mode(cached):
    """While the generator is suspended, neither inference_mode nor no_grad is on: leave them before the yield."""
    tokens = decode(RuleModel(), torch.tensor([[5, 11, 2]]), 3, cache=a_cache() if cached else None)
    modes = call(lambda: [(torch.is_inference_mode_enabled(), torch.is_grad_enabled()) for _ in tokens]).value
    that("torch.is_inference_mode_enabled() after each token", [mode for mode, _ in modes]).gives([False] * 3)
    that("torch.is_grad_enabled() after each token", [grad for _, grad in modes]).gives([True] * 3)


@pytest.mark.parametrize("cached", [False, True], ids=["recomputed", "cached"])
def test_no_tokens_no_work(cached):
    """max_new_tokens = 0: nothing is yielded and the model is not called."""
    model, cache = RuleModel(), a_cache() if cached else None
    call(run, torch.tensor([[5]]), 0, model=model, cache=cache).gives([])
    that("calls of the model", len(model.shown)).gives(0)


@pytest.mark.parametrize("cached", [False, True], ids=["recomputed", "cached"])
def test_tokens_are_vectors_of_int64(cached):
    """Each step yields one id per sequence, [B] int64, and the prompt stays as it was."""
    prompt = torch.tensor([[5, 11], [2, 8], [0, 1]])
    cache = a_cache(batch=3) if cached else None
    steps = call(lambda: list(decode(RuleModel(), prompt, 3, cache=cache))).value
    that("the tokens", steps).gives([torch.tensor(step) for step in by_the_rule([[5, 11], [2, 8], [0, 1]], 3)])
    that("the prompt afterwards", prompt).gives(torch.tensor([[5, 11], [2, 8], [0, 1]]))


@pytest.mark.parametrize("cached", [False, True], ids=["recomputed", "cached"])
def test_the_pick_decides(cached):
    """pick gets the last position's logits [B, vocab] once per step, and its result is the next token."""
    seen = []

    def pick(logits):
        seen.append(logits)
        return (logits.argmax(dim=-1) + 1) % VOCAB

    prompt, model = torch.tensor([[5, 11], [2, 8]]), RuleModel()
    cache = a_cache(batch=2) if cached else None
    tokens = call(run, prompt, 3, cache=cache, model=model, pick=pick).value
    that("the shapes of the logits given to pick", [list(x.shape) for x in seen]).gives([[2, VOCAB]] * 3)
    histories = prompt.tolist()
    for step in tokens:
        that(f"the pick after {histories}", step).gives([(rule(history) + 1) % VOCAB for history in histories])
        histories = [[*history, token] for history, token in zip(histories, step, strict=True)]


@pytest.mark.parametrize(
    ("length", "max_seq_len"),
    [pytest.param(p, rows, id=f"prompt of {p}, cache of {rows}") for p, rows in ((3, 5), (3, 3), (1, 4))],
)
def test_a_full_cache_ends_in_an_error_after_good_tokens(length, max_seq_len):
    """S_max − P + 1 correct tokens are yielded; the next needs one slot too many: CacheOverflowError."""
    prompt, good = list(range(length)), max_seq_len - length + 1
    expected = by_the_rule([prompt], good)
    call(run, torch.tensor([prompt]), good, cache=a_cache(max_seq_len)).gives(expected)
    tokens = decode(RuleModel(), torch.tensor([prompt]), good + 1, cache=a_cache(max_seq_len))
    that("the tokens before the cache is full", [x.tolist() for x in itertools.islice(tokens, good)]).gives(expected)
    call(next, tokens).raises(CacheOverflowError)


def test_a_prompt_that_does_not_fit_is_refused():
    """A prompt longer than the cache: CacheOverflowError, and the cache stays empty."""
    cache = a_cache(2)
    call(run, torch.tensor([[1, 2, 3]]), 1, cache=cache).raises(CacheOverflowError)
    that("cache.num_tokens", cache.num_tokens).gives(0)


@pytest.mark.parametrize(
    ("prompt", "num_new"),
    [
        pytest.param(torch.tensor([1, 2, 3]), 2, id="prompt without a batch"),
        pytest.param(torch.tensor([[[1]]]), 2, id="prompt of three dimensions"),
        pytest.param(torch.zeros(2, 0, dtype=torch.int64), 2, id="empty prompt"),
        pytest.param(torch.tensor([[1, 2]]), -1, id="a negative number of tokens"),
    ],
)
def test_bad_arguments_are_refused(prompt, num_new):
    """A prompt that is not [B, P ≥ 1], or N < 0: ValueError before the model is called."""
    model = RuleModel()
    call(run, prompt, num_new, model=model).raises(ValueError)
    that("calls of the model", len(model.shown)).gives(0)


def test_a_used_cache_is_refused():
    """A cache that holds tokens of another text: ValueError, and it still holds them. After reset() it is fine."""
    cache, model, prompt = a_cache(), RuleModel(), torch.tensor([[1, 2]])
    call(run, prompt, 3, cache=cache).gives(by_the_rule([[1, 2]], 3))
    call(run, prompt, 3, cache=cache, model=model).raises(ValueError)
    that("calls of the model", len(model.shown)).gives(0)
    that("cache.num_tokens", cache.num_tokens).gives(4)
    cache.reset()
    call(run, prompt, 3, cache=cache).gives(by_the_rule([[1, 2]], 3))


def minigpt(num_heads, num_kv_heads):
    """A small MiniGPT with random weights, in float32."""
    return MiniGPT(
        MiniGPTConfig(
            vocab_size=50,
            hidden_size=32,
            num_layers=3,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=8,
            intermediate_size=48,
            max_seq_len=64,
            rope_theta=10_000.0,
            norm_eps=1e-5,
        )
    ).eval()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [pytest.param(h, kv, id=f"{h} query heads, {kv} KV heads") for h, kv in ((4, 4), (4, 2), (5, 1))],
)
def test_minigpt_gives_the_same_tokens_both_ways(num_heads, num_kv_heads):
    """A transformer with random weights and a batch of 2: the same 20 tokens with your cache and without."""
    model, prompt = minigpt(num_heads, num_kv_heads), torch.randint(50, (2, 7))
    cache = KVCache(3, 2, num_kv_heads, 26, 8)
    recomputed = call(run, prompt, 20, model=model).value
    call(run, prompt, 20, model=model, cache=cache).gives(recomputed)


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 1, 1, 5], [1, 11]], ids=str)
def test_minigpt_logits_do_not_depend_on_the_cache(chunks):
    """In any chunks, the logits with your cache are those of one forward pass without, to 1e-4."""
    model, tokens = minigpt(4, 2), torch.randint(50, (2, 12))
    cache = KVCache(3, 2, 2, 12, 8)
    with torch.inference_mode():
        expected = call(model, tokens, None).value
        through = [call(model, chunk, cache).value for chunk in tokens.split(chunks, dim=1)]
    that(f"logits in chunks of {chunks}", torch.cat(through, dim=1)).is_close(expected, rtol=0, atol=1e-4)
