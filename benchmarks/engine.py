"""How fast the engine serves: next to vLLM and `transformers`, and next to its own linear layers.

The same random Llama (6 layers, hidden size 256, 8 query over 2 KV heads, 4,096 tokens, float32) is served greedily by
our engine, with its defaults; by vLLM's CPU backend, compiled (its default) and eager; by `transformers`' `generate`,
in batches padded on the left; and by its continuous batching. Each engine is a process with one thread
(`benchmarks/_contestant.py`). vLLM takes part where scripts/vllm_env.sh has made its environment; elsewhere its figures
are null. The work is:

- 32 requests of 50 to 100 prompt tokens, 2,415 together, that want 100 tokens each, with 32 batch slots;
- the first 8 of them with 8 batch slots, and the first 2 with one;
- ragged: 64 requests that want 1 to 199 tokens, with 32 batch slots. `generate` goes on to the longest of a batch, and
  only the tokens that are wanted count.

After a run that is not counted, for each engine and work, they take turns in another order each round. Recorded are the
tokens per second of the fastest round and of the median, by wall time and by the CPU time of the engine's process, and
the ratios of our engine to each. No engine may share a prompt's KV entries with an earlier round. All answers are
compared: an engine whose token is not the likeliest by more than rounding fails the benchmark.

The ceiling is what the linear layers take alone, on as many tokens at a time, with their weights as PyTorch stores
them; and for comparison laid out column by column (`minicache.model.fused`). Then MiniGPT, one sequence,
through either cache.

    python -m benchmarks.engine

It takes about 10 minutes with vLLM.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks._contestant import ENGINES, Contestant, Run, Work, is_here
from benchmarks._record import record
from minicache.cache.dense import KVCache
from minicache.cache.paged import PagedKVCache
from minicache.engine.decoding import decode
from minicache.engine.timing import timed
from minicache.model import MiniGPT, MiniGPTConfig, load_minigpt
from minicache.model.linear import PackedLinear, pack

ROUNDS: Final = 7
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
NEAR_TIE: Final = 1e-3
"""The most by which a token's logit may be below the largest: rounding differs from engine to engine."""
CACHES = {"dense": KVCache, "paged": PagedKVCache}

transformers: Any = import_module("transformers")  # Any: much of it has no types


class Row(NamedTuple):
    """Work, and the batch slots to serve it with."""

    work: Work
    max_num_seqs: int


Runs = Mapping[str, Mapping[str, list[Run]]]
"""Row → engine → its counted runs; an engine that is not measured is missing, or has none."""


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    llama, model = the_same_model()
    rows = make_rows()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        llama.save_pretrained(folder)
        names = [name for name in ENGINES if is_here(name)]
        engines = [stack.enter_context(closing(Contestant(name, Path(folder)))) for name in names]
        runs, linear = take_turns(engines, rows, model)
    figures = results(runs, rows, linear)
    show(figures)
    agreement = {name: agreement_of(name, llama, runs, rows) for name in names}
    about = {"model": f"random Llama, {model.num_parameters():,} parameters, float32", "threads": 1, "rounds": ROUNDS}
    record("engine", about | figures | {"agreement": agreement} | caches())


def take_turns(
    engines: list[Contestant], rows: Mapping[str, Row], model: MiniGPT
) -> tuple[dict[str, dict[str, list[Run]]], dict[str, list[float]]]:
    """Have every engine do every row's work in every round; and the seconds of the linear layers, in between.

    Returns:
        The counted runs, and the seconds of the linear layers: "stored_1" … with the weights as PyTorch stores them,
        "laid_out_1" …, and "prompts", the pass over all prompts.
    """
    laid_out = deepcopy(model)
    pack(laid_out)
    layers = {f"stored_{batch}": partial(linear_layers, model, batch, batch) for batch in BATCHES}
    layers |= {f"laid_out_{batch}": partial(linear_layers, laid_out, batch, batch) for batch in BATCHES}
    layers["prompts"] = partial(linear_layers, model, sum(map(len, rows["32"].work.prompts)), NUM_REQUESTS)
    pairs = [(name, engine) for name in rows for engine in engines if takes_part(engine.name, name)]
    runs: dict[str, dict[str, list[Run]]] = {name: {} for name in rows}
    for name, engine in track(pairs, description="Warming up"):
        engine.serve(*rows[name])
        runs[name][engine.name] = []
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    rng = random.Random(0)
    for _ in track(range(ROUNDS), description="Serving"):
        for name, engine in rng.sample(pairs, len(pairs)):
            runs[name][engine.name].append(engine.serve(*rows[name]))
        for name, alone in layers.items():
            seconds[name].append(alone())
    return runs, seconds


def takes_part(engine: str, row: str) -> bool:
    """Whether an engine is asked to do a row's work. Continuous batching of `transformers` has no batch slots."""
    return engine != "continuous" or row == "32"


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


def make_rows() -> dict[str, Row]:
    """What is served: "1", "8" and "32" batch slots, and "ragged"."""
    return {
        "1": Row(make_work(2), 1),
        "8": Row(make_work(8), 8),
        "32": Row(make_work(), 32),
        "ragged": Row(make_ragged_work(), 32),
    }


# The ceiling


def linear_layers(model: MiniGPT, num_tokens: int, num_logits: int) -> float:
    """CPU seconds of the linear layers alone, the best of 5 passes: no pass of the model takes less."""
    layers = [
        (module, module.in_features if isinstance(module, torch.nn.Linear) else module.weights.shape[1])
        for module in model.layers.modules()
        if isinstance(module, torch.nn.Linear | PackedLinear)
    ]
    inputs = {width: torch.randn(num_tokens, width) for _, width in layers}
    seconds = []
    with torch.inference_mode():
        for _ in range(5):
            start = time.thread_time()
            for layer, width in layers:
                layer(inputs[width])
            model.logits(inputs[SHAPE.hidden_size][:num_logits])
            seconds.append(time.thread_time() - start)
    return min(seconds)


# Are they the same tokens?


def agreement_of(name: str, llama: Any, runs: Runs, rows: Mapping[str, Row]) -> dict[str, Any]:
    """`agrees` for all answers of an engine's last round; and how many of them are not our engine's, token by token.

    Raises:
        RuntimeError: a token is not the likeliest by more than NEAR_TIE.
    """
    prompts, answers, ours = [], [], []
    for row, (work, _) in rows.items():
        if name in runs[row]:
            prompts += work.prompts
            answers += runs[row][name][-1].token_ids
            ours += runs[row]["minicache"][-1].token_ids
    agreement = agrees(llama, Work(prompts, [len(answer) for answer in answers]), answers)
    if agreement["largest_gap"] > NEAR_TIE:
        raise RuntimeError(f"{name} generates other tokens than the likeliest: {agreement}")
    num_that_differ = sum(answer != our for answer, our in zip(answers, ours, strict=True))
    return {"num_answers": len(answers), "num_answers_that_differ": num_that_differ} | agreement


def agrees(llama: Any, work: Work, token_ids: list[list[int]]) -> dict[str, Any]:
    """How many of an engine's tokens are those that `transformers` finds likeliest after the same tokens.

    Where they differ, `largest_gap` is by how much the token's logit is below the largest: a near tie, or an error.
    """
    gaps: list[Tensor] = []
    for prompt, answer in zip(work.prompts, token_ids, strict=True):
        with torch.inference_mode():
            logits = llama(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        its = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        gaps.append(logits.amax(dim=1) - its)
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
    for _ in track(range(ROUNDS), description="Decoding"):
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


def results(runs: Runs, rows: Mapping[str, Row], linear: Mapping[str, list[float]]) -> dict[str, Any]:
    """Tokens per second, and the ratios that pages state, all of one run of the benchmark.

    Args:
        runs: as `take_turns` returns them.
        rows: the work that they did.
        linear: seconds of the linear layers, as `take_turns` returns them.

    Returns:
        In `rows`, for each row: `tokens_per_second` of each engine (`rates`), null if it was not measured; the ratios
        of our engine to each other, and to the best other by the same clock. And the ceilings, with our share of them.
    """
    least = {name: min(values) for name, values in linear.items()}
    ceiling, laid_out = ({str(n): n / least[f"{name}_{n}"] for n in BATCHES} for name in ("stored", "laid_out"))
    # The prompts' pass gives each request its first token, and 99 more passes of 32 give the rest.
    whole = NUM_REQUESTS * NUM_NEW / (least["prompts"] + (NUM_NEW - 1) * least["stored_32"])
    each = {name: results_of(runs[name], row) for name, row in rows.items()}
    ours = {name: each[name]["tokens_per_second"]["minicache"]["cpu"] for name in ceiling}
    return {
        "num_requests": NUM_REQUESTS,
        "num_prompt_tokens": sum(map(len, rows["32"].work.prompts)),
        "num_new_tokens_each": NUM_NEW,
        "rows": each,
        "lowest_ratio_to_best_peer": min(row["ratio_to_best_peer"]["cpu"] for row in each.values()),
        "linear_tokens_per_second": {name: round(value, 1) for name, value in ceiling.items()},
        "laid_out_tokens_per_second": {name: round(value, 1) for name, value in laid_out.items()},
        "linear_prompts_ms": least["prompts"] * 1e3,
        "linear_whole_tokens_per_second": whole,
        "share_of_ceiling": {name: ours[name] / ceiling[name] for name in ours},
        "share_of_laid_out_ceiling": {name: ours[name] / laid_out[name] for name in ours},
        "share_of_whole_ceiling": ours["32"] / whole,
    }


def results_of(runs: Mapping[str, list[Run]], row: Row) -> dict[str, Any]:
    """One row of `results`."""
    num_tokens = sum(row.work.num_new)
    rate = {name: rates(runs[name], num_tokens) if runs.get(name) else None for name in ENGINES}
    peers = {name: its for name, its in rate.items() if its is not None and name != "minicache"}
    ours = rate["minicache"]
    assert ours is not None
    best_peer = max(peers, key=lambda name: peers[name]["cpu"])
    best = {clock: max(its[clock] for its in peers.values()) for clock in ours}
    return {
        "num_requests": len(row.work.prompts),
        "num_tokens": num_tokens,
        "max_num_seqs": row.max_num_seqs,
        "tokens_per_second": {name: its and _rounded(its) for name, its in rate.items()},
        "best_peer": best_peer,
        "ratio_to_best_peer": _ratio(ours, best),
        "ratio_to": {name: its and _ratio(ours, its) for name, its in rate.items() if name != "minicache"},
    }


def rates(runs: Iterable[Run], num_tokens: int) -> dict[str, float]:
    """Tokens per second of the fastest run and of the median, by the wall clock and by CPU time."""
    walls, cpus = zip(*((run.wall, run.cpu) for run in runs), strict=True)
    seconds = {
        "wall": min(walls),
        "wall_median": statistics.median(walls),
        "cpu": min(cpus),
        "cpu_median": statistics.median(cpus),
    }
    return {clock: num_tokens / value for clock, value in seconds.items()}


def _ratio(ours: Mapping[str, float], its: Mapping[str, float]) -> dict[str, float]:
    return {clock: ours[clock] / its[clock] for clock in ours}


def _rounded(rate: Mapping[str, float]) -> dict[str, float]:
    return {clock: round(value, 1) for clock, value in rate.items()}


def show(figures: Mapping[str, Any]) -> None:
    """Print tokens per CPU second of every engine, and how our engine does next to the best of the others."""
    table = Table("tokens per CPU second", box=SIMPLE_HEAD)
    for row in figures["rows"]:
        table.add_column(row, justify="right")
    for name in ENGINES:
        its = [row["tokens_per_second"][name] for row in figures["rows"].values()]
        table.add_row(name, *("–" if rate is None else f"{rate['cpu']:,.0f}" for rate in its))
    ratios = [row["ratio_to_best_peer"]["cpu"] for row in figures["rows"].values()]
    table.add_row("ours / best peer", *(f"{ratio:.2f}" for ratio in ratios))
    table.add_row("share of linear layers", *(f"{share:.2f}" for share in figures["share_of_ceiling"].values()))
    Console().print(table)
    Console().print(f"Share of the linear layers' ceiling for the whole run: {figures['share_of_whole_ceiling']:.2f}")


if __name__ == "__main__":
    main()
