"""Phase 5, task 5: one forward pass over many sequences, each with a separate dense cache."""

from __future__ import annotations

import math

import pytest
import torch

from minicache.cache.dense import KVCache
from minicache.cache.selective import SelectiveStep
from minicache.errors import CacheOverflowError
from minicache.model import MiniGPT, MiniGPTConfig
from minicache_course.checks import call, that
from minicache_course.seeds import fresh

LAYERS, HEADS, HEAD_DIM = 2, 2, 4


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(fresh(0))
    yield
    torch.set_num_threads(before)


def a_cache(num_rows=20, **options):
    return KVCache(LAYERS, 1, HEADS, num_rows, HEAD_DIM, **options)


def rows(num_new, **options):
    return torch.randn(1, HEADS, num_new, HEAD_DIM, **options)


def filled(lengths):
    """Caches that hold `lengths` tokens, and their keys `[1, H_kv, S, d]`; in layer n keys + n, values −keys − n."""
    caches, held = [], []
    for length in lengths:
        cache, k = a_cache(), rows(length)
        for layer in range(LAYERS if length else 0):
            cache.append(layer, k + layer, -k - layer)
        caches.append(cache)
        held.append(k)
    return caches, held


def by_hand(q, k, v, window=1000):
    """Causal attention of the last T of S tokens, score by score; query heads share key heads in groups."""
    group, (num_new, num_all) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        for t in range(num_new):
            end = num_all - num_new + t + 1
            seen = slice(max(0, end - window), end)
            scores = k[0, head // group, seen] @ q[0, head, t] / math.sqrt(q.shape[3])
            out[0, head, t] = scores.softmax(dim=0) @ v[0, head // group, seen]
    return out


def test_each_token_stands_in_its_own_sequence():
    """4 tokens and 3 new, 9 tokens and 1 new, none and 2 new: positions 4, 5, 6, 9, 0, 1."""
    caches, _ = filled([4, 9, 0])
    step = call(SelectiveStep, caches, [3, 1, 2]).value
    call(step.positions, 6).gives(torch.tensor([4, 5, 6, 9, 0, 1]))
    for count in (0, 1, 5, 7):
        call(step.positions, count).raises(ValueError)


def test_positions_are_those_before_the_pass():
    """4 tokens and 3 new, none and 2 new: positions 4, 5, 6, 0, 1, during the forward pass and after it too."""
    caches, _ = filled([4, 0])
    step, k = SelectiveStep(caches, [3, 2]), rows(5)
    for layer in range(LAYERS):
        call(step.append, layer, k, k).gives(None)
        call(step.positions, 5).gives(torch.tensor([4, 5, 6, 0, 1]))


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [([0], [1]), ([0, 0], [5, 1]), ([4, 0, 9], [1, 7, 1]), ([3, 3, 1, 6], [1, 1, 1, 1]), ([2, 5], [3, 4])],
    ids=str,
)
def test_rows_go_to_their_own_caches(lengths, counts):
    """After a forward pass each cache holds its old tokens, then its new ones, in every layer."""
    caches, held = filled(lengths)
    step, k = call(SelectiveStep, caches, counts).value, rows(sum(counts))
    for layer in range(LAYERS):
        call(step.append, layer, k + layer, -k - layer).gives(None)
    for i, (cache, before, new) in enumerate(zip(caches, held, k.split(counts, dim=2), strict=True)):
        expected = torch.cat([before, new], dim=2)
        that(f"num_tokens of cache {i}", cache.num_tokens).gives(lengths[i] + counts[i])
        for layer in range(LAYERS):
            got_k, got_v = cache.read(layer)
            that(f"keys of cache {i} in layer {layer}", got_k).gives(expected + layer)
            that(f"values of cache {i} in layer {layer}", got_v).gives(-expected - layer)


@pytest.mark.parametrize("group", [1, 3], ids=lambda what: f"{what} query heads a key head")
@pytest.mark.parametrize(("lengths", "counts"), [([4, 0, 9], [1, 5, 1]), ([3, 8], [1, 1]), ([6], [4])], ids=str)
def test_each_token_attends_to_its_own_sequence(group, lengths, counts):
    """Prompts and single tokens: the result is each sequence's causal attention, in the order of the rows."""
    caches, held = filled(lengths)
    step, k, q = SelectiveStep(caches, counts), rows(sum(counts)), torch.randn(1, HEADS * group, sum(counts), HEAD_DIM)
    for layer in range(LAYERS):
        call(step.append, layer, k + layer, -k - layer).gives(None)
        expected = []
        for before, new, its_q in zip(held, k.split(counts, dim=2), q.split(counts, dim=2), strict=True):
            all_k = torch.cat([before, new], dim=2) + layer
            expected.append(by_hand(its_q, all_k, -all_k))
        call(step.attend, layer, q).is_close(torch.cat(expected, dim=2))


@pytest.mark.parametrize("window", [1, 3, 6, 100])
def test_each_token_attends_through_the_layers_window(window):
    """Each token sees the last `window` tokens of its sequence, whatever the others' lengths."""
    caches, held = filled([4, 0, 9])
    step, k, q = SelectiveStep(caches, [1, 5, 2]), rows(8), torch.randn(1, HEADS, 8, HEAD_DIM)
    call(step.append, 0, k, -k).gives(None)
    expected = []
    for before, new, its_q in zip(held, k.split([1, 5, 2], dim=2), q.split([1, 5, 2], dim=2), strict=True):
        all_k = torch.cat([before, new], dim=2)
        expected.append(by_hand(its_q, all_k, -all_k, window))
    call(step.attend, 0, q, window=window).is_close(torch.cat(expected, dim=2))


# MiniGPT, through a step


def minigpt():
    """Random weights. With small embeddings and strong attention, the next token depends on all previous ones."""
    config = MiniGPTConfig(
        vocab_size=50,
        hidden_size=16,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=24,
        max_seq_len=64,
    )
    model = MiniGPT(config).double().eval()
    with torch.no_grad():
        model.embed_tokens.weight.mul_(0.05)
        for layer in model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj):
                part.weight.mul_(6)
    return model


def alone(model, prompt, num_new):
    """Greedy decoding of one sequence without a cache: its `num_new` tokens."""
    tokens = list(prompt)
    for _ in range(num_new):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_minigpt_serves_sequences_that_come_and_go():
    """Prompts and decodes, sequences that finish and others that arrive later: each gets its tokens."""
    model = minigpt()
    arrivals, running, finished = {0: [7, 2], 1: [1, 4], 3: [12], 6: [5]}, [], []
    for now in range(16):
        for length in arrivals.get(now, []):
            prompt = torch.randint(50, (length,)).tolist()
            running.append(
                {"prompt": prompt, "next": prompt, "out": [], "cache": a_cache(length + 5, dtype=torch.float64)}
            )
        if not running:
            break
        step = call(SelectiveStep, [each["cache"] for each in running], [len(each["next"]) for each in running]).value
        with torch.inference_mode():
            logits = call(model, torch.tensor([[token for each in running for token in each["next"]]]), step).value
        ends = torch.tensor([len(each["next"]) for each in running]).cumsum(0) - 1
        for each, row in zip(running, logits[0, ends], strict=True):
            each["out"].append(int(row.argmax()))
            each["next"] = each["out"][-1:]
        finished += [each for each in running if len(each["out"]) == 6]
        running = [each for each in running if len(each["out"]) < 6]
    that("sequences that were finished", len(finished)).gives(6)
    for each in finished:
        that(f"tokens of the prompt of {len(each['prompt'])}", each["out"]).gives(alone(model, each["prompt"], 6))


def test_linear_layers_see_all_rows_at_once():
    """Three sequences with 4, 1 and 2 new tokens: each linear layer is called once, with 7 rows and no padding."""
    model, seen = minigpt(), []
    for layer in model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda _, inputs, __: seen.append(list(inputs[0].shape)))
    step = SelectiveStep([a_cache(dtype=torch.float64) for _ in range(3)], [4, 1, 2])
    with torch.inference_mode():
        call(model, torch.randint(50, (1, 7)), step).value  # noqa: B018  (.value fails the test if the call raised)
    that("inputs of q_proj, layer after layer", seen).gives([[1, 7, 16]] * LAYERS)


# Refusals


def test_no_room_is_found_before_anything_is_written():
    """If one cache has no space for its tokens: CacheOverflowError when the step is made, and no cache has changed."""
    caches = [a_cache(8), a_cache(3), a_cache(8)]
    call(SelectiveStep, caches, [2, 4, 2]).raises(CacheOverflowError)
    that("tokens of the caches", [cache.num_tokens for cache in caches]).gives([0, 0, 0])
    call(SelectiveStep, caches, [2, 3, 2]).value.positions(7)


@pytest.mark.parametrize("how", ["none", "too few counts", "twice", "count 0", "batch of 2", "other heads"])
def test_steps_that_cannot_be_made_are_refused(how):
    """No cache, a missing count, a cache given twice, a count of 0, caches that do not match: ValueError."""
    one, two = a_cache(), a_cache()
    wide, other = KVCache(LAYERS, 2, HEADS, 9, HEAD_DIM), KVCache(LAYERS, 1, 1, 9, HEAD_DIM)
    caches, counts = {
        "none": ([], []),
        "too few counts": ([one, two], [1]),
        "twice": ([one, one], [1, 1]),
        "count 0": ([one, two], [1, 0]),
        "batch of 2": ([wide], [1]),
        "other heads": ([one, other], [1, 1]),
    }[how]
    call(SelectiveStep, caches, counts).raises(ValueError)


@pytest.mark.parametrize(
    ("layer", "bad", "error"),
    [
        pytest.param(0, rows(3), ValueError, id="3 tokens instead of 4"),
        pytest.param(0, rows(5), ValueError, id="5 tokens instead of 4"),
        pytest.param(0, rows(4).expand(2, -1, -1, -1), ValueError, id="a batch of 2"),
        pytest.param(0, rows(4)[:, :1], ValueError, id="1 head"),
        pytest.param(0, rows(4).double(), TypeError, id="float64"),
        pytest.param(0, None, TypeError, id="None"),
        pytest.param(1, rows(4), ValueError, id="layer 1 first"),
        pytest.param(2, rows(4), IndexError, id="no such layer"),
        pytest.param(-1, rows(4), IndexError, id="layer −1"),
    ],
)
def test_rows_that_do_not_fit_are_refused(layer, bad, error):
    """Anything but the step's N rows for the next layer is refused, and no cache is written."""
    caches = [a_cache(), a_cache()]
    step, good = SelectiveStep(caches, [3, 1]), rows(4)
    call(step.append, layer, bad, bad).raises(error)
    that("keys in layer 0 after the refusal", [cache.read(0)[0].shape[2] for cache in caches]).gives([0, 0])
    call(step.append, 0, good, good).gives(None)
    that("keys in layer 0 after good rows", caches[0].read(0)[0]).gives(good[:, :, :3])


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize(
    ("bad", "error"),
    [(rows(3), ValueError), (rows(4)[:, :1], ValueError), (rows(4).double(), TypeError), (None, TypeError)],
    ids=["3 tokens instead of 4", "1 head", "float64", "None"],
)
def test_keys_and_values_are_checked_each_on_its_own(which, bad, error):
    """The keys fit and the values do not, or vice versa: refused, and no cache is written."""
    caches = [a_cache(), a_cache()]
    step, good = SelectiveStep(caches, [3, 1]), rows(4)
    call(step.append, 0, bad if which == "k" else good, bad if which == "v" else good).raises(error)
    that("keys in layer 0 after the refusal", [cache.read(0)[0].shape[2] for cache in caches]).gives([0, 0])


def test_a_layer_without_rows_cannot_attend():
    """Attending before the layer has its rows of this step is a ValueError, also if the caches hold older tokens."""
    caches, _ = filled([3, 5])
    step, k, q = SelectiveStep(caches, [1, 1]), rows(2), torch.randn(1, HEADS, 2, HEAD_DIM)
    call(step.attend, 0, q).raises(ValueError)
    call(step.append, 0, k, k).gives(None)
    call(step.attend, 1, q).raises(ValueError)


def test_queries_that_do_not_fit_are_refused():
    """Attending with 1 or 3 queries in a step of 2 tokens, or without all four dimensions, is a ValueError."""
    caches, _ = filled([3, 5])
    step, k = SelectiveStep(caches, [1, 1]), rows(2)
    call(step.append, 0, k, k).gives(None)
    for shape in ((1, HEADS, 1, HEAD_DIM), (1, HEADS, 3, HEAD_DIM), (HEADS, 2, HEAD_DIM), (2, HEAD_DIM)):
        call(step.attend, 0, torch.randn(shape)).raises(ValueError)


@pytest.mark.parametrize("layer", [LAYERS, -1], ids=lambda what: f"layer {what}")
def test_no_such_layer_to_attend_in(layer):
    """Attending in a layer that does not exist, or a negative one: IndexError, before, during and after a pass."""
    step, k = SelectiveStep([a_cache(), a_cache()], [1, 1]), rows(2)
    call(step.attend, layer, k).raises(IndexError)
    for each in range(LAYERS):
        call(step.append, each, k, k).gives(None)
        call(step.attend, layer, k).raises(IndexError)


def test_a_step_serves_one_pass():
    """When every layer has its rows, another append is a ValueError; attending still works."""
    caches = [a_cache(), a_cache()]
    step, k = SelectiveStep(caches, [2, 1]), rows(3)
    for layer in range(LAYERS):
        call(step.append, layer, k, k).gives(None)
    call(step.append, 0, k, k).raises(ValueError)
    that("tokens of the caches", [cache.num_tokens for cache in caches]).gives([2, 1])
    that("the shape of attend(0, q)", list(call(step.attend, 0, k).value.shape)).gives([1, HEADS, 3, HEAD_DIM])
