"""Phase 8, task 5: which beams continue, and which answers are kept."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from minicache.engine.beam import Beam, BeamSearch, BeamSearchParams
from minicache.engine.beam_requests import beam_search
from minicache.engine.llm import LLM
from minicache.model import MiniGPT, MiniGPTConfig
from minicache.scheduler.paged import PagedScheduler
from minicache.scheduler.sharing import SharingScheduler
from minicache_course.checks import call, that
from minicache_course.seeds import fresh


def a_search(beam_width, stop_token_ids=(), max_tokens=50, length_penalty=1.0):
    """A search of that width. The search's stop tokens end an answer, whatever its params are."""
    params = BeamSearchParams(beam_width, max_tokens=1000, length_penalty=length_penalty, ignore_eos=True)
    return BeamSearch(params, stop_token_ids, max_tokens)


def beams(search):
    """Its beams, as (tokens, log-probability)."""
    return [(list(beam.token_ids), beam.log_prob) for beam in search.beams]


def answers(search):
    """Its answers, as (tokens, score, why it ended)."""
    return [(beam.token_ids, beam.score, beam.finish_reason) for beam in search.answers]


def steps(outcome):
    """What `advance` returned, as pairs (parent, token)."""
    return [tuple(step) for step in outcome.value]


# Scores


@pytest.mark.parametrize(
    ("penalty", "log_prob", "length", "score"),
    [(1.0, -6.0, 3, -2.0), (0.0, -6.0, 3, -6.0), (2.0, -6.0, 3, -6 / 9), (0.5, -6.0, 4, -3.0), (1, -1.0, 1, -1.0)],
)
def test_a_score_is_divided_by_length_to_the_penalty(penalty, log_prob, length, score):
    """The sum of the log-probabilities, over the length to the power of the penalty."""
    call(a_search(2, length_penalty=penalty).score, log_prob, length).is_close(score)


def test_keep_leaves_the_k_best_answers():
    """The k best are kept, the best first, in whatever order they are found."""
    search = a_search(3)
    kept = []
    for number, score in enumerate([-3.0, -1.0, -4.0, -2.0, -5.0, -0.5]):
        call(search.keep, Beam([number], score, "stop")).gives(None)
        kept.append([beam.score for beam in search.answers])
    that("scores after each", kept).gives(
        [
            [-3.0],
            [-1.0, -3.0],
            [-1.0, -3.0, -4.0],
            [-1.0, -2.0, -3.0],
            [-1.0, -2.0, -3.0],
            [-0.5, -1.0, -2.0],
        ]
    )
    that("their tokens", [beam.token_ids for beam in search.answers]).gives([[5], [1], [3]])


@pytest.mark.parametrize(
    ("beam_width", "stops", "num"), [(1, 0, 2), (3, 0, 6), (3, 1, 6), (3, 2, 9), (4, 5, 24), (1, 1, 2)]
)
def test_enough_candidates_are_asked_for(beam_width, stops, num):
    """(1 + stop tokens) · k, and 2 k at least."""
    that(
        f"num_candidates of {beam_width} beams, {stops} stop tokens", a_search(beam_width, range(stops)).num_candidates
    ).gives(num)


# Steps by hand


def test_a_beam_with_two_continuations():
    """Both likeliest hypotheses are the first beam's, none the second's: two beams from one parent."""
    search = a_search(2)
    outcome = call(search.advance, [[(5, -1.0), (6, -2.0), (7, -3.0), (8, -9.0)]])
    that("what advance returned, (parent, token)", steps(outcome)).gives([(0, 5), (0, 6)])
    that("beams", beams(search)).gives([([5], -1.0), ([6], -2.0)])
    outcome = call(
        search.advance, [[(1, -0.5), (2, -0.75), (3, -8.0), (4, -9.0)], [(1, -0.5), (2, -7.0), (3, -8.0), (4, -9.0)]]
    )
    that("what advance returned, (parent, token)", steps(outcome)).gives([(0, 1), (0, 2)])
    that("beams", beams(search)).gives([([5, 1], -1.5), ([5, 2], -1.75)])
    that("answers", answers(search)).gives([])
    that("whether it is over", search.is_over).gives(False)


def test_beams_are_ranked_by_their_sums():
    """The second becomes the first: the sum counts, not the last token."""
    search = a_search(2)
    search.advance([[(5, -1.0), (6, -1.5), (7, -3.0), (8, -9.0)]])
    outcome = call(
        search.advance, [[(1, -3.0), (2, -4.0), (3, -8.0), (4, -9.0)], [(1, -0.5), (2, -3.0), (3, -8.0), (4, -9.0)]]
    )
    that("what advance returned, (parent, token)", steps(outcome)).gives([(1, 1), (0, 1)])
    that("beams", beams(search)).gives([([6, 1], -2.0), ([5, 1], -4.0)])
    outcome = call(
        search.advance, [[(9, -3.0), (2, -4.0), (3, -8.0), (4, -9.0)], [(9, -0.5), (2, -3.0), (3, -8.0), (4, -9.0)]]
    )
    that("beams", beams(search)).gives([([5, 1, 9], -4.5), ([6, 1, 9], -5.0)])
    that("what advance returned, (parent, token)", steps(outcome)).gives([(1, 9), (0, 9)])


def test_three_steps_to_the_end():
    """Two beams over tokens 0, 1, 2; token 2 ends an answer; at most three tokens."""
    search = a_search(2, [2], max_tokens=3)
    # −1 for 0, −2 for 2 (which ends, second of all: an answer), −4 for 1.
    that("step 1", steps(call(search.advance, [[(0, -1.0), (2, -2.0), (1, -4.0)]]))).gives([(0, 0), (0, 1)])
    that("answers", answers(search)).gives([([2], -2.0, "stop")])
    # In all −3, −5, −5.5, −6: the two that end are third and fourth, and nothing comes of them.
    outcome = call(search.advance, [[(1, -2.0), (2, -5.0)], [(0, -1.0), (2, -1.5)]])
    that("step 2", steps(outcome)).gives([(0, 1), (1, 0)])
    that("answers", answers(search)).gives([([2], -2.0, "stop")])
    # The third token is the last: the two likeliest hypotheses have −4 / 3 and −6.5 / 3, which is worse than −2.
    outcome = call(search.advance, [[(0, -1.0), (1, -9.0)], [(1, -1.5), (0, -9.0)]])
    that("step 3", steps(outcome)).gives([])
    that("whether it is over", search.is_over).gives(True)
    that("beams", beams(search)).gives([])
    that("the answers' tokens", [each[0] for each in answers(search)]).gives([[0, 1, 0], [2]])
    that("why they ended", [each[2] for each in answers(search)]).gives(["length", "stop"])
    that("the best score", search.answers[0].score).is_close(-4 / 3)


def test_an_end_below_rank_k_is_dropped():
    """Three hypotheses end, but only the one among the first two is an answer; the beams are the best of the others."""
    search = a_search(2, [8, 9])
    outcome = call(search.advance, [[(1, -1.0), (8, -1.5), (9, -2.0), (2, -2.5), (3, -3.0), (4, -4.0)]])
    that("answers", answers(search)).gives([([8], -1.5, "stop")])
    that("what advance returned, (parent, token)", steps(outcome)).gives([(0, 1), (0, 2)])
    that("beams", beams(search)).gives([([1], -1.0), ([2], -2.5)])


def test_three_stop_tokens_leave_two_beams():
    """Three of the four likeliest hypotheses end. The fifth is the second beam: `num_candidates` are ranked, here 8."""
    search = a_search(2, [7, 8, 9])
    ends, others = [(7, -1.0), (8, -2.0), (9, -2.5)], [(1, -1.5), (2, -3.0), (3, -4.0), (4, -5.0), (5, -6.0)]
    ranked = sorted(ends + others, key=lambda each: -each[1])
    that("what advance returned, (parent, token)", steps(call(search.advance, [ranked]))).gives([(0, 1), (0, 2)])
    that("beams", beams(search)).gives([([1], -1.5), ([2], -3.0)])
    that("answers", answers(search)).gives([([7], -1.0, "stop")])


def test_a_stop_token_at_max_tokens_is_a_stop():
    """The answer has max_tokens, and its last is a stop token: "stop", as for any request."""
    search = a_search(2, [9], max_tokens=1)
    that("steps", steps(call(search.advance, [[(9, -1.0), (3, -2.0), (4, -3.0), (5, -4.0)]]))).gives([])
    that("answers", answers(search)).gives([([9], -1.0, "stop"), ([3], -2.0, "length")])


def test_the_search_is_over_when_all_hypotheses_end():
    """Every token of a small vocabulary is a stop token: no beam is left, and the search is over."""
    search = a_search(3, [0, 1])
    that("steps", steps(call(search.advance, [[(0, -0.5), (1, -1.0)]]))).gives([])
    that("whether it is over", search.is_over).gives(True)
    that("answers", answers(search)).gives([([0], -0.5, "stop"), ([1], -1.0, "stop")])


# When it is over


def test_the_search_is_over_when_no_beam_is_better():
    """Two answers, and the best beam is not better than the worse of them: over, long before max_tokens."""
    search = a_search(2, [2, 3], length_penalty=0.0)
    outcome = call(search.advance, [[(2, -1.0), (3, -1.5), (0, -1.75), (1, -2.0), (4, -3.0), (5, -4.0)]])
    that("what advance returned, (parent, token)", steps(outcome)).gives([])
    that("whether it is over", search.is_over).gives(True)
    that("answers", [each[0] for each in answers(search)]).gives([[2], [3]])


def test_just_as_good_is_not_better():
    """The best beam has exactly the score of the worse answer: over."""
    search = a_search(2, [2], length_penalty=0.0)
    search.advance([[(0, -1.0), (2, -3.0), (1, -3.5), (4, -9.0)]])
    outcome = call(search.advance, [[(2, -0.5), (0, -2.0), (1, -6.0), (4, -7.0)], [(0, -8.0), (1, -8.5)]])
    that("scores of the answers", [each[1] for each in answers(search)]).gives([-1.5, -3.0])
    that("what advance returned, (parent, token)", steps(outcome)).gives([])
    that("whether it is over", search.is_over).gives(True)


def two_answers_and_a_beam():
    """A search after two steps, and what the second returned: answers of −1 and −2.125, and a beam of −1.75 / 2."""
    search = a_search(2, [9], length_penalty=1.0)
    search.advance([[(9, -1.0), (1, -1.25), (2, -4.0), (3, -5.0)]])
    # −1.75, −4.25 (ends, second: −2.125), −7, −7.25, …: two answers; the best beam has −1.75 / 2, better than −2.125.
    return search, call(
        search.advance, [[(1, -0.5), (9, -5.75), (2, -6.0), (3, -7.0)], [(9, -0.25), (2, -6.0), (3, -7.0), (4, -8.0)]]
    )


def test_the_search_goes_on_while_a_beam_is_better():
    """There are k answers, but a beam is better than the worse of them: the search continues."""
    search, outcome = two_answers_and_a_beam()
    that("answers", answers(search)).gives([([9], -1.0, "stop"), ([2, 9], -2.125, "stop")])
    that("what advance returned, (parent, token)", steps(outcome)).gives([(0, 1), (0, 2)])
    that("whether it is over", search.is_over).gives(False)


def test_a_beam_is_judged_at_the_length_that_it_has():
    """Three tokens, sum −3.5: a score of −1.17, and the answers have −0.75 and −1. Over, whatever length it may reach.

    With four tokens the same sum would be −0.875, and with max_tokens, here 50, −0.07. Both are greater than −1.
    """
    search, _ = two_answers_and_a_beam()
    outcome = call(
        search.advance, [[(9, -0.5), (1, -1.75), (2, -6.0), (3, -7.0)], [(1, -5.0), (2, -6.0), (3, -7.0), (4, -8.0)]]
    )
    that("answers", answers(search)).gives([([1, 1, 9], -0.75, "stop"), ([9], -1.0, "stop")])
    that("whether it is over", search.is_over).gives(True)
    that("steps and beams", (steps(outcome), beams(search))).gives(([], []))


def test_giving_up_keeps_the_beams_as_answers():
    """When memory runs out the beams become answers: `give_up` is given, and keeps them by your score."""
    search = a_search(2)
    search.advance([[(5, -1.0), (6, -2.0), (7, -3.0), (8, -9.0)]])
    search.advance([[(1, -0.5), (2, -7.0), (3, -8.0), (4, -9.0)], [(1, -1.0), (2, -7.0), (3, -8.0), (4, -9.0)]])
    call(search.give_up).gives(None)
    that("answers", answers(search)).gives([([5, 1], -0.75, "capacity"), ([6, 1], -1.5, "capacity")])


# Against other computations of the same


def a_language(seed, vocab_size):
    """Random log-probabilities of the next token, after any tokens; the same each time."""

    def log_probs(token_ids):
        rng = random.Random(f"{seed} {token_ids}")
        weights = [rng.gauss(0, 2) for _ in range(vocab_size)]
        total = math.log(sum(map(math.exp, weights)))
        return [weight - total for weight in weights]

    return log_probs


def run(search, log_probs):
    """Search to the end, with num_candidates candidates for each beam."""
    __tracebackhide__ = True
    for _ in range(200):
        if search.is_over:
            return
        candidates = []
        for beam in search.beams:
            ranked = sorted(enumerate(log_probs(list(beam.token_ids))), key=lambda each: -each[1])
            candidates.append(ranked[: search.num_candidates])
        before = beams(search)
        found = steps(call(search.advance, candidates))
        grown = [[*before[parent][0], token_id] for parent, token_id in found]
        that("the beams are what the steps say", [each[0] for each in beams(search)]).gives(grown)
    that("whether it is over after 200 steps", search.is_over).gives(True)


def all_texts(log_probs, vocab_size, length):
    """(log-probability, tokens) of every text of that length, the likeliest first."""
    texts = itertools.product(range(vocab_size), repeat=length)
    totals = [(sum(log_probs(list(text[:end]))[token] for end, token in enumerate(text)), list(text)) for text in texts]
    return sorted(totals, reverse=True)


@pytest.mark.parametrize(("vocab_size", "length"), [(2, 3), (3, 3), (4, 2)])
def test_wide_enough_to_miss_nothing(vocab_size, length):
    """With as many beams as there are texts, the answers are all texts, the likeliest first."""
    for seed in range(4):
        log_probs = a_language(fresh(seed), vocab_size)
        search = a_search(vocab_size**length, max_tokens=length)
        run(search, log_probs)
        wanted = all_texts(log_probs, vocab_size, length)
        that("answers", [beam.token_ids for beam in search.answers]).gives([tokens for _, tokens in wanted])
        that("scores", [beam.score for beam in search.answers]).is_close([total / length for total, _ in wanted])


@pytest.mark.parametrize("seed", range(5))
def test_one_beam_is_greedy(seed):
    """One beam takes the likeliest token each time, to its end."""
    log_probs, wanted = a_language(fresh(seed), 12), []
    while 0 not in wanted and len(wanted) < 9:
        ranked = log_probs(wanted)
        wanted.append(ranked.index(max(ranked)))
    search = a_search(1, [0], max_tokens=9)
    run(search, log_probs)
    that("the answer's tokens", search.answers[0].token_ids).gives(wanted)


def naive(log_probs, k, stops, max_tokens, penalty):
    """The same rules, with texts for beams and all of their continuations: (score, tokens), the best first."""
    texts, ended = [(0.0, [])], []
    for length in range(1, max_tokens + 1):
        hypotheses = [
            (total + each, [*text, token]) for total, text in texts for token, each in enumerate(log_probs(text))
        ]
        hypotheses = sorted(hypotheses, key=lambda each: each[0], reverse=True)[: max(2, len(stops) + 1) * k]
        ends = [each for each in hypotheses[:k] if each[1][-1] in stops or length == max_tokens]
        ended += [(total / length**penalty, text) for total, text in ends]
        ended = sorted(ended, key=lambda each: each[0], reverse=True)[:k]
        texts = [each for each in hypotheses if each[1][-1] not in stops][:k]
        if not texts or (len(ended) == k and ended[-1][0] >= texts[0][0] / length**penalty):
            break
    return ended


@pytest.mark.parametrize("stops", [(), (3,), (3, 7), tuple(range(8))], ids=len)
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize(("beam_width", "max_tokens"), [(1, 6), (2, 1), (3, 7), (5, 12)])
def test_the_rules_written_differently(beam_width, max_tokens, penalty, stops):
    """A vocabulary of 20; widths, lengths, penalties and numbers of stop tokens."""
    for seed in range(6):
        log_probs = a_language(fresh(seed), 20)
        search = a_search(beam_width, stops, max_tokens, penalty)
        run(search, log_probs)
        wanted = naive(log_probs, beam_width, stops, max_tokens, penalty)
        that(f"answers in language {seed}", [beam.token_ids for beam in search.answers]).gives(
            [each[1] for each in wanted]
        )
        that("scores", [beam.score for beam in search.answers]).is_close([each[0] for each in wanted])


TRANSFORMERS = [
    (
        (0, 3, (), 6, 1.0),
        [
            ([1, 15, 2, 19, 16, 16], -0.6928),
            ([1, 15, 2, 19, 5, 14], -0.7942),
            ([1, 15, 2, 19, 16, 15], -0.9134),
        ],
    ),
    (
        (1, 3, (3,), 9, 1.0),
        [
            ([4, 11, 10, 10, 18, 16, 15, 15, 0], -0.6899),
            ([4, 11, 10, 15, 1, 17, 6, 13, 12], -0.7644),
            ([12, 10, 14, 2, 19, 10, 6, 12, 7], -0.8102),
        ],
    ),
    ((2, 2, (3, 7), 9, 0.0), [([19, 12, 17, 3], -4.053), ([15, 15, 12, 2, 15, 1, 19, 1, 17], -7.6305)]),
    (
        (3, 4, (3, 7), 7, 2.0),
        [
            ([13, 17, 4, 6, 19, 13, 4], -0.1452),
            ([11, 1, 12, 17, 6, 1, 1], -0.1521),
            ([11, 1, 15, 19, 11, 5, 2], -0.1527),
            ([11, 1, 12, 17, 6, 1, 4], -0.1648),
        ],
    ),
    (
        (4, 5, tuple(range(8)), 8, 0.6),
        [([6], -1.4453), ([17, 9, 17, 4], -1.6519), ([17, 7], -1.8431), ([17, 9, 2], -2.0763), ([17, 13, 6], -2.0814)],
    ),
    ((5, 2, (3,), 1, 1.0), [([6], -1.1509), ([8], -1.6778)]),
]
"""(language, beams, stop tokens, max_tokens, penalty), and what `generate` of transformers 5 found: (tokens, score)."""


@pytest.mark.parametrize(("options", "found"), TRANSFORMERS)
def test_what_transformers_found(options, found):
    """The answers of `transformers`' `generate(num_beams=k, early_stopping=False)`, in the same languages."""
    seed, beam_width, stops, max_tokens, penalty = options
    search = a_search(beam_width, stops, max_tokens, penalty)
    run(search, a_language(seed, 20))
    that("answers", [beam.token_ids for beam in search.answers]).gives([tokens for tokens, _ in found])
    that("scores", [beam.score for beam in search.answers]).is_close([score for _, score in found], atol=1e-4)


# On the engine


@pytest.fixture(scope="module")
def model():
    """A small MiniGPT with random weights, in float64; its logits are spread, so none tie."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(fresh(3))
    config = MiniGPTConfig(
        vocab_size=40,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=24,
        max_seq_len=64,
    )
    model = MiniGPT(config).double().eval()
    with torch.no_grad():
        model.embed_tokens.weight.mul_(0.05)
        model.norm.weight.mul_(30)
        for layer in model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj):
                part.weight.mul_(6)
    yield model
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cls", "num_blocks"),
    [(PagedScheduler, 100), (SharingScheduler, 100), (SharingScheduler, 12)],
    ids=["without forks", "forks", "forks, short of memory"],
)
def test_with_a_model(model, cls, num_blocks):
    """The engine finds the same answers as the rules on a model that computes every text from its start."""
    prompts = [[1], [5, 6, 7, 8], [9, 9, 3, 3, 1, 2, 4]]
    llm = LLM(model, scheduler=cls(num_blocks=num_blocks, block_size=4))
    found = call(beam_search, llm, prompts, BeamSearchParams(3, 8, 1.0, (7, 11))).value
    for prompt, answer in zip(prompts, found, strict=True):

        def log_probs(text, prompt=prompt):
            with torch.no_grad():
                return torch.log_softmax(model(torch.tensor([prompt + text]))[0, -1].float(), -1).tolist()

        wanted = naive(log_probs, 3, (7, 11), 8, 1.0)
        that(f"answers to {prompt}", [beam.token_ids for beam in answer]).gives([each[1] for each in wanted])
        that("scores", [beam.score for beam in answer]).is_close([each[0] for each in wanted], atol=1e-4)
    that("used blocks", llm.scheduler.pool.num_used).gives(0)
