"""Phase 9, task 5: one forward pass verifies all draft tokens, and the tokens are those of greedy decoding."""

from __future__ import annotations

import random

import pytest
import torch

from minicache.cache.paged import PagedKVCache
from minicache.course.checks import call, that
from minicache.engine.decoding import decode
from minicache.engine.speculative import NgramDrafter, SpeculationStats, num_accepted, speculative_decode
from minicache.errors import CacheOverflowError
from minicache.grammar import Tokenizer
from minicache.model import load_minigpt

VOCAB = 97


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rule(history):
    """The token that follows `history`, a list of ids: it depends on every token, on their order and number."""
    state = 1
    for token in history:
        state = (31 * state + token + 7) % 9973
    return state % VOCAB


def answer_to(prompt, num_new):
    """What decoding has to give."""
    history = list(prompt)
    for _ in range(num_new):
        history.append(rule(history))
    return history[len(prompt) :]


class RuleModel:
    """A model of two layers that follows `rule` at each position, for what its cache holds: token ids as keys.

    An entry of a rejected draft token that stays in the cache, or an accepted one that is missing, changes all tokens
    after it. `shown` has the tokens of each pass, `held` how many the cache had before it.
    """

    def __init__(self):
        self.shown, self.held = [], []

    def __call__(self, token_ids, cache):  # both, always: the contract is model(token_ids, cache)
        self.shown.append(token_ids[0].tolist())
        self.held.append(cache.num_tokens)
        rows = token_ids[:, None, :, None].float()
        for layer in range(2):
            cache.append(layer, rows, rows)
        history = cache.read(1)[0][0, 0, :, 0].long().tolist()
        logits = torch.zeros(1, token_ids.shape[1], VOCAB)
        for row in range(token_ids.shape[1]):
            logits[0, row, rule(history[: len(history) - token_ids.shape[1] + row + 1])] = 1.0
        return logits


class Knows:
    """Proposes the right tokens, except at the positions in `wrong`, from 0. `asked` has what it was called with."""

    def __init__(self, text, wrong=(), most=10**6):
        self.text, self.wrong, self.most, self.asked = text, wrong, most, []

    def draft(self, token_ids, num_tokens):
        self.asked.append((list(token_ids), num_tokens))
        places = range(len(token_ids), min(len(token_ids) + min(num_tokens, self.most), len(self.text)))
        return [(self.text[place] + (place in self.wrong)) % VOCAB for place in places]


def a_cache(max_seq_len=64, block_size=4, batch_size=1):
    return PagedKVCache(2, batch_size, 1, max_seq_len, 1, block_size=block_size)


PROMPT = [5, 11, 2]


def run(model, prompt, num_new, *, cache, drafter, **options):
    """All tokens of one answer; errors, at the call or at the first step, come out as they are."""
    tokens = speculative_decode(model, torch.tensor([prompt]), num_new, cache=cache, drafter=drafter, **options)
    return [int(token) for token in tokens]


def speculated(num_new, *, prompt=PROMPT, wrong=(), most=10**6, num_drafts=4, cache=None):
    """Decode with a drafter that knows the answer. Returns model, drafter and stats; the tokens have been checked."""
    __tracebackhide__ = True
    text = prompt + answer_to(prompt, num_new + 8)
    model, drafter, stats = RuleModel(), Knows(text, wrong, most), SpeculationStats()
    cache = a_cache() if cache is None else cache
    outcome = call(run, model, prompt, num_new, cache=cache, drafter=drafter, num_drafts=num_drafts, stats=stats)
    outcome.gives(text[len(prompt) : len(prompt) + num_new])
    return model, drafter, stats


# How many are accepted


@pytest.mark.parametrize(
    ("drafts", "picked", "accepted"),
    [
        ([], [1], 0),
        ([1], [1, 2], 1),
        ([1], [2, 2], 0),
        ([1, 2], [1, 2, 5], 2),
        ([1, 2, 3], [1, 9, 3, 4], 1),
        ([1, 2, 3], [9, 2, 3, 4], 0),
        ([1, 2, 3, 4], [1, 2, 3, 9, 4], 3),
        ([4, 4, 4], [4, 4, 4, 4], 3),
        ([2, 1], [1, 2, 3], 0),
        ([0], [0, 0], 1),
    ],
)
def test_up_to_the_first_difference(drafts, picked, accepted):
    """Draft tokens count up to the first that the model did not pick; none behind it is accepted."""
    call(num_accepted, drafts, picked).gives(accepted)


# Forward passes: what the model runs on, and what the cache holds


@pytest.mark.parametrize(
    ("num_new", "num_drafts", "rows"),
    [
        (1, 4, [3]),
        (2, 4, [3, 1]),
        (3, 4, [3, 2]),
        (6, 4, [3, 5]),
        (7, 4, [3, 5, 1]),
        (8, 4, [3, 5, 2]),
        (11, 4, [3, 5, 5]),
        (21, 4, [3, 5, 5, 5, 5]),
        (10, 1, [3, 2, 2, 2, 2, 1]),
        (9, 7, [3, 8]),
        (9, 20, [3, 8]),
        (5, 0, [3, 1, 1, 1, 1]),
    ],
)
def test_all_drafts_are_accepted(num_new, num_drafts, rows):
    """The prompt's pass yields one token; each pass after it one more than it has draft tokens, none past the end."""
    model, _, stats = speculated(num_new, num_drafts=num_drafts)
    that("tokens shown in each pass", list(map(len, model.shown))).gives(rows)
    that("tokens in the cache before each pass", model.held).gives([sum(rows[:place]) for place in range(len(rows))])
    num_drafted = sum(rows[1:]) - len(rows[1:])
    that("the stats", stats).gives(SpeculationStats(len(rows), num_new, num_drafted, num_drafted))


@pytest.mark.parametrize(
    ("num_new", "num_drafts", "rows"), [(6, 4, [3, 5, 4, 3, 2, 1]), (4, 1, [3, 2, 2, 1]), (3, 9, [3, 2, 1])]
)
def test_no_draft_is_accepted(num_new, num_drafts, rows):
    """Each pass yields one token, the model's own, as without drafts; no entry of a draft token stays in the cache."""
    model, _, stats = speculated(num_new, num_drafts=num_drafts, wrong=range(1000))
    that("tokens shown in each pass", list(map(len, model.shown))).gives(rows)
    that("tokens in the cache before each pass", model.held).gives([0, *range(3, num_new + 2)])
    that("the stats", stats).gives(SpeculationStats(num_new, num_new, sum(rows[1:]) - len(rows[1:]), 0))


def test_some_are_rejected():
    """12 tokens, 4 draft tokens a pass; those for the 3rd, 4th and 9th token of the answer are wrong."""
    answer = answer_to(PROMPT, 12)
    model, _, stats = speculated(12, wrong=[3 + 2, 3 + 3, 3 + 8])
    first = [len(shown) for shown in model.shown]
    that("tokens shown in each pass", first).gives([3, 5, 5, 5, 3])
    that("tokens in the cache before each pass", model.held).gives([0, 3, 5, 6, 11])
    that("the first token shown in each pass after the prompt", [each[0] for each in model.shown[1:]]).gives(
        [answer[0], answer[2], answer[3], answer[8]]
    )
    that("the stats", stats).gives(SpeculationStats(5, 12, 4 + 4 + 4 + 2, 1 + 0 + 4 + 2))


def test_what_the_model_runs_on():
    """First the prompt, as [1, P] int64; then the newest token and the draft tokens, right ones and wrong ones."""
    shown, answer = [], answer_to(PROMPT, 5)

    class Spy(RuleModel):
        def __call__(self, token_ids, cache):
            shown.append((token_ids.dtype, token_ids.tolist()))
            return super().__call__(token_ids, cache)

    drafter = Knows(PROMPT + answer, wrong=[5])
    call(run, Spy(), PROMPT, 5, cache=a_cache(), drafter=drafter, num_drafts=2).gives(answer)
    expected = [[PROMPT], [[answer[0], answer[1], (answer[2] + 1) % VOCAB]], [[answer[2], answer[3]]]]
    that("what was shown", [tokens for _, tokens in shown]).gives(expected)
    that("dtypes", {str(dtype) for dtype, _ in shown}).gives({"torch.int64"})


def test_a_prompt_of_one_token():
    """Nothing is unseen but the newest token: draft tokens are proposed in the first pass already."""
    model, _, stats = speculated(5, prompt=[7])
    that("tokens shown in each pass", list(map(len, model.shown))).gives([5])
    that("the stats", stats).gives(SpeculationStats(1, 5, 4, 4))


def test_what_the_drafter_is_asked():
    """Prompt and output so far, the newest token included; and for at most num_drafts tokens."""
    answer = answer_to(PROMPT, 9)
    _, drafter, _ = speculated(9, wrong=[3 + 3])
    asked = [(tokens, most) for tokens, most in drafter.asked if most]
    that("the texts", [tokens for tokens, _ in asked]).gives([PROMPT + answer[:1], PROMPT + answer[:4]])
    that("the most that it may propose", [most for _, most in asked]).gives([4, 4])


@pytest.mark.parametrize(("num_new", "asked"), [(2, []), (3, [1]), (6, [4]), (7, [4]), (9, [4, 2]), (12, [4, 4])])
def test_no_more_is_asked_for_than_the_answer_has_room_for(num_new, asked):
    """A pass yields one token more than it accepts: with n tokens left at most n − 1 are asked for."""
    _, drafter, _ = speculated(num_new)
    that("draft tokens asked for", [most for _, most in drafter.asked if most]).gives(asked)


@pytest.mark.parametrize(("room", "asked"), [(1, []), (2, [1]), (5, [4]), (6, [4]), (9, [4, 3])])
def test_no_more_is_asked_for_than_the_cache_has_room_for(room, asked):
    """Room for so many entries behind the prompt, one of which is the newest token's."""
    answer = answer_to(PROMPT, 30)
    drafter = Knows(PROMPT + answer)
    tokens = speculative_decode(RuleModel(), torch.tensor([PROMPT]), 30, cache=a_cache(3 + room), drafter=drafter)
    that("tokens", [int(next(tokens)) for _ in range(room + 1)]).gives(answer[: room + 1])
    that("draft tokens asked for", [most for _, most in drafter.asked if most]).gives(asked)


def test_the_drafter_sees_all_of_a_long_text():
    """A prompt of 200 tokens and 50 of output: each call has every one of them, however old."""
    prompt = [(7 * place + 3) % VOCAB for place in range(200)]
    _, drafter, _ = speculated(50, prompt=prompt, wrong=range(0, 300, 7), cache=a_cache(250))
    text = prompt + answer_to(prompt, 50)
    for tokens, _ in drafter.asked:
        that(f"what it sees of a text of {len(tokens)} tokens", tokens).gives(text[: len(tokens)])
    that("the fewest tokens that it saw", min(len(tokens) for tokens, _ in drafter.asked)).gives(201)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_fewer_drafts_than_asked_for(most):
    """A drafter may propose fewer tokens, or none: then a pass is a decode step."""
    model, _, stats = speculated(10, most=most)
    that("the longest pass after the prompt", max(map(len, model.shown[1:]))).gives(1 + most)
    that("passes", stats.num_passes).gives({0: 10, 1: 6, 2: 4}[most])


def test_drafts_now_and_then():
    """Draft tokens in some passes only: the text that the drafter sees has every token all the same."""

    class Seldom(Knows):
        def draft(self, token_ids, num_tokens):
            drafts = super().draft(token_ids, num_tokens)
            return drafts if len(token_ids) % 3 == 0 else []

    answer = answer_to(PROMPT, 20)
    drafter = Seldom(PROMPT + answer)
    call(run, RuleModel(), PROMPT, 20, cache=a_cache(), drafter=drafter).gives(answer)
    texts = [tokens == (PROMPT + answer)[: len(tokens)] for tokens, _ in drafter.asked]
    that("whether each text it saw was prompt and answer", all(texts)).gives(True)


# Where it ends


@pytest.mark.parametrize("num_new", [0, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("wrong", [(), range(1000)], ids=["right", "wrong"])
def test_it_stops_in_time(num_new, wrong):
    """N tokens, and P + N − 1 KV entries; for 0 tokens the model is not called."""
    cache = a_cache()
    model, _, stats = speculated(num_new, wrong=wrong, cache=cache)
    that("tokens in the cache", cache.num_tokens).gives(num_new and 3 + num_new - 1)
    that("whether the model was called", bool(model.shown)).gives(num_new > 0)
    that("tokens in the stats", stats.num_tokens).gives(num_new)


@pytest.mark.parametrize("num_new", [1, 2, 5, 6, 7, 12])
@pytest.mark.parametrize("wrong", [(), range(1000), (5, 7)], ids=["right", "wrong", "mixed"])
def test_a_cache_of_just_the_right_size(num_new, wrong):
    """Room for P + N − 1 KV entries: that is enough, whatever is proposed."""
    speculated(num_new, wrong=wrong, cache=a_cache(3 + num_new - 1))


@pytest.mark.parametrize("room", [0, 1, 2, 4, 5, 6, 9])
@pytest.mark.parametrize("wrong", [(), range(1000), (5, 7)], ids=["right", "wrong", "mixed"])
def test_a_cache_that_ends(room, wrong):
    """Room for R entries behind the prompt: R + 1 tokens are yielded, as in decode; the last is never stored."""
    answer = answer_to(PROMPT, 30)
    model, found, cache, drafter = RuleModel(), [], a_cache(3 + room), Knows(PROMPT + answer, wrong)

    def collect():
        prompt = torch.tensor([PROMPT])
        found.extend(map(int, speculative_decode(model, prompt, 30, cache=cache, drafter=drafter)))

    call(collect).raises(CacheOverflowError)
    that("tokens that came before", found).gives(answer[: room + 1])
    that("the most that was in the cache", cache.num_tokens).gives(3 + room)
    that("calls for fewer than 0 draft tokens", [most for _, most in drafter.asked if most < 0]).gives([])
    if not wrong:  # 5 entries a pass, then what is left, then the one that is too many
        rows = [3] + [5] * (room // 5) + [room % 5] * (room % 5 > 0) + [1]
        that("tokens shown in each pass", list(map(len, model.shown))).gives(rows)


def test_a_prompt_that_is_too_long():
    """The cache has room for 2 of 3 tokens: an error, and no token."""
    call(run, RuleModel(), PROMPT, 5, cache=a_cache(2), drafter=Knows([])).raises(CacheOverflowError)


def test_one_token_at_a_time():
    """Each is an int64 tensor [1], yielded before the next pass; the cache never has an entry of a rejected token."""
    answer, model, cache, stats = answer_to(PROMPT, 12), RuleModel(), a_cache(), SpeculationStats()
    drafter = Knows(PROMPT + answer, wrong=[5, 6, 9])
    tokens = speculative_decode(model, torch.tensor([PROMPT]), 12, cache=cache, drafter=drafter, stats=stats)
    passes = []
    for count, token in enumerate(tokens, start=1):
        that("a token", token).gives(torch.tensor([answer[count - 1]]))
        passes.append(len(model.shown))
        keys = cache.read(0)[0][0, 0, :, 0].long().tolist()
        that(f"what the cache holds at token {count}", keys).gives((PROMPT + answer)[: len(keys)])
        that("tokens in the stats", stats.num_tokens).gives(count)
    that("passes made before each token", passes).gives([1, 2, 2, 3, 4, 4, 4, 5, 5, 5, 5, 5])


def test_a_caller_that_leaves_early():
    """Three tokens are taken of a pass of five. The cache holds prompt and output, and three tokens are counted."""
    answer, model, cache, stats = answer_to(PROMPT, 12), RuleModel(), a_cache(), SpeculationStats()
    tokens = speculative_decode(
        model, torch.tensor([PROMPT]), 12, cache=cache, drafter=Knows(PROMPT + answer), num_drafts=4, stats=stats
    )
    that("three tokens", [int(next(tokens)) for _ in range(3)]).gives(answer[:3])
    tokens.close()
    that("passes and tokens in the stats", (stats.num_passes, stats.num_tokens)).gives((2, 3))
    keys = cache.read(0)[0][0, 0, :, 0].long().tolist()
    that("what the cache holds", keys).gives((PROMPT + answer)[: len(keys)])


def test_stats_go_on():
    """Given again, they count on; they may be left out."""
    stats = SpeculationStats()
    for _ in range(2):
        drafter = Knows(PROMPT + answer_to(PROMPT, 6))
        call(run, RuleModel(), PROMPT, 6, cache=a_cache(), drafter=drafter, stats=stats).gives(answer_to(PROMPT, 6))
    that("the stats of two answers", stats).gives(SpeculationStats(4, 12, 8, 8))
    call(run, RuleModel(), PROMPT, 6, cache=a_cache(), drafter=Knows([])).gives(answer_to(PROMPT, 6))


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param({"prompt": []}, ValueError, id="an empty prompt"),
        pytest.param({"num_new": -1}, ValueError, id="max_new_tokens -1"),
        pytest.param({"num_new": 2.0}, TypeError, id="max_new_tokens 2.0"),
        pytest.param({"num_drafts": -1}, ValueError, id="num_drafts -1"),
        pytest.param({"num_drafts": 1.5}, TypeError, id="num_drafts 1.5"),
    ],
)
def test_what_is_refused(arguments, error):
    """At the first step, and before the model is called."""
    model = RuleModel()
    options = {"model": model, "prompt": PROMPT, "num_new": 4, "cache": a_cache(), "drafter": Knows([])} | arguments
    call(run, **options).raises(error)
    that("passes of the model", len(model.shown)).gives(0)


def test_prompts_of_another_shape():
    """One prompt, [1, P]: not two, and not [P]. The model is not called."""
    for shape in ([2, 3], [3]):
        model, prompt = RuleModel(), torch.ones(shape, dtype=torch.int64)
        tokens = speculative_decode(model, prompt, 4, cache=a_cache(), drafter=Knows([]))
        call(next, tokens).raises(ValueError)
        that("passes of the model", len(model.shown)).gives(0)


def test_caches_that_are_refused():
    """A cache of two sequences, or one that holds tokens. The model is not called."""
    model, used = RuleModel(), a_cache()
    call(run, model, PROMPT, 4, cache=a_cache(batch_size=2), drafter=Knows([])).raises(ValueError)
    that("passes of the model", len(model.shown)).gives(0)
    call(run, model, PROMPT, 1, cache=used, drafter=Knows([])).gives(answer_to(PROMPT, 1))
    call(run, model, PROMPT, 4, cache=used, drafter=Knows([])).raises(ValueError)
    that("passes of the model", len(model.shown)).gives(1)
    that("tokens in the cache", used.num_tokens).gives(3)


# The same tokens, whatever is proposed


@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 16, 17])
def test_prompts_of_any_length(length, block_size):
    """Prompts that end in the middle of a block, and at its end: the tokens and the blocks are right."""
    prompt, num_new, rng = [(7 * place + 3) % VOCAB for place in range(length)], 15, random.Random(length)
    cache = a_cache(block_size=block_size)
    speculated(num_new, prompt=prompt, wrong=rng.sample(range(length + num_new), 6), cache=cache)
    that("tokens in the cache", cache.num_tokens).gives(length + num_new - 1)
    that("blocks in use", cache.storage.pool.num_used).gives(-(-cache.num_tokens // block_size))
    keys = cache.read(0)[0][0, 0, :, 0].long().tolist()
    that("what the cache holds", keys).gives([*prompt, *answer_to(prompt, num_new)][:-1])


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("seed", range(4))
def test_random_drafts(num_drafts, seed):
    """Draft tokens that are wrong at random positions: the tokens are right, and each is counted once."""
    rng = random.Random(seed)
    wrong = {place for place in range(60) if rng.random() < rng.choice([0.1, 0.5])}
    _, _, stats = speculated(rng.randint(10, 40), num_drafts=num_drafts, wrong=wrong)
    that("tokens", stats.num_tokens).gives(stats.num_passes + stats.num_accepted)


@pytest.fixture(scope="session")
def minigpt():
    """The shipped model."""
    return load_minigpt()


@pytest.mark.parametrize(
    ("text", "max_ngram"),
    [("Later my sister", 1), ("Did the children read the book yesterday? Yes, they", 3)],
)
def test_with_minigpt(minigpt, text, max_ngram):
    """MiniGPT and the drafter of task 4: the tokens of `minicache.engine.decoding.decode`, without a cache here."""
    prompt, config = Tokenizer().encode(text), minigpt.config
    expected = [int(token) for token in decode(minigpt, torch.tensor([prompt]), 30)]
    cache = PagedKVCache(config.num_layers, 1, config.num_kv_heads, config.max_seq_len, config.head_dim, block_size=4)
    stats = SpeculationStats()
    outcome = call(run, minigpt, prompt, 30, cache=cache, drafter=NgramDrafter(max_ngram), num_drafts=3, stats=stats)
    outcome.gives(expected)
    that("tokens", stats.num_tokens).gives(stats.num_passes + stats.num_accepted)
    that("tokens in the cache", cache.num_tokens).gives(len(prompt) + 29)
