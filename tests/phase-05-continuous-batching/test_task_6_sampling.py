"""Phase 5, task 6: temperature, top-k, top-p, and a generator for each request."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.engine.sampling import SamplingParams, TokenSampler, keep_top_k, keep_top_p, pick_tokens
from minicache_course.checks import call, that
from minicache_course.seeds import fresh

repeatable = settings(max_examples=60, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)

OUT = -math.inf
LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.5, 1.4, 0.0, -3.0, 0.9])


def logits_of(*probabilities):
    """Logits whose softmax are these probabilities."""
    return torch.tensor(probabilities, dtype=torch.float64).log()


def left(logits):
    """The ids of the tokens that are not masked."""
    return [token for token, logit in enumerate(logits.tolist()) if logit != OUT]


def random_rows(num_rows, vocab):
    return 2 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(fresh(1)))


# Top-k


def test_the_k_likeliest_are_left():
    """k = 3 of eight: the three largest logits are unchanged, the others become −inf."""
    call(keep_top_k, LOGITS, 3).gives(torch.tensor([OUT, 2.0, OUT, 1.5, 1.4, OUT, OUT, OUT]))


def test_each_row_has_its_own_k():
    """Two rows, k = 1: each row's largest is left."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 4.0]])
    call(keep_top_k, logits, 1).gives(torch.tensor([[OUT, 3.0, OUT], [5.0, OUT, OUT]]))


@pytest.mark.parametrize("top_k", [0, 8, 9, 10**6], ids="k = {}".format)
def test_k_that_rules_nothing_out(top_k):
    """0 means all tokens, and so does a k as large as the vocabulary or larger."""
    call(keep_top_k, LOGITS, top_k).gives(LOGITS)
    rows = torch.stack([LOGITS, -LOGITS])
    call(keep_top_k, rows, top_k).gives(rows)


def test_equals_of_the_kth_are_left_too():
    """1, 3, 3, 3 with k = 2: the three 3s are equal, so all are left."""
    call(keep_top_k, torch.tensor([1.0, 3.0, 3.0, 3.0]), 2).gives(torch.tensor([OUT, 3.0, 3.0, 3.0]))


# Top-p


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.01, [2]),
        (0.49, [2]),
        (0.51, [0, 2]),
        (0.79, [0, 2]),
        (0.81, [0, 2, 3]),
        (0.96, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_the_smallest_set_that_has_the_mass(top_p, expected):
    """Probabilities 0.3, 0.05, 0.5, 0.15: the likeliest are left until they add up to p, and one always is."""
    that(f"tokens left by top_p = {top_p}", left(call(keep_top_p, logits_of(0.3, 0.05, 0.5, 0.15), top_p).value)).gives(
        expected
    )


def test_what_is_left_keeps_its_logits():
    """Tokens are masked, not scaled: the kept logits are unchanged."""
    logits = logits_of(0.25, 0.75) + 3
    call(keep_top_p, logits, 0.5).gives(torch.tensor([OUT, logits[1].item()], dtype=torch.float64))


def test_equals_go_by_their_ids():
    """Four equal tokens, p = 0.6: three are enough, and they are the first three."""
    that("tokens left", left(call(keep_top_p, torch.zeros(4), 0.6).value)).gives([0, 1, 2])


def test_many_equals_go_by_their_ids():
    """64 equal tokens, p = 0.5: the first 32 are left. A sort that may reorder equals shows with many of them."""
    that("tokens left", left(call(keep_top_p, torch.zeros(64), 0.5).value)).gives(list(range(32)))


def test_p_of_one_rules_nothing_out():
    """Logits 50, 0, 0, 0: in floats the first token's probability is 1 already, and p = 1 leaves the others too."""
    logits = torch.tensor([50.0, 0.0, 0.0, 0.0])
    call(keep_top_p, logits, 1.0).gives(logits)


def test_tokens_that_are_ruled_out_stay_so():
    """−inf comes from top-k: its tokens have no probability, and the others have all of it."""
    logits = torch.tensor([OUT, 1.0, OUT, 1.0])
    that("tokens left by 0.4", left(call(keep_top_p, logits, 0.4).value)).gives([1])
    that("tokens left by 0.9", left(call(keep_top_p, logits, 0.9).value)).gives([1, 3])


@repeatable
@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    top_p=st.floats(0.01, 0.999),
    shift=st.sampled_from([0.0, 40.0, -40.0]),
)
def test_any_nucleus(weights, top_p, shift):
    """For any distribution: the kept tokens reach p, and not without the least likely; no masked token is likelier."""
    total = sum(weights)
    got = call(keep_top_p, logits_of(*(weight / total for weight in weights)) + shift, top_p).value
    ids, told = left(got), f"of weights {weights}, top_p = {top_p}"
    that(f"whether a token is left {told}", len(ids) >= 1).gives(True)
    inside = sorted((weights[token] for token in ids), reverse=True)
    outside = [weight for token, weight in enumerate(weights) if token not in ids]
    that(f"whether the mass of {ids} {told} reaches p", sum(inside) / total >= top_p - 1e-9).gives(True)
    least_counts = sum(inside[:-1]) / total <= top_p + 1e-9
    that(f"whether the mass of {ids} without its least {told} stays below p", least_counts).gives(True)
    told = f"whether those left {told} are at least as likely as those left out"
    that(told, min(inside) >= max(outside, default=0)).gives(True)


def test_rows_do_not_mix():
    """Two rows at once give the same as each alone, in any order of tokens; and the argument is unchanged."""
    rows = random_rows(6, 20)
    kept = rows.clone()
    expected = torch.stack([keep_top_p(row, 0.7) for row in rows])
    call(keep_top_p, rows, 0.7).gives(expected)
    call(keep_top_k, rows, 4)
    that("the rows afterwards", rows).gives(kept)


def test_k_and_p_out_of_bounds_are_refused():
    """A negative k, a k that is not an int, a p of 0, below or above 1: refused."""
    call(keep_top_k, LOGITS, -1).raises(ValueError)
    call(keep_top_k, LOGITS, 2.0).raises(TypeError)
    for top_p in (0.0, -0.5, 1.5, math.nan):
        call(keep_top_p, LOGITS, top_p).raises(ValueError)


# The distribution of a request


def test_temperature_divides_the_logits():
    """Temperature 2 halves the logits, temperature 0.5 doubles them."""
    for temperature in (0.5, 1.0, 2.0):
        expected = (LOGITS.double() / temperature).softmax(dim=0)
        got = call(TokenSampler(SamplingParams(temperature=temperature)).probabilities, LOGITS)
        got.is_close(expected, rtol=1e-9, atol=1e-12)


def test_temperature_comes_before_top_p():
    """0.5, 0.3, 0.15, 0.05 and p = 0.75: two tokens are left; at temperature 3, three."""
    logits = logits_of(0.5, 0.3, 0.15, 0.05)
    for temperature, expected in ((1.0, [0, 1]), (3.0, [0, 1, 2])):
        sampler = TokenSampler(SamplingParams(temperature=temperature, top_p=0.75))
        got = call(sampler.probabilities, logits).value
        that(f"tokens that can be drawn at temperature {temperature}", got.nonzero().flatten().tolist()).gives(expected)


def test_top_k_comes_before_top_p():
    """0.4, 0.3, 0.2, 0.1 with k = 2 and p = 0.5: of the two left the first has 0.57, which is enough."""
    sampler = TokenSampler(SamplingParams(temperature=1.0, top_k=2, top_p=0.5))
    expected = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    call(sampler.probabilities, logits_of(0.4, 0.3, 0.2, 0.1)).is_close(expected)


def test_what_is_left_sums_to_one():
    """Float16 logits in, float64 probabilities out: 0 for masked tokens, and a sum of 1."""
    got = call(TokenSampler(SamplingParams(temperature=0.7, top_k=5)).probabilities, LOGITS.half()).value
    that("dtype of the probabilities", str(got.dtype)).gives("torch.float64")
    that("tokens that can be drawn", got.nonzero().flatten().tolist()).gives([0, 1, 3, 4, 7])
    that("their sum", float(got.sum())).is_close(1.0)


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-9], ids=lambda what: f"temperature {what}")
def test_temperatures_next_to_zero_take_the_likeliest(temperature):
    """Near 0 a draw is the likeliest token: no infinity, no NaN."""
    sampler = TokenSampler(SamplingParams(temperature=temperature, seed=0))
    for _ in range(5):
        call(sampler.draw, torch.tensor([1.0, 80.0, 79.0])).gives(1)


# Draws


def test_temperature_zero_takes_the_likeliest():
    """Temperature 0 draws nothing: the largest logit, the lowest id among equals."""
    call(TokenSampler(SamplingParams()).draw, LOGITS).gives(1)
    call(TokenSampler(SamplingParams(top_k=2, top_p=0.5)).draw, torch.tensor([0.0, 4.0, 4.0])).gives(1)


def test_a_request_goes_on_drawing():
    """A request with a seed draws 20 times from 30 equal tokens: its generator goes on, so the draws differ."""
    sampler = TokenSampler(SamplingParams(temperature=1.0, seed=3))
    draws = [call(sampler.draw, torch.zeros(30)).value for _ in range(20)]
    that("whether 20 draws of one sampler, from 30 equal tokens, give one token only", len(set(draws)) == 1).gives(
        False
    )


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"temperature": 2.0, "top_k": 3}, [1, 3, 4]),
        ({"temperature": 0.8, "top_p": 0.9}, [1, 3, 4, 7]),
    ],
    ids=str,
)
def test_draws_follow_the_probabilities(options, drawn):
    """1,000 draws with a fixed seed: the frequencies are the probabilities, within five standard errors."""
    sampler, num_draws = TokenSampler(SamplingParams(seed=5, **options)), 1000
    weights = [math.exp(logit / options["temperature"]) if i in drawn else 0 for i, logit in enumerate(LOGITS.tolist())]
    draws = [call(sampler.draw, LOGITS).value for _ in range(num_draws)]
    for token, weight in enumerate(weights):
        probability = weight / sum(weights)
        error = 5 * math.sqrt(probability * (1 - probability) / num_draws)
        share = draws.count(token) / num_draws
        that(f"share of token {token} with {options}", share).is_close(probability, rtol=0, atol=error)


def draws_of(sampler, num_draws=40):
    return [call(sampler.draw, row).value for row in random_rows(num_draws, 30)]


def test_a_seed_repeats():
    """Two samplers with one seed draw the same tokens; with another seed, or none, different ones."""
    params = SamplingParams(temperature=1.5, seed=3)
    first = draws_of(TokenSampler(params))
    that("draws of a second sampler with seed 3", draws_of(TokenSampler(params))).gives(first)
    for seed in (4, None):
        other = draws_of(TokenSampler(SamplingParams(temperature=1.5, seed=seed)))
        that(f"whether draws with seed {seed} are the same", other == first).gives(False)


def test_the_batch_composition_does_not_matter():
    """Other requests and torch's global generator do not matter: a request draws the same tokens as alone."""
    params = SamplingParams(temperature=1.5, seed=3)
    expected = draws_of(TokenSampler(params))
    one, other, got = TokenSampler(params), TokenSampler(SamplingParams(temperature=1.0, seed=9)), []
    for step, row in enumerate(random_rows(40, 30)):
        torch.manual_seed(step)
        other.draw(row)
        got.append(call(one.draw, row).value)
    that("draws, in turns with another request", got).gives(expected)


def test_drawing_leaves_torchs_own_generator_alone():
    """A request's draws do not change the results of torch.rand."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    draws_of(TokenSampler(SamplingParams(temperature=1.0, seed=1)), 5)
    that("torch.rand(3) after manual_seed(7) and some draws", torch.rand(3)).gives(expected)


# A batch


def test_a_batch_is_picked_row_by_row():
    """Greedy and sampled requests in one batch, with different params: each gets the same as alone, as Python ints."""
    rows = random_rows(6, 30)
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=2.0, top_k=3, seed=2),
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=0.5, seed=1),
        SamplingParams(temperature=0.7, seed=8),
    ]
    alone, together = ([TokenSampler(each) for each in params] for _ in range(2))
    for step in range(3):
        expected = [sampler.draw(row) for sampler, row in zip(alone, rows + step * rows.flip(0), strict=True)]
        got = call(pick_tokens, rows + step * rows.flip(0), together)
        got.gives(expected)
        that("the types of the tokens", {type(token).__name__ for token in got.value}).gives({"int"})


def test_greedy_rows_are_picked_all_at_once():
    """pick_tokens draws only for sampled requests: greedy rows take one argmax of the batch."""
    samplers, drawn = [TokenSampler(SamplingParams(temperature=float(b % 3 == 1), seed=b)) for b in range(6)], []
    for b, sampler in enumerate(samplers):
        sampler.draw = lambda logits, b=b: drawn.append(b) or 7
    rows = random_rows(6, 30)
    likeliest = rows.argmax(dim=-1).tolist()
    call(pick_tokens, rows, samplers).gives([token if b % 3 != 1 else 7 for b, token in enumerate(likeliest)])
    that("rows whose sampler's draw was called", drawn).gives([1, 4])


def test_tokens_may_be_ruled_out_beforehand():
    """Some logits are −inf, in a greedy row and in a sampled one: the others can be picked."""
    rows = torch.tensor([[OUT, 1.0, 0.5], [0.0, OUT, 2.0]])
    samplers = [TokenSampler(SamplingParams()), TokenSampler(SamplingParams(temperature=1.0, top_k=1, seed=1))]
    call(pick_tokens, rows, samplers).gives([1, 2])


def test_an_empty_batch_has_no_tokens():
    """No rows and no samplers: no tokens."""
    call(pick_tokens, torch.empty(0, 30), []).gives([])


@pytest.mark.parametrize("count", [0, 2, 4], ids=lambda what: f"{what} samplers for 3 rows")
def test_each_row_needs_a_sampler(count):
    """Three rows and a different number of samplers: ValueError."""
    call(pick_tokens, random_rows(3, 30), [TokenSampler(SamplingParams())] * count).raises(ValueError)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda what: f"temperature {what}")
def test_a_row_from_which_nothing_can_be_picked_gets_none(bad, temperature):
    """A row whose largest logit is NaN or infinite: None. The others get tokens, and its sampler draws nothing."""
    params = [SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=temperature, seed=2)]
    samplers, fresh = ([TokenSampler(each) for each in params] for _ in range(2))
    rows = random_rows(2, 30)
    broken = rows.clone()
    broken[1] = bad
    call(pick_tokens, broken, samplers).gives([fresh[0].draw(rows[0]), None])
    for _ in range(10):  # one draw may be the same by chance
        call(pick_tokens, rows, samplers).gives(pick_tokens(rows, fresh))


def test_one_bad_logit_spoils_a_row():
    """NaN anywhere in a row, or one infinite logit, gives None; masked tokens (−inf) do not."""
    rows = random_rows(3, 30)
    rows[0, 7], rows[1, 29], rows[2, 1:] = math.nan, math.inf, -math.inf
    call(pick_tokens, rows, [TokenSampler(SamplingParams())] * 3).gives([None, None, 0])
