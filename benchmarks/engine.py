"""How fast the engine serves: beside `transformers`, and beside its own linear layers.

32 requests of 50 to 100 prompt tokens, 2,415 together, want 100 tokens each, greedily. They are served by the same
random Llama (6 layers, hidden size 256, 8 query over 2 KV heads, 4,096 tokens, float32) in three ways: our engine;
`transformers`' `generate` on the batch, padded on the left; and its continuous batching, `generate_batch`, with a cache
and a step as large as the work, without which it is slower. All three take turns in another order each round; recorded
are minimum and median. The ceiling is what the linear layers take alone, on as many tokens at a time, with their
weights as PyTorch stores them; and for comparison laid out as the engine has them (`minicache.model.fused`).

Then the engine with 1, 8, 32 batch slots; answers of ragged lengths; and MiniGPT, one sequence, through either cache.
One thread: with two, a shared machine stalls. Our engine's scheduler is "fair". The default, "chunked", would order the
same steps: no step of these has more tokens than it allows, 8,192.

    python -m benchmarks.engine
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from benchmarks._record import record
from minicache.cache.dense import KVCache
from minicache.cache.paged import PagedKVCache
from minicache.engine.decoding import decode
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.engine.timing import timed
from minicache.model import MiniGPT, MiniGPTConfig, load_minigpt
from minicache.model.fused import fuse

REPEATS = 5
SHORTEST, LONGEST = 50, 100
NUM_REQUESTS, NUM_NEW = 32, 100
BATCHES = (1, 8, 32)
SHAPE = MiniGPTConfig(
    vocab_size=4096,
    hidden_size=256,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=688,
    max_seq_len=512,
)
NUM_RAGGED, MOST_RAGGED = 64, 199
CACHES = {"dense": KVCache, "paged": PagedKVCache}

transformers: Any = import_module("transformers")  # Any: much of it has no types


class Work(NamedTuple):
    """What is to be served: prompts, and for each how many tokens it wants."""

    prompts: list[list[int]]
    num_new: list[int]


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    llama, model = the_same_model()
    as_stored = deepcopy(model)
    fuse(model, in_place=True)
    work, few, eight = make_work(), make_work(2), make_work(8)
    ragged = make_ragged_work()
    ways: dict[str, Callable[[], float]] = {
        "minicache": partial(serve, model, work, 32),
        "static": partial(generate, llama, work, 32),
        "continuous": partial(generate_batch, llama, work),
        "minicache_1": partial(serve, model, few, 1),
        "static_1": partial(generate, llama, few, 1),
        "minicache_8": partial(serve, model, eight, 8),
        "static_8": partial(generate, llama, eight, 8),
        "minicache_ragged": partial(serve, model, ragged, 32),
        "static_ragged": partial(generate, llama, ragged, 32),
        "linear_prompts": partial(linear_layers, as_stored, sum(map(len, work.prompts)), NUM_REQUESTS),
        **{f"linear_{batch}": partial(linear_layers, as_stored, batch, batch) for batch in BATCHES},
        **{f"laid_out_{batch}": partial(linear_layers, model, batch, batch) for batch in BATCHES},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rng = random.Random(0)
    for _ in track(range(REPEATS), description="Serving"):
        for name in rng.sample(list(ways), len(ways)):
            seconds[name].append(ways[name]())
    agreement = agrees(llama, work, answers(model, work))
    record("engine", results(model, seconds, {"_1": few, "_8": eight, "_ragged": ragged}) | agreement | caches())


# The model and the work


def the_same_model(shape: MiniGPTConfig = SHAPE) -> tuple[Any, MiniGPT]:
    """A random Llama of that shape, twice: `transformers`' and ours, with the same weights."""
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_seq_len,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            rms_norm_eps=shape.norm_eps,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    model = MiniGPT(shape).eval()
    model.load_state_dict(llama.model.state_dict())
    return llama, model


def make_work(num_requests: int = NUM_REQUESTS) -> Work:
    """The first of the 32 requests: 2,415 prompt tokens all together, and 100 new tokens each."""
    rng = random.Random(0)
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(NUM_REQUESTS)]
    prompts = [[rng.randrange(SHAPE.vocab_size) for _ in range(length)] for length in lengths]
    return Work(prompts[:num_requests], [NUM_NEW] * num_requests)


def make_ragged_work() -> Work:
    """64 requests, the 32 prompts twice, that want 1 to 199 tokens: some are done long before others."""
    rng = random.Random(1)
    prompts = make_work().prompts * (NUM_RAGGED // NUM_REQUESTS)
    return Work(prompts, [rng.randint(1, MOST_RAGGED) for _ in prompts])


# The ways to serve it, each in seconds


def serve(model: MiniGPT, work: Work, max_num_seqs: int) -> float:
    """Our engine. Its cache is there before the clock starts, as a server's is."""
    engine = LLM(model, scheduler="fair", max_num_seqs=max_num_seqs)
    params = [SamplingParams(max_tokens=num_new, ignore_eos=True) for num_new in work.num_new]
    start = time.perf_counter()
    completions = engine.generate(work.prompts, params)
    seconds = time.perf_counter() - start
    check([len(completion.token_ids) for completion in completions], work)
    return seconds


def generate(llama: Any, work: Work, batch_size: int) -> float:
    """`transformers`' `generate`, one batch after the other, each until its longest answer is complete."""
    lengths: list[int] = []
    start = time.perf_counter()
    for first in range(0, len(work.prompts), batch_size):
        prompts, num_new = work.prompts[first : first + batch_size], work.num_new[first : first + batch_size]
        width = max(map(len, prompts))
        token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = transformers.GenerationConfig(
            max_new_tokens=max(num_new), do_sample=False, eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            out = llama.generate(token_ids, attention_mask=mask, generation_config=config)
        lengths += [min(out.shape[1] - width, wanted) for wanted in num_new]
    seconds = time.perf_counter() - start
    check(lengths, work)
    return seconds


def generate_batch(llama: Any, work: Work) -> float:
    """`transformers`' continuous batching. Its cache is there before the clock starts, too: the manager is kept."""
    config = transformers.GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = transformers.generation.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=4096)
    start = time.perf_counter()
    out = llama.generate_batch(
        work.prompts, generation_config=config, continuous_batching_config=sizes, persistent_manager=True, warmup=False
    )
    seconds = time.perf_counter() - start
    check([len(answer.generated_tokens) for answer in out.values()], work)
    return seconds


def check(lengths: Sequence[int], work: Work) -> None:
    """Raise unless every answer has the tokens that were wanted: who generates less is not faster."""
    if list(lengths) != work.num_new:
        raise RuntimeError(f"answers of {lengths} tokens, and {work.num_new} were wanted")


def linear_layers(model: MiniGPT, num_tokens: int, num_logits: int) -> float:
    """The linear layers alone, the best of 5 passes: what a pass of the model takes at least, whatever runs it."""
    layers = [module for module in model.layers.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {width: torch.randn(num_tokens, width) for width in {layer.in_features for layer in layers}}
    seconds = []
    with torch.inference_mode():
        for _ in range(5):
            start = time.perf_counter()
            for layer in layers:
                layer(inputs[layer.in_features])
            F.linear(inputs[SHAPE.hidden_size][:num_logits], model.embed_tokens.weight)
            seconds.append(time.perf_counter() - start)
    return min(seconds)


# Are they the same tokens?


def answers(model: MiniGPT, work: Work) -> list[list[int]]:
    """What our engine answers."""
    completions = LLM(model, scheduler="fair", max_num_seqs=len(work.prompts)).generate(
        work.prompts, SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    )
    return [completion.token_ids for completion in completions]


def agrees(llama: Any, work: Work, token_ids: list[list[int]]) -> dict[str, Any]:
    """How many of our tokens are those that `transformers` finds likeliest after the same tokens.

    Where they differ, `largest_gap` is by how much its logit of ours is below its largest: a near tie, or an error.
    """
    gaps: list[Tensor] = []
    for prompt, answer in zip(work.prompts, token_ids, strict=True):
        with torch.inference_mode():
            logits = llama(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        ours = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        gaps.append(logits.amax(dim=1) - ours)
    gap = torch.cat(gaps)
    return {
        "num_tokens": len(gap),
        "num_tokens_that_differ": int((gap > 0).sum()),
        "share_that_agrees": float((gap == 0).float().mean()),
        "largest_gap": float(gap.max()),
    }


# MiniGPT alone, through either cache


def caches() -> dict[str, Any]:
    """Milliseconds a token of the shipped MiniGPT, one sequence from first position to last, through either cache."""
    model = load_minigpt()
    config = model.config
    runs: dict[str, list[list[float]]] = {name: [] for name in CACHES}
    for _ in track(range(REPEATS), description="Decoding"):
        for name, make in CACHES.items():
            cache = make(config.num_layers, 1, config.num_kv_heads, config.max_seq_len, config.head_dim)
            steps = decode(model, torch.tensor([[1]]), config.max_seq_len, cache=cache)
            runs[name].append([seconds * 1e3 for _, seconds in timed(steps)])
    # Step by step the least of all repeats, and of those the mean.
    mean = {name: statistics.fmean(map(min, zip(*repeats, strict=True))) for name, repeats in runs.items()}
    return {
        "ms_per_token_through": {name: round(value, 4) for name, value in mean.items()},
        "paged_over_dense_cache": mean["paged"] / mean["dense"],
    }


# What is recorded


def results(model: MiniGPT, seconds: dict[str, list[float]], others: dict[str, Work]) -> dict[str, Any]:
    """Tokens per second, and the ratios that pages state: of minima, from one run.

    Args:
        model: ours.
        seconds: of every run of each way.
        others: the work of those ways that did not do the 32 requests, by the end of their names.
    """
    whole_work = make_work()
    minimum = {name: min(values) for name, values in seconds.items()}
    median = {name: statistics.median(values) for name, values in seconds.items()}
    num_tokens = {"minicache": sum(whole_work.num_new)}
    num_tokens |= dict.fromkeys(("static", "continuous"), num_tokens["minicache"])
    for suffix, work in others.items():
        num_tokens |= dict.fromkeys((f"minicache{suffix}", f"static{suffix}"), sum(work.num_new))
    rate = {name: count / minimum[name] for name, count in num_tokens.items()}
    best_peer = max(("static", "continuous"), key=lambda name: rate[name])
    ceiling = {batch: batch / minimum[f"linear_{batch}"] for batch in BATCHES}
    laid_out = {batch: batch / minimum[f"laid_out_{batch}"] for batch in BATCHES}
    # The prompts' pass gives each request its first token, and 99 more passes of 32 give the rest.
    whole = minimum["linear_prompts"] + (NUM_NEW - 1) * minimum["linear_32"]
    return {
        "model": f"random Llama, {model.num_parameters():,} parameters, float32",
        "threads": 1,
        "repeats": REPEATS,
        "num_requests": NUM_REQUESTS,
        "num_prompt_tokens": sum(map(len, whole_work.prompts)),
        "num_new_tokens_each": NUM_NEW,
        "tokens_per_second": {name: round(value, 1) for name, value in rate.items()},
        "median_tokens_per_second": {name: round(count / median[name], 1) for name, count in num_tokens.items()},
        "linear_tokens_per_second": {str(batch): round(value, 1) for batch, value in ceiling.items()},
        "laid_out_tokens_per_second": {str(batch): round(value, 1) for batch, value in laid_out.items()},
        "linear_prompts_ms": minimum["linear_prompts"] * 1e3,
        "linear_whole_tokens_per_second": NUM_REQUESTS * NUM_NEW / whole,
        "best_peer": best_peer,
        "ratio_to_best_peer": rate["minicache"] / rate[best_peer],
        "ratio_to_static": rate["minicache"] / rate["static"],
        "ratio_to_continuous": rate["minicache"] / rate["continuous"],
        "ratio_to_static_ragged": rate["minicache_ragged"] / rate["static_ragged"],
        "share_of_ceiling": rate["minicache"] / ceiling[32],
        "share_of_laid_out_ceiling": rate["minicache"] / laid_out[32],
        "share_of_whole_ceiling": rate["minicache"] * whole / (NUM_REQUESTS * NUM_NEW),
    }


if __name__ == "__main__":
    main()
