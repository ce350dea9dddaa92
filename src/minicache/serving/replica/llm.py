"""An engine from its options, as a process of its own, `minicache serve --in-process` and `minicache chat` make it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from minicache.cache.quantized import KV_CACHE_DTYPES
from minicache.engine.drafting import SpeculativeConfig
from minicache.engine.llm import LLM
from minicache.engine.loading import find_model, load_model, load_tokenizer
from minicache.engine.options import EngineOptions, ReplicaOptions
from minicache.engine.stopping import Tokenizer
from minicache.model.minigpt import Transformer
from minicache.scheduler import has_option

if TYPE_CHECKING:
    from minicache.serving.replica.messages import EngineInfo

MAX_SMALL = 50_000_000  # parameters up to which a second thread makes a step slower


def make_llm(options: ReplicaOptions, tokenizer: Tokenizer | None = None) -> LLM:
    """Load the model, and make an engine for it.

    Args:
        options: of the engine. A prefix cache is left out where the scheduler has none.
        tokenizer: None if another process tokenizes: prompts are token ids then, and answers have no text.

    Raises:
        Exception: as `LLM`.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    given = {each.name: getattr(options, each.name) for each in fields(EngineOptions)}
    given["dtype"] = options.dtype and getattr(torch, options.dtype)
    if options.speculative:
        given["speculative"] = SpeculativeConfig(options.speculative, options.num_speculative_tokens)
    given["prefix_caching"] &= has_option(options.scheduler, "prefix_caching")
    # Loaded here, as `LLM` would load the name's tokenizer too. With several ranks it is they that go to the device.
    how = {"weight_dtype": given.pop("weight_dtype"), "tensor_parallel_size": options.tensor_parallel_size}
    given["model"] = load_model(find_model(options.model), given["dtype"], options.device, **how)
    llm = LLM(**given, tokenizer=tokenizer)
    if tokenizer is None:  # constraints are of tokens, and need one here
        llm.grammars.find_tokenizer = lambda: load_tokenizer(find_model(options.model))
    if options.num_threads is None and isinstance(llm.model, Transformer) and llm.model.num_parameters() <= MAX_SMALL:
        torch.set_num_threads(1)
    return llm


def info_of(llm: LLM) -> EngineInfo:
    """What a server must know of an engine."""
    from minicache.serving.replica.messages import EngineInfo  # a server has msgspec, `minicache chat` may not
    from minicache.serving.replica.stats import cache_info

    scheduler = llm.scheduler
    held = None if llm.storage is None else llm.storage.dtype
    cache_dtype = next((name for name, dtype in KV_CACHE_DTYPES.items() if dtype == held), "auto")
    cache = cache_info(scheduler, cache_dtype)
    return EngineInfo(llm.max_model_len, llm.model.config.vocab_size, scheduler.max_num_seqs, cache)
