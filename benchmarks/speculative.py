"""What draft tokens from the text gain MiniGPT: accepted ones, tokens a pass, and time compared with plain decoding.

The shipped MiniGPT answers greedily, one sequence at a time, with a `PagedKVCache`. NUM_NEW tokens are generated behind
prompts of 3 · NUM_NEW tokens, of two kinds:

- "again": a text, MiniGPT's answer to it, and the text once more. MiniGPT looks at what is near, so it gives much of
  the same answer again: what n-gram drafting is for, where an answer repeats its prompt (code that is edited, a
  document that is quoted).
- "new": texts of the grammar, one after the other, in which nothing is repeated on purpose. Short endings occur
  everywhere, so the drafter proposes tokens here too.

Every run's tokens are asserted to be those of plain greedy decoding (`minicache.engine.decoding.decode`). Plain
decoding and all settings take turns, so that they meet the same weather. All runs of one setting do the same passes. So
its time is the sum over its tokens of the least that each took in REPEATS runs, in CPU time of this process: what the
machine does besides counts for little. One thread. A pass of MiniGPT is so small that its time is mostly that of making
its calls, and hardly grows with a few tokens more: as on a GPU, where it is mostly that of reading the weights, though
for another reason.

    python -m benchmarks.speculative

Keys of results/speculative.json:

- `num_prompts`, `num_prompt_tokens`, `num_new_tokens`, `max_ngram`.
- `pass_cost.points`: num_tokens, ms, over_one: a pass with so many new tokens behind a prompt, over one with one.
- `again`, `new`: `.plain_ms`, of all prompts, and `.points`, one for each num_drafts: num_drafts, acceptance (the part
  of the draft tokens that was accepted), drafted_per_pass, tokens_per_pass (the prompts' passes included), num_passes,
  ms, speedup (plain_ms over ms). `.best`: the point with the highest speedup.
- `by_ngram`: the same two with num_drafts BY_NGRAM_DRAFTS and other max_ngram: max_ngram, acceptance, drafted_per_pass,
  tokens_per_pass. Counted, not timed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from rich.progress import track
from torch import Tensor

from benchmarks._record import record
from minicache.cache.paged import PagedKVCache
from minicache.engine.decoding import decode
from minicache.engine.speculative import NgramDrafter, SpeculationStats, speculative_decode
from minicache.grammar import Tokenizer, sample_text
from minicache.model import MiniGPT, load_minigpt

REPEATS: Final = 5
NUM_PROMPTS: Final = 4
NUM_NEW: Final = 100
MAX_NGRAM: Final = 3
NUM_DRAFTS: Final = (0, 1, 2, 4, 8, 12, 16)
NGRAMS: Final = (1, 2, 3, 4, 6)
BY_NGRAM_DRAFTS: Final = 4
PASS_TOKENS: Final = (1, 2, 3, 5, 9, 17)
KINDS: Final = ("again", "new")


def main() -> None:
    torch.set_num_threads(1)
    model = load_minigpt()
    prompts = {kind: make_prompts(model, kind) for kind in KINDS}
    record(
        "speculative",
        {
            "model": f"MiniGPT, {model.num_parameters():,} parameters, float32",
            "threads": 1,
            "repeats": REPEATS,
            "num_prompts": NUM_PROMPTS,
            "num_prompt_tokens": 3 * NUM_NEW,
            "num_new_tokens": NUM_NEW,
            "max_ngram": MAX_NGRAM,
            "pass_cost": {"points": pass_cost(model, prompts["new"][0])},
            **{kind: by_num_drafts(model, each, kind) for kind, each in prompts.items()},
            "by_ngram": {kind: by_ngram(model, each) for kind, each in prompts.items()},
        },
    )


# --- the work ---------------------------------------------------------------------------------------------------------


def make_prompts(model: MiniGPT, kind: str) -> list[list[int]]:
    """Prompts of one kind, of 3 · NUM_NEW tokens each."""
    prompts = []
    for seed in range(NUM_PROMPTS):
        text = text_tokens(3 * NUM_NEW, seed)
        if kind == "again":
            asked = text[:NUM_NEW]
            text = asked + plain(model, asked) + asked
        prompts.append(text)
    return prompts


def text_tokens(count: int, seed: int) -> list[int]:
    """So many tokens of MiniGPT's language."""
    rng, tokenizer, tokens = random.Random(seed), Tokenizer(), list[int]()
    while len(tokens) < count:
        tokens += tokenizer.encode_words(sample_text(rng))
    return tokens[:count]


def new_cache(model: MiniGPT) -> PagedKVCache:
    """An empty cache of one sequence."""
    config = model.config
    return PagedKVCache(config.num_layers, 1, config.num_kv_heads, config.max_seq_len, config.head_dim)


def plain(model: MiniGPT, prompt: list[int]) -> list[int]:
    """The tokens of greedy decoding."""
    return timed(plainly(model, prompt))[0]


def plainly(model: MiniGPT, prompt: list[int]) -> Iterator[Tensor]:
    """Greedy decoding, token by token."""
    return decode(model, torch.tensor([prompt]), NUM_NEW, cache=new_cache(model))


def speculated(
    model: MiniGPT, prompt: list[int], num_drafts: int, stats: SpeculationStats, max_ngram: int = MAX_NGRAM
) -> Iterator[Tensor]:
    """The same with draft tokens."""
    return speculative_decode(
        model,
        torch.tensor([prompt]),
        NUM_NEW,
        cache=new_cache(model),
        drafter=NgramDrafter(max_ngram),
        num_drafts=num_drafts,
        stats=stats,
    )


def timed(generation: Iterable[Tensor]) -> tuple[list[int], list[float]]:
    """What a generation yields, as ints, and the CPU seconds from each token to the next; to the first, of its pass."""
    tokens, seconds, start = list[int](), list[float](), time.process_time()
    for token in generation:
        tokens.append(int(token))
        now = time.process_time()
        seconds.append(now - start)
        start = now
    return tokens, seconds


# --- what it gains ----------------------------------------------------------------------------------------------------


def by_num_drafts(model: MiniGPT, prompts: list[list[int]], kind: str) -> dict[str, Any]:
    """Plain decoding, and every number of draft tokens, in turns.

    Raises:
        RuntimeError: a run's tokens are not those of plain decoding.
    """
    fastest: dict[tuple[int | None, int], list[float]] = {}  # by way and prompt: of each token
    stats = {num_drafts: SpeculationStats() for num_drafts in NUM_DRAFTS}
    for repeat in track(range(REPEATS), description=f"Decoding, {kind}"):
        for place, prompt in enumerate(prompts):
            expected: list[int] = []
            for way in (None, *NUM_DRAFTS):
                counted = stats[way] if way is not None and not repeat else SpeculationStats()
                run = plainly(model, prompt) if way is None else speculated(model, prompt, way, counted)
                found, seconds = timed(run)
                fastest[way, place] = list(map(min, seconds, fastest.get((way, place), seconds)))
                expected = expected or found
                if found != expected:
                    raise RuntimeError(f"{way} draft tokens, prompt {place}: other tokens than plain decoding's")
    took = {way: 1e3 * sum(sum(fastest[way, place]) for place in range(len(prompts))) for way in (None, *NUM_DRAFTS)}
    points = [
        {
            "num_drafts": num_drafts,
            **told(stats[num_drafts]),
            "num_passes": stats[num_drafts].num_passes,
            "ms": round(took[num_drafts], 1),
            "speedup": round(took[None] / took[num_drafts], 2),
        }
        for num_drafts in NUM_DRAFTS
    ]
    best = max(points, key=lambda point: point["speedup"])
    return {"plain_ms": round(took[None], 1), "best": best, "points": points}


def by_ngram(model: MiniGPT, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """How much of the text the drafter looks for, and how many of its tokens are accepted."""
    points = []
    for max_ngram in NGRAMS:
        stats = SpeculationStats()
        for prompt in prompts:
            timed(speculated(model, prompt, BY_NGRAM_DRAFTS, stats, max_ngram))
        points.append({"max_ngram": max_ngram, **told(stats)})
    return points


def told(stats: SpeculationStats) -> dict[str, float]:
    """What is recorded of the counts."""
    return {
        "acceptance": round(stats.acceptance_rate, 3),
        "drafted_per_pass": round(stats.num_drafted / stats.num_passes, 2),
        "tokens_per_pass": round(stats.tokens_per_pass, 2),
    }


# --- what a pass costs ------------------------------------------------------------------------------------------------


def pass_cost(model: MiniGPT, prompt: list[int], rounds: int = 100) -> list[dict[str, Any]]:
    """The fastest pass with so many new tokens, behind a prompt that is in the cache."""
    cache = new_cache(model)
    fastest = dict.fromkeys(PASS_TOKENS, float("inf"))
    with torch.inference_mode():
        model(torch.tensor([prompt]), cache)
        for _ in range(rounds):
            for num_tokens in PASS_TOKENS:
                tokens = torch.tensor([prompt[:num_tokens]])
                start = time.process_time()
                model(tokens, cache)
                fastest[num_tokens] = min(fastest[num_tokens], time.process_time() - start)
                cache.truncate(len(prompt))
    return [
        {"num_tokens": each, "ms": round(1e3 * seconds, 3), "over_one": round(seconds / fastest[1], 2)}
        for each, seconds in fastest.items()
    ]


if __name__ == "__main__":
    main()
