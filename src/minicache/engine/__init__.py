"""From prompts to tokens: a scheduler, a model and a cache, run step by step.

| module | owns | built in |
|---|---|---|
| `loop` | `EngineLoop`: a step, from `schedule` to the chunks | phase 5 |
| `llm` | `LLM`: that loop, with prompts and answers around it | – |
| `sampling` | `SamplingParams`; how a token is picked | phase 5 |
| `async_engine` | `AsyncEngine`: one thread owns an `LLM`, many coroutines read its tokens | phase 10 |
| `beam` | which hypotheses of a beam search go on | phase 8 |
| `beam_requests` | beam search, on requests of an engine | – |
| `speculative` | draft tokens, checked by the model in one forward pass | phase 9 |
| `drafting` | draft tokens for a whole batch: n-gram drafter, draft model | – |
| `logprobs` | the log probabilities of a step's tokens | – |
| `answers` | a prompt on its way to a completion | – |
| `options` | its options: what `LLM`, a process and the command line take | – |
| `loading`, `kv` | from a model's name to a model; the memory that a step runs on | – |
| `runners` | a step in a device's own way | – |
| `stopping` | where a text ends: stop strings, text that can be shown | – |
| `decoding` | model + cache → tokens, one batch from start to end | phase 1 |
| `picking` | `greedy` and `sampler`, which pick for a whole batch alike | – |
| `timing` | how long each step of a stream takes | – |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicache.lazy import lazily

if TYPE_CHECKING:
    from minicache.engine.answers import Chunk as Chunk
    from minicache.engine.answers import Completion as Completion
    from minicache.engine.async_engine import AnswerStream as AnswerStream
    from minicache.engine.async_engine import AsyncEngine as AsyncEngine
    from minicache.engine.beam import BeamSearchParams as BeamSearchParams
    from minicache.engine.beam_requests import beam_search as beam_search
    from minicache.engine.decoding import decode as decode
    from minicache.engine.drafting import SpeculativeConfig as SpeculativeConfig
    from minicache.engine.llm import LLM as LLM
    from minicache.engine.sampling import SamplingParams as SamplingParams
    from minicache.engine.speculative import NgramDrafter as NgramDrafter

__getattr__, __dir__ = lazily(
    __name__,
    answers="Chunk Completion",
    async_engine="AnswerStream AsyncEngine",
    beam="BeamSearchParams",
    beam_requests="beam_search",
    decoding="decode",
    drafting="SpeculativeConfig",
    llm="LLM",
    sampling="SamplingParams",
    speculative="NgramDrafter",
)
