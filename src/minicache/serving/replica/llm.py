"""An engine from its options, as a process of its own and `minicache serve --in-process` make it."""

from __future__ import annotations

from typing import cast

import torch

from minicache.cache.quantized import KV_CACHE_DTYPES
from minicache.engine.drafting import SpeculativeConfig
from minicache.engine.llm import LLM
from minicache.engine.loading import find_model, load_model
from minicache.engine.logprobs import ServedLLM
from minicache.engine.stopping import Tokenizer
from minicache.scheduler.paged import Preemption
from minicache.serving.replica.messages import EngineInfo, EngineOptions
from minicache.serving.replica.stats import cache_info

MAX_SMALL = 50_000_000  # parameters up to which a second thread makes a step slower
SHARING = ("paged", "fair", "chunked")  # the stages that have a prefix cache


def make_llm(options: EngineOptions, tokenizer: Tokenizer | None = None) -> ServedLLM:
    """Load the model, and make an engine for it.

    Args:
        options: of the engine. A prefix cache is left out where the scheduler has none.
        tokenizer: None if another process tokenizes: prompts are token ids then, and answers have no text.

    Raises:
        Exception: as `LLM`.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    is_divided = options.tensor_parallel_size > 1  # then it is the ranks that go to the device
    speculative = options.speculative and SpeculativeConfig(options.speculative, options.num_speculative_tokens)
    llm = ServedLLM(
        load_model(find_model(options.model), dtype, None if is_divided else options.device),
        scheduler=options.scheduler,
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        preemption=cast(Preemption, options.preemption),
        num_host_blocks=options.num_host_blocks,
        prefix_caching=options.prefix_caching and options.scheduler in SHARING,
        kv_cache_dtype=options.kv_cache_dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        tensor_parallel_size=options.tensor_parallel_size,
        dtype=dtype,
        device=options.device if is_divided else None,
        speculative=speculative,
        tokenizer=tokenizer,
    )
    parameters: list[torch.Tensor] = list(llm.model.parameters())
    if options.num_threads is None and sum(each.numel() for each in parameters) <= MAX_SMALL:
        torch.set_num_threads(1)
    return llm


def info_of(llm: LLM) -> EngineInfo:
    """What a server must know of an engine."""
    scheduler = llm.scheduler
    held = None if llm.storage is None else llm.storage.dtype
    cache_dtype = next((name for name, dtype in KV_CACHE_DTYPES.items() if dtype == held), "auto")
    cache = cache_info(scheduler, cache_dtype)
    return EngineInfo(llm.max_model_len, llm.model.config.vocab_size, scheduler.max_num_seqs, cache)
