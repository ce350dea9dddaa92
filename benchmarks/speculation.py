"""What speculation gains an engine: tokens a step, accepted draft tokens, and time a token, by batch size.

MiniGPT serves `LLM` batches of BATCHES requests, NUM_NEW tokens each, behind prompts of two kinds: "new", texts of the
grammar; and "again", a text, MiniGPT's answer to it, and the text again, so the answer repeats its prompt. It is
greedy; for "new" also with temperature 1. There are no draft tokens ("plain"), or NUM_DRAFTS a request and step, from
the text ("ngram") or from the shipped draft model ("draft").

All ways generate the same tokens, which is asserted. They take turns, REPEATS times; time is CPU time of this process,
one thread. Minimum and median are recorded.

    python -m benchmarks.speculation

Keys of results/speculation.json: `num_drafts`, `num_new_tokens`, `num_prompt_tokens`, `repeats`; and for each of "new",
"again" and "sampled" ("new" with temperature 1) `.batch_N.WAY`: steps, tokens_per_step (of a request with draft tokens;
1 without), acceptance (the part of the draft tokens that was accepted), ms (a token, minimum), median_ms, speedup
(plain's ms over ms). `pass_cost.batch_N`: ms of a decode step; verify_ms, of one that verifies NUM_DRAFTS draft tokens
of each request, all of which are rejected; ratio, what a step must gain in tokens to pay.
"""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any, Final

import torch
from rich.progress import track

from benchmarks._record import record
from minicache.engine.drafting import SpeculativeConfig
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.grammar import Tokenizer, sample_text
from minicache.model import MiniGPT, load_minigpt
from minicache.model.checkpoint import SHIPPED_DRAFT

REPEATS: Final = 7
BATCHES: Final = (1, 8, 32)
NUM_NEW: Final = 96
NUM_PROMPT: Final = 96
NUM_DRAFTS: Final = 4
WAYS: Final = {"plain": None, "ngram": "ngram", "draft": "minigpt-draft"}
KINDS: Final = {"new": 0.0, "again": 0.0, "sampled": 1.0}


def main() -> None:
    torch.set_num_threads(1)
    model = load_minigpt()
    figures: dict[str, Any] = {
        "model": f"MiniGPT, {model.num_parameters():,} parameters, float32",
        "draft_model": f"{load_minigpt(SHIPPED_DRAFT).num_parameters():,} parameters",
        "repeats": REPEATS,
        "num_drafts": NUM_DRAFTS,
        "num_new_tokens": NUM_NEW,
        "num_prompt_tokens": NUM_PROMPT,
    }
    for kind in KINDS:
        prompts = make_prompts(model, kind)
        figures[kind] = {f"batch_{size}": compare(model, prompts[:size], kind) for size in BATCHES}
    figures["pass_cost"] = {f"batch_{size}": pass_cost(model, make_prompts(model, "new")[:size]) for size in BATCHES}
    record("speculation", figures)


def make_prompts(model: MiniGPT, kind: str) -> list[list[int]]:
    """As many prompts as the largest batch has requests."""
    tokenizer, prompts = Tokenizer(), []
    for seed in range(max(BATCHES)):
        rng, text = random.Random(seed), list[int]()
        while len(text) < NUM_PROMPT:
            text += tokenizer.encode_words(sample_text(rng))
        prompts.append(text[:NUM_PROMPT])
    if kind == "again":
        llm = LLM(model, num_blocks=2048)
        answers = llm.generate(prompts, SamplingParams(max_tokens=NUM_NEW, ignore_eos=True))
        prompts = [[*prompt, *answer.token_ids, *prompt] for prompt, answer in zip(prompts, answers, strict=True)]
    return prompts


def engine(model: MiniGPT, way: str) -> LLM:
    """An engine that speculates so."""
    source = WAYS[way]
    config = None if source is None else SpeculativeConfig(source, NUM_DRAFTS)
    return LLM(model, num_blocks=2048, speculative=config)


def compare(model: MiniGPT, prompts: list[list[int]], kind: str) -> dict[str, Any]:
    """All ways in turns.

    Raises:
        RuntimeError: a way's tokens are not those of plain decoding.
    """
    engines = {way: engine(model, way) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    params = [
        SamplingParams(max_tokens=NUM_NEW, temperature=KINDS[kind], seed=seed, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    num_steps: dict[str, int] = {}
    for _ in track(range(REPEATS), description=f"{kind}, {len(prompts)} requests"):
        expected = None
        for way, llm in engines.items():
            before, start = llm.memory.num_steps, time.process_time()
            found = [answer.token_ids for answer in llm.generate(prompts, params)]
            seconds[way].append(time.process_time() - start)
            num_steps[way] = llm.memory.num_steps - before
            expected = expected or found
            if found != expected:
                raise RuntimeError(f"{way}, {kind}, {len(prompts)} requests: other tokens than plain decoding's")
    num_tokens = NUM_NEW * len(prompts)
    points = {}
    for way, llm in engines.items():
        stats = getattr(llm.scheduler, "draft_stats", None)
        points[way] = {
            "steps": num_steps[way],
            "tokens_per_step": 1.0 if stats is None else round(stats.mean_acceptance_length, 2),
            "acceptance": None if stats is None else round(stats.acceptance_rate, 3),
            "ms": round(1e3 * min(seconds[way]) / num_tokens, 4),
            "median_ms": round(1e3 * median(seconds[way]) / num_tokens, 4),
            "speedup": round(min(seconds["plain"]) / min(seconds[way]), 2),
        }
    return points


def pass_cost(model: MiniGPT, prompts: list[list[int]], num_steps: int = 60) -> dict[str, float]:
    """The fastest decode step, and the fastest that verifies draft tokens none of which is accepted."""
    params = SamplingParams(max_tokens=num_steps, ignore_eos=True)
    fastest = {}
    engines = {"plain": engine(model, "plain"), "verify": engine(model, "ngram")}
    scheduler: Any = engines["verify"].scheduler
    scheduler.propose = lambda request, limit: [0] * limit  # the end of a text, which it is to ignore
    for way, llm in engines.items():
        times = []
        for _ in range(3):
            for prompt in prompts:
                llm.add_request(prompt, params)
            while llm.has_unfinished:
                start = time.process_time()
                llm.step()
                times.append(time.process_time() - start)
        fastest[way] = sorted(times)[len(times) // 10]  # the minimum would be a step at an answer's end
    plain, verify = fastest["plain"], fastest["verify"]
    return {"ms": round(1e3 * plain, 3), "verify_ms": round(1e3 * verify, 3), "ratio": round(verify / plain, 2)}


if __name__ == "__main__":
    main()
