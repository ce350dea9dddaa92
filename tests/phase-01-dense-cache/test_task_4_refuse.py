"""Phase 1, task 4: refuse, and change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minicache.cache.dense import KVCache
from minicache.errors import CacheOverflowError
from minicache_course.checks import call, that

LAYERS, BATCH, HEADS, MAX_SEQ_LEN, HEAD_DIM = 3, 2, 2, 6, 4
STATES = {"empty": 0, "three tokens": 3, "three tokens, layer 0 of the next two": 3}
"""A state in words → the tokens that every layer holds in it, as counted by `num_tokens`."""
MID_PASS = "three tokens, layer 0 of the next two"


def rows(num_new=2, *, batch=BATCH, heads=HEADS, head_dim=HEAD_DIM):
    return torch.randn(batch, heads, num_new, head_dim)


def cache_in(state):
    """A cache of 3 layers and 6 slots, what each layer should read, and the next layer."""
    cache = KVCache(LAYERS, BATCH, HEADS, MAX_SEQ_LEN, HEAD_DIM)
    held = [(rows(0), rows(0)) for _ in range(LAYERS)]
    if state != "empty":
        for layer in range(LAYERS):
            put(cache, held, layer, rows(3), rows(3))
    if state == MID_PASS:
        put(cache, held, 0, rows(2), rows(2))
        return cache, held, 1
    return cache, held, 0


def put(cache, held, layer, k, v):
    """A good append; `held` follows."""
    call(cache.append, layer, k, v).gives(None)
    held[layer] = tuple(torch.cat(pair, dim=2) for pair in zip(held[layer], (k, v), strict=True))


def check_holds(cache, held, num_tokens, when):
    """Each layer reads as in `held`, and the cursor is at `num_tokens`."""
    for layer in range(LAYERS):
        that(f"read({layer}) {when}", cache.read(layer)).gives(held[layer])
    that(f"num_tokens {when}", cache.num_tokens).gives(num_tokens)
    that(f"positions(1) {when}", cache.positions(1)).gives(torch.tensor([num_tokens]))
    that(f"nbytes_used {when}", cache.nbytes_used).gives(2 * LAYERS * BATCH * HEADS * HEAD_DIM * 4 * num_tokens)


def check_refused(state, error, make_call):
    """`make_call(turn)` gives layer, k and v of a bad append in `state`, where layer `turn` is next."""
    cache, held, turn = cache_in(state)
    layer, k, v = make_call(turn)
    call(cache.append, layer, k, v).raises(error)
    check_holds(cache, held, STATES[state], f"after the refused call (before it: {state})")
    for layer in range(turn, LAYERS):  # the forward pass can still be started, or completed
        put(cache, held, layer, rows(2), rows(2))
    when = f"after the forward pass of 2 tokens that follows the refused call (before it: {state})"
    check_holds(cache, held, STATES[state] + 2, when)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        pytest.param(rows(batch=1), ValueError, id="batch of 1, which would broadcast"),
        pytest.param(rows(batch=3), ValueError, id="larger batch"),
        pytest.param(rows(heads=1), ValueError, id="one head, which would broadcast"),
        pytest.param(rows(heads=4), ValueError, id="query heads instead of KV heads"),
        pytest.param(rows(head_dim=1), ValueError, id="head_dim 1, which would broadcast"),
        pytest.param(rows(head_dim=5), ValueError, id="larger head_dim"),
        pytest.param(rows()[0], ValueError, id="three dimensions"),
        pytest.param(rows()[None], ValueError, id="five dimensions"),
        pytest.param(rows(1), ValueError, id="T unlike the other's"),
        pytest.param(rows().double(), TypeError, id="float64"),
        pytest.param(rows().half(), TypeError, id="float16"),
        pytest.param(rows().long(), TypeError, id="int64"),
        pytest.param(rows().to("meta"), ValueError, id="another device"),
        pytest.param(rows().tolist(), TypeError, id="a list"),
        pytest.param(rows().numpy().astype(np.float32), TypeError, id="a numpy array"),
        pytest.param(None, TypeError, id="None"),
    ],
)
def test_rows_that_do_not_fit_are_refused(state, bad, error, which):
    """k or v of another shape or device: ValueError; another dtype, or not a tensor: TypeError. Nothing is written."""
    check_refused(state, error, lambda turn: (turn, bad, rows()) if which == "k" else (turn, rows(), bad))


@pytest.mark.parametrize("state", STATES)
def test_a_pass_without_tokens_is_refused(state):
    """T = 0 is a ValueError: a forward pass without tokens is the caller's mistake."""
    check_refused(state, ValueError, lambda turn: (turn, rows(0), rows(0)))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("layer", [-1, -3, LAYERS, 100], ids=lambda what: f"layer {what}")
def test_layers_that_do_not_exist_are_refused(state, layer):
    """A layer below 0 or past the last raises IndexError: −1 is not the last layer."""
    check_refused(state, IndexError, lambda turn: (layer, rows(), rows()))
    cache, _, _ = cache_in(state)
    call(cache.read, layer).raises(IndexError)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("off_by", [1, 2], ids=lambda what: f"{what} too far")
def test_layers_out_of_turn_are_refused(state, off_by):
    """A skipped layer, or a layer that has already appended in this forward pass, raises ValueError."""
    check_refused(state, ValueError, lambda turn: ((turn + off_by) % LAYERS, rows(), rows()))


def test_another_number_of_tokens_than_the_layers_before_is_refused():
    """All layers of a forward pass get the same T: 2 in layer 0, then 1 or 3 in layer 1, is a ValueError."""
    for bad in (rows(1), rows(3)):
        check_refused(MID_PASS, ValueError, lambda turn, bad=bad: (turn, bad, bad))


def test_a_layer_already_served_keeps_its_rows_even_if_only_v_is_bad():
    """Layer 0 again, with good k and bad v: nothing of k may be written before v is checked."""
    for bad in (rows(1), rows(heads=1), rows().double()):
        check_refused(MID_PASS, (ValueError, TypeError), lambda turn, bad=bad: (0, rows(), bad))


@pytest.mark.parametrize(
    ("held_tokens", "num_new"),
    [
        pytest.param(held, new, id=f"{held} of 6 held, {new} new")
        for held, new in ((0, 7), (3, 4), (5, 2), (6, 1), (6, 6))
    ],
)
def test_overflow_writes_nothing(held_tokens, num_new):
    """One token past max_seq_len raises CacheOverflowError; the stored tokens stay, and fewer tokens still fit."""
    cache = KVCache(LAYERS, BATCH, HEADS, MAX_SEQ_LEN, HEAD_DIM)
    held = [(rows(0), rows(0)) for _ in range(LAYERS)]
    if held_tokens:
        for layer in range(LAYERS):
            put(cache, held, layer, rows(held_tokens), rows(held_tokens))
    call(cache.append, 0, rows(num_new), rows(num_new)).raises(CacheOverflowError)
    check_holds(cache, held, held_tokens, f"after the refused call (before it: {held_tokens} tokens)")
    if held_tokens < MAX_SEQ_LEN:
        fits = MAX_SEQ_LEN - held_tokens
        for layer in range(LAYERS):
            put(cache, held, layer, rows(fits), rows(fits))
        check_holds(cache, held, MAX_SEQ_LEN, f"when {fits} more tokens have filled the cache")


def test_a_refusal_is_no_pass():
    """Many refused calls in a row leave the cache unchanged."""
    cache, held, _ = cache_in("three tokens")
    for _ in range(10):
        call(cache.append, 0, rows(4), rows(4)).raises(CacheOverflowError)
        call(cache.append, 1, rows(), rows()).raises(ValueError)
        call(cache.append, 0, rows(), None).raises(TypeError)
    check_holds(cache, held, 3, "after 30 refused calls")
