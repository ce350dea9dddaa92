"""Phase 11, task 6: the cost of computing a prompt elsewhere and moving its KV cache, and when that pays."""

from __future__ import annotations

from random import Random

import pytest

from minicache.arithmetic.specs import DEEPSEEK_V3, LLAMA_3_8B, Transformer
from minicache.fleet.disaggregation import MovingCosts, Place
from minicache_course import scenario
from minicache_course.checks import call
from minicache_course.seeds import fresh, one_of

TINY = Transformer(4, 64, 4, 2, 16, num_parameters=10_000)
"""4 layers, 2 KV heads of 16 numbers: 2 · 4 · 2 · 16 · 2 = 512 bytes a token in float16."""


@pytest.fixture
def costs():
    """`costs(bandwidth=512)`: 1 s a token to compute, and with 512 bytes/s 1 s a token on the link."""

    def create(bandwidth=512.0, *, seconds=1.0, model=TINY, **more):
        return MovingCosts(model, seconds, bandwidth, **more)

    return create


def place(name, wait=0.0, cached=0, decoding=0, link=0.0):
    return Place(name, wait, cached, decoding, link)


# What each costs


def test_a_prefill_costs_its_tokens(costs):
    """2 ms a token: 500 tokens take 1 s."""
    call(costs(seconds=0.002).prefill_seconds, 500).is_close(1.0)
    call(costs(seconds=0.002).prefill_seconds, 0).gives(0.0)


def test_the_link_carries_the_bytes_of_the_cache(costs):
    """512 bytes a token over 2048 bytes/s: a quarter of a second each."""
    call(costs(2048.0).link_seconds, 100).is_close(25.0)
    call(costs(2048.0).link_seconds, 0).gives(0.0)


def test_the_link_is_busy_without_the_latency(costs):
    """The latency passes while the link is free for others."""
    call(costs(2048.0, latency=3.0).link_seconds, 100).is_close(25.0)


def test_a_quantized_cache_has_fewer_bytes(costs):
    """int8: 256 bytes a token, half the time."""
    call(costs(2048.0, dtype="int8").link_seconds, 100).is_close(12.5)


def test_a_latent_cache_has_its_own_size(costs):
    """DeepSeek-V3 keeps 576 numbers a layer and token, whatever its heads: 61 · 576 · 2 = 70,272 bytes."""
    call(costs(70_272.0, model=DEEPSEEK_V3).link_seconds, 10).is_close(10.0)


def test_the_bandwidth_at_which_both_are_equal(costs):
    """Llama-3-8B, 131,072 bytes and 0.1 ms a token: 1.31 GB/s, whatever the prompt's length and the link."""
    for bandwidth in (1e8, 1e10):
        call(costs(bandwidth, seconds=1e-4, model=LLAMA_3_8B).break_even_bandwidth).is_close(1.31072e9)


# Layer by layer


def test_a_slow_link_is_waited_for(costs):
    """Computing takes 8 s, 2 a layer; sending 16 s, 4 a layer. The first layer is there to send after 2 s: 18 s."""
    call(costs(256.0).remote_seconds, 8, 8).is_close(18.0)


def test_a_fast_link_waits(costs):
    """Computing takes 8 s; sending 4 s, 1 a layer. When the last layer is computed, only it is left to send: 9 s."""
    call(costs(1024.0).remote_seconds, 8, 8).is_close(9.0)


def test_a_link_as_fast_as_the_replica(costs):
    """Computing and sending take 2 s a layer each: five times 2 s."""
    call(costs(512.0).remote_seconds, 8, 8).is_close(10.0)


def test_the_latency_counts_once(costs):
    """Not for every layer: the link sends the next layer while the last is on its way."""
    call(costs(256.0, latency=0.5).remote_seconds, 8, 8).is_close(18.5)
    call(costs(1024.0, latency=0.5).remote_seconds, 8, 8).is_close(9.5)


def test_what_is_cached_there_is_sent_and_not_computed(costs):
    """4 tokens computed, 1 s a layer; 16 sent, 4 s a layer: 17 s. And the other way round."""
    call(costs(512.0).remote_seconds, 4, 16).is_close(17.0)
    call(costs(512.0).remote_seconds, 16, 4).is_close(17.0)


def test_nothing_to_send_needs_no_link(costs):
    """All is here already: the time of the prefill, without a latency."""
    call(costs(512.0, latency=7.0).remote_seconds, 8, 0).gives(8.0)


def test_any_pipeline(costs):
    """Layers, speeds and sizes at random, against the layers one by one."""
    rng = Random(fresh(6))
    for _ in range(50):
        with scenario.telling():  # of these costs only
            model = Transformer(rng.randint(1, 40), 64, 4, 2, 16, num_parameters=10_000)
            made = costs(
                rng.uniform(1e3, 1e6), seconds=rng.uniform(0.001, 1), model=model, latency=rng.choice((0.0, 0.3))
            )
            computed, moved = rng.randint(1, 500), rng.randint(1, 500)
            nbytes = 2 * model.num_layers * 2 * 16 * 2 * moved
            done = sent = 0.0
            for _ in range(model.num_layers):
                done += computed * made.seconds_per_token / model.num_layers
                sent = max(done, sent) + nbytes / model.num_layers / made.bandwidth
            call(made.remote_seconds, computed, moved).is_close(sent + made.latency, rtol=1e-9)


# Here or there


def test_with_nobody_to_disturb_it_is_computed_here(costs):
    """Both are idle: elsewhere takes the link too."""
    call(costs(1e9).choose, 100, place("here"), [place("there")]).gives("here")


def test_who_decodes_here_waits_for_the_prompt(costs):
    """100 tokens: here 100 s, and 3 decoding requests wait: 400. There 100 s and a layer's 25 s on the link: 125."""
    call(costs(512.0).choose, 100, place("here", decoding=3), [place("there")]).gives("there")


def test_who_decodes_there_waits_too(costs):
    """The same, and 4 decode there."""
    call(costs(512.0).choose, 100, place("here", decoding=3), [place("there", decoding=4)]).gives("here")


def test_a_slow_link_does_not_pay(costs):
    """100 tokens, one request decodes here: 200. At 512 bytes/s there is 125, at 128 bytes/s it is 425."""
    here = place("here", decoding=1)
    call(costs(512.0).choose, 100, here, [place("there")]).gives("there")
    call(costs(128.0).choose, 100, here, [place("there")]).gives("here")


def test_a_short_prompt_does_not_pay_the_latency(costs):
    """A latency of 20 s: 100 tokens save 75 s and pay for it, 10 tokens save 7.5 s."""
    made = costs(512.0, latency=20.0)
    call(made.choose, 100, place("here", decoding=1), [place("there")]).gives("there")
    call(made.choose, 10, place("here", decoding=1), [place("there")]).gives("here")


def test_what_is_waited_for_counts_once(costs):
    """A wait of 80 s there: only the request itself waits for it, not those that decode."""
    here = place("here", decoding=2)
    call(costs(512.0).choose, 100, here, [place("there", wait=174.0)]).gives("there")
    call(costs(512.0).choose, 100, here, [place("there", wait=176.0)]).gives("here")
    call(costs(512.0).choose, 100, here, [place("there", wait=70.0, decoding=1)]).gives("there")


def test_a_wait_here_counts(costs):
    """No request decodes here, but this one would wait for 30 s; the link costs 25."""
    call(costs(512.0).choose, 100, place("here", wait=30.0), [place("there")]).gives("there")
    call(costs(512.0).choose, 100, place("here", wait=20.0), [place("there")]).gives("here")


def test_a_busy_link_is_waited_for(costs):
    """Here 400. The prompt is computed there while the link is busy; then it takes 100 s more."""
    here = place("here", decoding=3)
    call(costs(512.0).choose, 100, here, [place("there", link=299.0)]).gives("there")
    call(costs(512.0).choose, 100, here, [place("there", link=301.0)]).gives("here")


def test_the_queue_and_the_link_are_waited_for_at_once(costs):
    """Here 365. 200 s until it can begin, and 250 s of link with 100 after it: 350. Or 250 s until it begins: 375."""
    here = place("here", wait=65.0, decoding=2)
    call(costs(512.0).choose, 100, here, [place("there", wait=200.0, link=250.0)]).gives("there")
    call(costs(512.0).choose, 100, here, [place("there", wait=250.0, link=200.0)]).gives("here")


def test_a_link_that_is_free_in_time_costs_nothing(costs):
    """Free after 25 s, when the first of four layers is computed: 125, as if it had been free all the time."""
    call(costs(512.0).choose, 100, place("here", wait=26.0), [place("there", link=25.0)]).gives("there")
    call(costs(512.0).choose, 100, place("here", wait=26.0), [place("there", link=27.0)]).gives("here")


def test_the_latency_comes_after_the_links_queue(costs):
    """290 s of queue, 100 on the link, and a latency of 5: 395. Of 15: 405."""
    here, there = place("here", decoding=3), [place("there", link=290.0)]
    call(costs(512.0, latency=5.0).choose, 100, here, there).gives("there")
    call(costs(512.0, latency=15.0).choose, 100, here, there).gives("here")


def test_only_what_is_missing_here_takes_its_turn_on_the_link(costs):
    """60 of 100 tokens are here, so 40 s on the link. Here: 40 s and 9 that wait, 400. There: 355 s of queue and 40."""
    here = place("here", cached=60, decoding=9)
    call(costs(512.0).choose, 100, here, [place("there", link=355.0)]).gives("there")
    call(costs(512.0).choose, 100, here, [place("there", link=365.0)]).gives("here")


def test_only_the_request_waits_for_the_link(costs):
    """200 s of queue and 100 on the link, and one that decodes there waits for the 100 s of prefill: 400."""
    there = [place("there", decoding=1, link=200.0)]
    call(costs(512.0).choose, 100, place("here", wait=1.0, decoding=3), there).gives("there")


def test_here_needs_no_link(costs):
    """A busy link here does not delay a prompt that is computed here."""
    call(costs(512.0).choose, 100, place("here", link=900.0), [place("there")]).gives("here")


def test_what_is_cached_here_is_neither_computed_nor_moved(costs):
    """90 of 100 tokens are here. Here: 10 s and 9 that wait: 100. There: 100 s for the prompt, and 2.5 s of link."""
    call(costs(512.0).choose, 100, place("here", cached=90, decoding=9), [place("there")]).gives("here")
    call(costs(512.0).choose, 100, place("here", cached=90, decoding=10), [place("there")]).gives("there")


def test_what_is_cached_there_is_moved_but_not_computed(costs):
    """All but one of 100 tokens are there: 1 s to compute, 100 on the link."""
    there = [place("there", cached=99)]
    call(costs(512.0).choose, 100, place("here", wait=1.0), there).gives("there")
    call(costs(500.0).choose, 100, place("here"), there).gives("here")


def test_the_last_token_is_always_computed(costs):
    """A fully cached prompt still has one token to compute, here and there."""
    call(costs(512.0).choose, 100, place("here", cached=100, decoding=300), [place("there")]).gives("there")
    call(costs(512.0).choose, 100, place("here", cached=100, decoding=1), [place("there")]).gives("here")
    full = [place("there", cached=100, decoding=200)]
    call(costs(51_200.0).choose, 100, place("here", cached=99, decoding=100), full).gives("here")


def test_the_last_token_is_moved_too(costs):
    """All is cached here, and all but the last token there: one is computed, here or there, and moved from there."""
    there = [place("there", cached=99)]
    call(costs(512.0).choose, 100, place("here", wait=0.1, cached=100), there).gives("here")
    call(costs(512.0).choose, 100, place("here", wait=0.3, cached=100), there).gives("there")


def test_the_cheapest_of_many(costs):
    """One waits, one decodes, one is idle."""
    others = [place("a", wait=50.0), place("b", decoding=1), place("c"), place("d", wait=1.0)]
    call(costs(512.0).choose, 100, place("here", decoding=9), others).gives("c")


def test_of_equals_here_and_then_the_first(costs):
    """Equal costs: here, as nothing moves; else the first of the others, in their order."""
    names = one_of(("a", "b"), [("a", "b"), ("x", "y"), ("q", "c")])
    call(costs(512.0).choose, 100, place("here", wait=25.0), [place("there")]).gives("here")
    call(costs(512.0).choose, 100, place("here", decoding=5), [place(name) for name in names]).gives(names[0])
    call(costs(512.0).choose, 100, place("here", decoding=5), [place(name) for name in names[::-1]]).gives(names[1])


def test_here_may_be_the_only_one(costs):
    """There is no other replica."""
    call(costs().choose, 100, place("here", decoding=9), []).gives("here")


def test_a_prompt_has_tokens(costs):
    """No prompt is empty."""
    call(costs().choose, 0, place("here"), []).raises(ValueError)
    call(costs().choose, 1.5, place("here"), []).raises(TypeError)
