"""What draft tokens from the text gain one request: accepted ones, tokens a step, and time compared with none.

The shipped MiniGPT answers greedily in `LLM`, one request at a time, with and without `speculative`. NUM_NEW tokens are
generated behind prompts of 3 · NUM_NEW tokens, of two kinds:

- "again": a text, MiniGPT's answer to it, and the text again. MiniGPT looks at what is near, so it gives much of
  the same answer again: what n-gram drafting is for, where an answer repeats its prompt (code that is edited, a
  document that is quoted).
- "new": texts of the grammar, one after the other, in which nothing is repeated on purpose. Short endings occur
  everywhere, so the drafter proposes tokens here too.

Every run's tokens are asserted to be those of the engine without draft tokens. That engine and all settings take turns,
so they meet the same weather. All runs of one setting do the same steps. So its time is the sum over its steps of
the least that each took in REPEATS runs, in CPU time of this process: what the machine does besides counts for little.
One thread.

    python -m benchmarks.speculative

Keys of results/speculative.json:

- `num_prompts`, `num_prompt_tokens`, `num_new_tokens`, `max_ngram`.
- `step_cost.points`: num_tokens, ms, over_one: a step with so many new tokens behind a prompt, over one with one.
- `again`, `new`: `.plain_ms`, of all prompts without draft tokens, and `.points`, one for each num_drafts: num_drafts,
  acceptance (the part of the draft tokens that was accepted), drafted_per_step, tokens_per_step (the prompts' steps
  included), num_steps, ms, speedup (plain_ms over ms). `.best`: the point with the highest speedup.
- `by_ngram`: the same three with num_drafts BY_NGRAM_DRAFTS and other max_ngram: max_ngram, acceptance,
  drafted_per_step, tokens_per_step. Counted, not timed.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from rich.progress import track

from benchmarks._record import record
from minicache.engine import LLM, SamplingParams
from minicache.engine.drafting import SpeculativeConfig
from minicache.grammar import Tokenizer, sample_text
from minicache.model import MiniGPT, load_minigpt
from minicache.scheduler.speculative import SpeculativeScheduler

REPEATS: Final = 5
NUM_PROMPTS: Final = 4
NUM_NEW: Final = 100
MAX_NGRAM: Final = 3
NUM_DRAFTS: Final = (1, 2, 4, 8, 12, 16)
NGRAMS: Final = (1, 2, 3, 4, 6)
BY_NGRAM_DRAFTS: Final = 4
STEP_TOKENS: Final = (1, 2, 3, 5, 9, 17)
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
            "step_cost": {"points": step_cost(model, prompts["new"][0])},
            **{kind: by_num_drafts(model, each, kind) for kind, each in prompts.items()},
            "by_ngram": {kind: by_ngram(model, each) for kind, each in prompts.items()},
        },
    )


# --- the work ---------------------------------------------------------------------------------------------------------


def make_prompts(model: MiniGPT, kind: str) -> list[list[int]]:
    """Prompts of one kind, of 3 · NUM_NEW tokens each."""
    prompts, llm = [], engine(model, 0)
    for seed in range(NUM_PROMPTS):
        text = text_tokens(3 * NUM_NEW, seed)
        if kind == "again":
            asked = text[:NUM_NEW]
            text = asked + answer(llm, asked).tokens + asked
        prompts.append(text)
    return prompts


def text_tokens(count: int, seed: int) -> list[int]:
    """So many tokens of MiniGPT's language."""
    rng, tokenizer, tokens = random.Random(seed), Tokenizer(), list[int]()
    while len(tokens) < count:
        tokens += tokenizer.encode_words(sample_text(rng))
    return tokens[:count]


def engine(model: MiniGPT, num_drafts: int, max_ngram: int = MAX_NGRAM) -> LLM:
    """An engine for one request at a time, with at most so many draft tokens in a step."""
    config = SpeculativeConfig("ngram", num_drafts, max_ngram) if num_drafts else None
    return LLM(model, num_blocks=64, max_num_seqs=1, speculative=config)


@dataclass
class Answer:
    """An answer, and the CPU seconds of each step that it took, its prompt's first."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def answer(llm: LLM, prompt: list[int]) -> Answer:
    """NUM_NEW tokens behind a prompt, by greedy decoding."""
    llm.add_request(prompt, SamplingParams(max_tokens=NUM_NEW, ignore_eos=True))
    found = Answer()
    while llm.has_unfinished:
        start = time.process_time()
        chunks = llm.step()
        found.seconds.append(time.process_time() - start)
        found.tokens += [chunk.token_id for chunk in chunks if chunk.token_id is not None]
    return found


# --- what it gains ----------------------------------------------------------------------------------------------------


def by_num_drafts(model: MiniGPT, prompts: list[list[int]], kind: str) -> dict[str, Any]:
    """An engine without draft tokens, and one for every number of them, in turns.

    Raises:
        RuntimeError: a run's tokens are not those of the engine without.
    """
    engines = {num_drafts: engine(model, num_drafts) for num_drafts in (0, *NUM_DRAFTS)}
    fastest: dict[tuple[int, int], list[float]] = {}  # by draft tokens and prompt: of each step
    for _ in track(range(REPEATS), description=f"Decoding, {kind}"):
        for place, prompt in enumerate(prompts):
            expected: list[int] = []
            for num_drafts, llm in engines.items():
                found = answer(llm, prompt)
                fastest[num_drafts, place] = list(
                    map(min, found.seconds, fastest.get((num_drafts, place), found.seconds))
                )
                expected = expected or found.tokens
                if found.tokens != expected:
                    raise RuntimeError(f"{num_drafts} draft tokens, prompt {place}: other tokens than without")
    steps = {each: [fastest[each, place] for place in range(len(prompts))] for each in engines}
    took = {each: 1e3 * sum(map(sum, found)) for each, found in steps.items()}
    points = []
    for num_drafts in NUM_DRAFTS:
        num_steps = sum(map(len, steps[num_drafts]))
        points.append(
            {
                "num_drafts": num_drafts,
                **told(engines[num_drafts], REPEATS * num_steps, REPEATS * len(prompts)),
                "num_steps": num_steps,
                "ms": round(took[num_drafts], 1),
                "speedup": round(took[0] / took[num_drafts], 2),
            }
        )
    best = max(points, key=lambda point: point["speedup"])
    return {"plain_ms": round(took[0], 1), "best": best, "points": points}


def by_ngram(model: MiniGPT, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """How much of the text the drafter looks for, and how many of its tokens are accepted."""
    points = []
    for max_ngram in NGRAMS:
        llm = engine(model, BY_NGRAM_DRAFTS, max_ngram)
        num_steps = sum(len(answer(llm, prompt).seconds) for prompt in prompts)
        points.append({"max_ngram": max_ngram, **told(llm, num_steps, len(prompts))})
    return points


def told(llm: LLM, num_steps: int, num_answers: int) -> dict[str, float]:
    """What is recorded of an engine's draft tokens, in all steps that it made."""
    stats = speculative(llm).draft_stats
    return {
        "acceptance": round(stats.acceptance_rate, 3),
        "drafted_per_step": round(stats.num_draft_tokens / num_steps, 2),
        "tokens_per_step": round(num_answers * NUM_NEW / num_steps, 2),
    }


def speculative(llm: LLM) -> SpeculativeScheduler:
    """The scheduler of an engine that speculates."""
    assert isinstance(llm.scheduler, SpeculativeScheduler)
    return llm.scheduler


# --- what a step costs ------------------------------------------------------------------------------------------------


def step_cost(model: MiniGPT, prompt: list[int], rounds: int = 5, num_steps: int = 20) -> list[dict[str, Any]]:
    """The fastest step with so many new tokens, of the first behind a prompt."""
    engines = {}
    for num_tokens in STEP_TOKENS:
        engines[num_tokens] = engine(model, num_tokens - 1)
        if num_tokens > 1:
            speculative(engines[num_tokens]).propose = lambda request, num_drafts: [1] * num_drafts
    fastest = dict.fromkeys(STEP_TOKENS, float("inf"))
    for _ in range(rounds):
        for num_tokens, llm in engines.items():
            fastest[num_tokens] = min(fastest[num_tokens], *answer(llm, prompt).seconds[1 : 1 + num_steps])
    return [
        {"num_tokens": each, "ms": round(1e3 * seconds, 3), "over_one": round(seconds / fastest[1], 2)}
        for each, seconds in fastest.items()
    ]


if __name__ == "__main__":
    main()
