"""Phase 9, task 5: which rows of a ragged step verify draft tokens, and which tokens each request gains."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
import torch

from minicache.cache.paged import PagedKVCache
from minicache.cache.selective import SelectiveStep
from minicache.engine.decoding import decode
from minicache.engine.sampling import SamplingParams, TokenSampler
from minicache.engine.speculative import rows_to_verify, verify
from minicache.grammar import Tokenizer
from minicache.model import load_minigpt
from minicache_course import scenario
from minicache_course.checks import call, short, that
from minicache_course.seeds import fresh

VOCAB = 11
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY = SamplingParams()
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Counting(TokenSampler):
    """A sampler that records its draws."""

    def __init__(self, params):
        super().__init__(params)
        self.drawn = []

    def __repr__(self):
        return short(self.params).replace("SamplingParams", "sampler")

    def draw(self, logits):
        self.drawn.append(super().draw(logits))
        return self.drawn[-1]


def drawing(seed=0, temperature=1.0, **params):
    return Counting(SamplingParams(temperature=temperature, seed=seed, **params))


def rows_of(*tokens, vocab=VOCAB):
    """Rows of logits, of which the given tokens are the likeliest by far: softmax is 1 for them."""
    scenario.given(f"rows of logits in which the likeliest tokens are {list(tokens)}, by far")
    rows = torch.full((len(tokens), vocab), -1000.0, device=DEVICE)
    for row, token in enumerate(tokens):
        rows[row, token] = 1000.0
    return rows


@cache
def row_after(text, vocab=VOCAB):
    """The logits after a text, a tuple: they depend on each of its tokens and on their order."""
    state = 1
    for token in text:
        state = (31 * state + token + 7) % 1_000_003
    return 1.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(fresh(state)))


def rows_behind(text, drafts, vocab=VOCAB):
    """The logits of a forward pass over the newest token of a text and the draft tokens after it."""
    return torch.stack([row_after((*text, *drafts[:n]), vocab) for n in range(len(drafts) + 1)]).to(DEVICE)


def without_drafts(text, params, num_tokens):
    """Token by token, one row each: the tokens that speculation must not change."""
    sampler, tokens = TokenSampler(params), []
    for _ in range(num_tokens):
        row = row_after((*text, *tokens))
        tokens.append(max(range(VOCAB), key=row.tolist().__getitem__) if params.is_greedy else sampler.draw(row))
    return tokens


# The rows


@pytest.mark.parametrize(
    ("num_new_tokens", "num_drafts", "rows"),
    [
        ([1, 1, 1], [0, 0, 0], [0, 1, 2]),
        ([3], [0], [2]),  # a chunk of a prompt
        ([3], [2], [0, 1, 2]),  # a decode with two draft tokens
        ([4, 4, 1], [0, 3, 0], [3, 4, 5, 6, 7, 8]),  # a chunk of a prompt, a decode with three draft tokens, a decode
        ([300], [0], [299]),
        ([7], [2], [4, 5, 6]),
        ([3, 2, 6, 1], [2, 1, 0, 0], [0, 1, 2, 3, 4, 10, 11]),
        ([9, 1, 3], [0, 0, 1], [8, 9, 11, 12]),
        ([], [], []),
    ],
    ids=str,
)
def test_the_last_rows_of_each_request(num_new_tokens, num_drafts, rows):
    """Each request's newest token's row and those of its k draft tokens: the last 1 + k, among all of the step."""
    call(rows_to_verify, num_new_tokens, num_drafts).gives(rows)


def test_rows_of_random_steps():
    """Against the definition: a token's row is needed if at most k tokens of its request come after it."""
    rng = random.Random(fresh(0))
    for _ in range(100):
        num_drafts = [rng.choice([0, 0, 1, 2, 5]) for _ in range(rng.randint(0, 6))]
        counts = [1 + k + rng.choice([0, 0, 0, 1, 7]) for k in num_drafts]
        step = [(count - 1 - at, k) for count, k in zip(counts, num_drafts, strict=True) for at in range(count)]
        rows = [row for row, (num_after, k) in enumerate(step) if num_after <= k]
        call(rows_to_verify, counts, num_drafts).gives(rows)


def test_rows_of_tuples():
    """Any sequences are accepted, and not changed."""
    call(rows_to_verify, (2, 3), (1, 0)).gives([0, 1, 4])
    counts, num_drafts = [2, 3], [1, 0]
    call(rows_to_verify, counts, num_drafts).gives([0, 1, 4])
    that("the arguments", (counts, num_drafts)).gives(([2, 3], [1, 0]))


@pytest.mark.parametrize(("num_new_tokens", "num_drafts"), [([4, 1], [0]), ([4], [0, 1]), ([], [0])], ids=str)
def test_one_number_of_drafts_for_each_request(num_new_tokens, num_drafts):
    """One number of draft tokens for each request: with one too few or too many, an error."""
    call(rows_to_verify, num_new_tokens, num_drafts).raises(ValueError)


# One request, temperature 0


@pytest.mark.parametrize(
    ("drafts", "likeliest", "tokens"),
    [
        ([], [7], [7]),
        ([1], [1, 2], [1, 2]),
        ([1], [2, 1], [2]),
        ([1, 2], [1, 2, 5], [1, 2, 5]),
        ([1, 2, 3], [1, 9, 3, 4], [1, 9]),
        ([1, 2, 3], [9, 2, 3, 4], [9]),
        ([1, 2, 3, 4], [1, 2, 3, 9, 4], [1, 2, 3, 9]),
        ([4, 4, 4], [4, 4, 4, 4], [4, 4, 4, 4]),
        ([2, 1], [1, 2, 3], [1]),
        ([0], [0, 0], [0, 0]),
        ([1, 2, 3], [1, 2, 0, 3], [1, 2, 0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda what: f"temperature {what}")
def test_up_to_the_first_difference(drafts, likeliest, tokens, temperature):
    """Rows with one certain token: the draft tokens up to the first that is not picked, and then the picked one."""
    sampler = drawing(temperature=temperature)
    outcome = call(verify, rows_of(*likeliest), [drafts], [sampler])
    outcome.gives([tokens])
    if temperature:
        that(f"what {sampler} drew for the draft tokens {drafts}", sampler.drawn).gives(tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda what: f"temperature {what}")
def test_large_token_ids_are_compared_by_value(temperature):
    """Token ids beyond the small ints that Python caches: equality counts, not identity."""
    rows = rows_of(700, 31_999, 5, vocab=32_000)
    call(verify, rows, [[700, 31_999]], [drawing(temperature=temperature)]).gives([[700, 31_999, 5]])


def test_of_equal_logits_the_lowest_token_is_picked():
    """Two tokens are equally likely: temperature 0 takes the lower id, and that draft token is accepted."""
    rows = torch.zeros(2, VOCAB, device=DEVICE)
    rows[0, [3, 8]], rows[1, 5] = 2.0, 2.0
    call(verify, rows, [[8]], [Counting(GREEDY)]).gives([[3]])
    call(verify, rows, [[3]], [Counting(GREEDY)]).gives([[3, 5]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_dtype(dtype):
    """Models also give 16-bit logits."""
    rows = rows_of(1, 9, 3).to(dtype)
    call(verify, rows, [[1, 2]], [Counting(GREEDY)]).gives([[1, 9]])
    call(verify, rows, [[1, 2]], [drawing()]).gives([[1, 9]])


# A batch


def test_each_request_has_its_own_rows():
    """The lab page's step: 0, 3 and 0 draft tokens, so rows 0, 1 to 4, and 5."""
    rows = rows_of(6, 1, 2, 9, 4, 8)
    samplers = [Counting(GREEDY) for _ in range(3)]
    call(verify, rows, [[], [1, 2, 3], []], samplers).gives([[6], [1, 2, 9], [8]])


def test_a_batch_of_nothing_gains_nothing():
    """No request: no tokens."""
    call(verify, torch.zeros(0, VOCAB, device=DEVICE), [], []).gives([])


def test_each_request_has_its_own_sampler():
    """Three requests with the same row and different seeds: each gets the draw of its own sampler."""
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (3, 4, 5)]
    text = (1, 2)
    expected = [without_drafts(text, each, 1) for each in params]
    rows = torch.cat([rows_behind(text, ())] * 3)
    call(verify, rows, [[]] * 3, [Counting(each) for each in params]).gives(expected)


def test_tokens_do_not_depend_on_the_batch():
    """A request gets the same tokens alone, first and last in a batch of other requests."""
    text, drafts = (5, 5, 1), without_drafts((5, 5, 1), SamplingParams(temperature=0.8, seed=9), 2)
    mine = rows_behind(text, drafts)
    alone = call(verify, mine, [drafts], [drawing(9, 0.8)]).value
    other = rows_behind((2, 7), (1, 1, 1))
    behind = call(verify, torch.cat([other, mine]), [[1, 1, 1], drafts], [drawing(1), drawing(9, 0.8)]).value
    before = call(verify, torch.cat([mine, other]), [drafts, [1, 1, 1]], [drawing(9, 0.8), drawing(1)]).value
    that("tokens, behind another request", behind[1]).gives(alone[0])
    that("tokens, before another request", before[0]).gives(alone[0])


def test_verify_changes_no_argument():
    """Tuples are accepted; draft tokens and logits are not changed, and the returned list is a new one."""
    rows, drafts = rows_of(1, 2, 5), [1, 2]
    before = rows.clone()
    found = call(verify, rows, [drafts], [Counting(GREEDY)]).value
    found[0].append(6)
    that("the draft tokens", drafts).gives([1, 2])
    that("the logits that verify was given, after the call", rows).gives(before)
    call(verify, rows, ((1, 2),), (Counting(GREEDY),)).gives([[1, 2, 5]])


class Counted(torch.Tensor):
    """Logits whose operations are counted, `.item()` and comparisons included."""

    num_operations = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counted.num_operations += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_greedy_rows_are_picked_all_at_once():
    """Two greedy requests or forty, with a draft token each: as many tensor operations, and none for each row."""
    counted = []
    for num_requests in (2, 40):
        rows = rows_of(*[1, 5] * num_requests).as_subclass(Counted)
        before = Counted.num_operations
        outcome = call(verify, rows, [[1]] * num_requests, [TokenSampler(GREEDY)] * num_requests)
        counted.append(Counted.num_operations - before)
        outcome.gives([[1, 5]] * num_requests)
    that("tensor operations for 40 greedy requests beyond those for 2", counted[1] - counted[0]).gives(0)


# The same tokens as without draft tokens

SETTINGS = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.3, "seed": 2},
    {"temperature": 2.0, "seed": 3, "top_k": 4},
    {"temperature": 1.0, "seed": 4, "top_p": 0.7},
    {"temperature": 1.5, "seed": 5, "top_k": 6, "top_p": 0.9},
]


def served(texts, params, answers, most, part_right, rng):
    """The tokens of a batch of requests, whose draft tokens are right with probability `part_right`.

    Each gets 0 … `most` draft tokens in a step. Every step is checked: how many tokens, and how often samplers drew.
    """
    __tracebackhide__ = True
    samplers, found, step = [Counting(each) for each in params], [[] for _ in texts], 0
    while live := [n for n, answer in enumerate(answers) if len(found[n]) < len(answer)]:
        drafts = []
        for n in live:
            right = answers[n][len(found[n]) :][: rng.randint(0, most)]
            drafts.append([each if rng.random() < part_right else rng.randrange(VOCAB) for each in right])
        rows = [rows_behind((*texts[n], *found[n]), its_drafts) for n, its_drafts in zip(live, drafts, strict=True)]
        given = call(verify, torch.cat(rows), drafts, [samplers[n] for n in live]).value
        that(f"requests that get tokens in step {step}", len(given)).gives(len(live))
        for n, tokens in zip(live, given, strict=True):
            found[n] += tokens
            expected = answers[n][: len(found[n])]
            what = f"tokens of request {n}, {samplers[n]}, by step {step}"
            that(what, found[n][: len(expected)]).gives(expected)
            that(f"whether request {n} got a token in step {step}", bool(tokens)).gives(True)
            if not params[n].is_greedy:
                that(f"draws for request {n} by step {step}", len(samplers[n].drawn)).gives(len(found[n]))
        step += 1
    return [tokens[: len(answer)] for tokens, answer in zip(found, answers, strict=True)]


@pytest.mark.parametrize("part_right", [0.0, 0.5, 0.9, 1.0], ids=lambda what: f"{what:.0%} right")
@pytest.mark.parametrize("most", [1, 4])
def test_the_tokens_are_those_of_decoding_without_drafts(part_right, most):
    """Greedy requests, and sampled ones with seeds, temperatures, top-k and top-p, in one batch: the same tokens."""
    rng = random.Random(fresh(most))
    texts = [tuple(rng.randrange(VOCAB) for _ in range(4)) for _ in SETTINGS]
    params = [SamplingParams(**each) for each in SETTINGS]
    answers = [without_drafts(text, each, 15 + 2 * n) for n, (text, each) in enumerate(zip(texts, params, strict=True))]
    that("the tokens of all", served(texts, params, answers, most, part_right, rng)).gives(answers)


def test_all_draft_tokens_are_accepted():
    """Four right draft tokens for a sampled request: five tokens from one forward pass, and five draws."""
    params = SamplingParams(temperature=1.0, seed=7)
    answer = without_drafts((3,), params, 5)
    sampler = Counting(params)
    call(verify, rows_behind((3,), answer[:4]), [answer[:4]], [sampler]).gives([answer])
    that("draws", len(sampler.drawn)).gives(5)


def test_a_sampler_goes_on_behind_a_rejected_token():
    """The first of three draft tokens is wrong: one draw. The next step's draw is the same as without speculation."""
    params = SamplingParams(temperature=1.0, seed=8)
    answer = without_drafts((4,), params, 2)
    sampler, wrong = Counting(params), (answer[0] + 1) % VOCAB
    call(verify, rows_behind((4,), [wrong, 1, 2]), [[wrong, 1, 2]], [sampler]).gives([answer[:1]])
    that("draws for one token", len(sampler.drawn)).gives(1)
    call(verify, rows_behind((4, answer[0]), []), [[]], [sampler]).gives([answer[1:]])


# Exactly the model's distribution


class Scripted(TokenSampler):
    """Draws given tokens, one after the other, and multiplies their probabilities."""

    def __init__(self, script, **params):
        super().__init__(SamplingParams(temperature=1.0, **params))
        self.script, self.num_drawn, self.likelihood = script, 0, 1.0

    def draw(self, logits):
        token = self.script[self.num_drawn]
        self.num_drawn += 1
        self.likelihood *= self.probabilities(logits)[token].item()
        return token


def in_turns(rows, drafts, sampler, vocab):
    """Two tokens or more after the text (1,): from one pass with draft tokens, and a second without if necessary."""
    __tracebackhide__ = True
    [tokens] = call(verify, rows, [drafts], [sampler]).value
    if len(tokens) == 1:
        tokens += call(verify, rows_behind((1, *tokens), (), vocab), [[]], [sampler]).value[0]
    return tuple(tokens)


def joint(vocab, **params):
    """The probability of each pair of tokens after the text (1,): p(a) · p(b | a), by softmax."""
    sampler = TokenSampler(SamplingParams(temperature=1.0, **params))
    return {
        (a, b): (sampler.probabilities(row_after((1,), vocab))[a] * sampler.probabilities(row_after((1, a), vocab))[b])
        .double()
        .item()
        for a, b in itertools.product(range(vocab), repeat=2)
    }


@pytest.mark.parametrize("drafts", [(), (0,), (2,), (0, 0), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("top_k", [0, 2])
def test_every_outcome_is_as_likely_as_without_drafts(drafts, top_k):
    """A vocabulary of three tokens: all possible draws, and the probability of each pair of tokens."""
    ways = {}
    for script in itertools.product(range(3), repeat=3):
        sampler = Scripted(script, top_k=top_k)
        tokens = in_turns(rows_behind((1,), drafts, 3), drafts, sampler, 3)
        that(f"tokens, if the draws give {list(script)}", list(tokens)).gives(list(script[: sampler.num_drawn]))
        ways[tokens] = sampler.likelihood  # draws that were not made do not count
    found = dict.fromkeys(joint(3), 0.0)
    for tokens, likelihood in ways.items():
        found[tokens[:2]] += likelihood
    for pair, expected in joint(3, top_k=top_k).items():
        that(f"how likely the tokens {pair} are, with draft tokens {drafts}", found[pair]).is_close(expected)


@pytest.mark.parametrize("drafts", [(3,), (0, 2)], ids=str)
def test_a_thousand_draws_have_the_models_distribution(drafts):
    """Two tokens, 1,000 times, with one sampler: the frequency of each pair, by the chi-square test."""
    counts, num_times = dict.fromkeys(joint(4), 0), 1000
    rows, sampler = rows_behind((1,), drafts, 4), drawing(seed=1)
    for _ in range(num_times):
        counts[in_turns(rows, drafts, sampler, 4)[:2]] += 1
    expected = {pair: num_times * part for pair, part in joint(4).items()}
    statistic = sum((counts[pair] - mean) ** 2 / mean for pair, mean in expected.items())
    # 15 degrees of freedom: above 44.3 once in 10,000 times; with this seed always the same.
    that(f"whether chi-square, {statistic:.1f}, is below 44.3", statistic < 44.3).gives(True)


# Rows that give nothing


@pytest.mark.parametrize("bad", [NAN, INF], ids=["NaN", "inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda what: f"temperature {what}")
def test_a_bad_row_gives_no_token(bad, temperature):
    """Of a request's three rows the second has a NaN or an inf, and then the first too: no token from there on.

    The other request gets its own.
    """
    rows = rows_of(1, 2, 3, 8)
    rows[1, 0] = bad
    scenario.given(f"a logit of row 1 is {bad}")
    samplers = [drawing(temperature=temperature) for _ in range(2)]
    call(verify, rows, [[1, 2], []], samplers).gives([[1], [8]])
    if temperature:
        that("draws", [len(sampler.drawn) for sampler in samplers]).gives([1, 1])
    rows[0, 4] = bad
    samplers = [drawing(temperature=temperature) for _ in range(2)]
    call(verify, rows, [[1, 2], []], samplers).gives([[], [8]])
    if temperature:
        that("draws", [len(sampler.drawn) for sampler in samplers]).gives([0, 1])


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda what: f"temperature {what}")
def test_a_bad_row_behind_a_rejected_token_does_not_matter(temperature):
    """The first draft token is rejected, so the next row is not used: a NaN in it changes nothing."""
    rows = rows_of(6, 2, 3)
    rows[1] = NAN
    call(verify, rows, [[1, 2]], [drawing(temperature=temperature)]).gives([[6]])


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda what: f"temperature {what}")
def test_minus_infinity_rules_a_token_out(temperature):
    """A logit of −inf excludes a token, and the row is valid; with all of them −inf there is nothing to pick."""
    rows = rows_of(1, 2, 3)
    rows[rows < 0] = -INF
    call(verify, rows, [[1, 2]], [drawing(temperature=temperature)]).gives([[1, 2, 3]])
    rows[1] = -INF
    call(verify, rows, [[1, 2]], [drawing(temperature=temperature)]).gives([[1]])


# What is refused


@pytest.mark.parametrize(
    ("num_rows", "drafts", "num_samplers"),
    [
        pytest.param(5, [[1, 2], [3]], 1, id="a sampler too few"),
        pytest.param(5, [[1, 2], [3]], 3, id="a sampler too many"),
        pytest.param(4, [[1, 2], [3]], 2, id="a row too few"),
        pytest.param(6, [[1, 2], [3]], 2, id="a row too many"),
        pytest.param(2, [[1, 2], [3]], 2, id="a row for each request"),
        pytest.param(3, [[1, 2], [3]], 2, id="a row for each draft token"),
        pytest.param(1, [], 0, id="a row, and no request"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_before_any_draw(num_rows, drafts, num_samplers):
    """1 + k rows and one sampler for each request; else an error, before anything is drawn."""
    samplers = [drawing() for _ in range(num_samplers)]
    rows = rows_of(*[1, 2, 5, 3, 5, 5][:num_rows])
    call(verify, rows, drafts, samplers).raises(ValueError)
    that("draws before verify refused", sum(len(sampler.drawn) for sampler in samplers)).gives(0)


# In a step of the model


@pytest.fixture(scope="session")
def minigpt():
    """The shipped model."""
    return load_minigpt(device=DEVICE)


def test_ragged_steps_of_minigpt_give_the_answers_of_decoding(minigpt):
    """A prompt in chunks, a decode with draft tokens and one without, in one pass a step: each as if it ran alone."""
    config, encode = minigpt.config, Tokenizer().encode
    prompts = [encode("Later my sister"), encode("Yesterday I"), encode("Did the children read the book yesterday?")]
    answers = [
        [int(token) for token in decode(minigpt, torch.tensor([prompt], device=DEVICE), 26)] for prompt in prompts
    ]
    caches = [
        PagedKVCache(
            config.num_layers, 1, config.num_kv_heads, 64, config.head_dim, block_size=4, device=torch.device(DEVICE)
        )
        for _ in prompts
    ]
    found: list[list[int]] = [[], [], []]
    for step in range(8):
        counts, drafts, shown = [], [], []
        for n, (prompt, its_cache) in enumerate(zip(prompts, caches, strict=True)):
            unseen = [*prompt, *found[n]][its_cache.num_tokens :][:4]  # a chunk of four
            right = answers[n][len(found[n]) :][: (0, 3, step % 3)[n]] if found[n] else []
            its_drafts = [*right[:-1], right[-1] + step % 2] if right else []  # the last is wrong in every other step
            drafts.append(its_drafts)
            shown += [*unseen, *its_drafts]
            counts.append(len(unseen) + len(its_drafts))
        rows = call(rows_to_verify, counts, [len(each) for each in drafts]).value
        with torch.inference_mode():
            logits = minigpt(torch.tensor([shown], device=DEVICE), SelectiveStep(caches, counts))[0, rows]
        samplers = [TokenSampler(GREEDY)] * 3
        for n, tokens in enumerate(call(verify, logits, drafts, samplers).value):
            if caches[n].num_tokens < len(prompts[n]):
                continue  # in the middle of its prompt: this is none of its tokens
            found[n] += tokens
            that(f"tokens of request {n} by step {step}", found[n]).gives(answers[n][: len(found[n])])
            caches[n].truncate(len(prompts[n]) + len(found[n]) - 1)
    that("tokens of each request in eight steps", [len(tokens) for tokens in found]).gives([8, 25, 11])
