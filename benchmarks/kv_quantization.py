"""What a KV cache of one byte a number costs: error by layer, text, equal tokens, bytes, time; and scales by block.

Two models: the shipped MiniGPT, and a Llama of random weights, whose rows are as large as initialisation makes them.
Each runs over a float32 cache, over int8 and over fp8 (e4m3), with a float32 scale for each token and KV head.

- **Error by layer**: of attention's output, relative (norm of the difference over norm of the exact one). `own` reads
  the exact keys and values of float32, rounded; `carried` is after layers that have read rounded ones too.
- **Text**: MiniGPT's completions at temperature 1, served by the engine, and read by the grammar's parser.
- **Equal tokens**: of greedy decoding. `forced`: after the same tokens, how often the next one is that of float32.
  `free`: of NUM_FREE tokens after the same prompt, how many are those of float32 at their place. The margin between
  the best and the second logit decides both, and a random model has barely any.
- **Bytes** of a token are counted in the storage's tensors.
- **Time** of a decode step, divided by that of float32: CPU time of this process, one thread; the three engines take
  turns, and of each step the least of REPEATS runs counts. `attention` is the compiled kernel alone.
- **Scales by block**: one scale for each block and KV head has to grow with the largest row so far, and the numbers
  that are in the block already are rounded again. MiniGPT's keys and values, of blocks of 16. `error_at_once`: if all
  16 tokens come in one step; `error_one_by_one`: if each comes in a step of its own; `share_that_differs`: of the
  numbers, between the two. With a scale for each row, nothing differs.

    python -m benchmarks.kv_quantization

Keys of results/kv_quantization.json: `models.minigpt`, `models.llama`, of each `errors` (a list of layers: layer, and
by dtype own and carried), `equal_tokens`, `bytes_per_token`, `step_ratio` (batch, context, by dtype), and of MiniGPT
`grammaticality`; `attention.points` (heads, batch, context, ratio by dtype); `by_block`, by dtype, with `error_by_row`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks._record import record
from benchmarks.grammaticality import PROMPTS, judge
from minicache import kernels
from minicache.cache.dense import KVCache
from minicache.cache.quantized import KV_CACHE_DTYPES, QuantizedStorage
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.grammar import Tokenizer, sample_text
from minicache.kernels.quantize import LARGEST, dequantize_rows, nearest, quantize_rows
from minicache.model import Decoder, MiniGPT, load_minigpt
from minicache.model.decoder import DecoderConfig

DTYPES: Final = {"float32": None, **{name: name for name in KV_CACHE_DTYPES}}
"""Name in the results → what `LLM` is given."""

NUM_COMPLETIONS: Final = 400
NUM_TEXT: Final = 400
NUM_PROMPTS: Final = 8
NUM_FREE: Final = 100
REPEATS: Final = 7
STEPS: Final = 24
BATCH: Final = 8
BLOCK_SIZE: Final = 16
ATTENTION: Final = ((8, 2, 32, 8, 400), (32, 8, 64, 1, 4096), (32, 8, 64, 8, 1024), (32, 8, 128, 4, 2048))
"""Query heads, KV heads, head size, sequences, tokens of each."""

Model = MiniGPT | Decoder


def main() -> None:
    torch.set_num_threads(1)
    models: dict[str, Model] = {"minigpt": load_minigpt(), "llama": random_llama()}
    found: dict[str, dict[str, Any]] = {}
    with Progress() as progress:
        task = progress.add_task("", total=4 * len(models) + 3)

        def note(what: str) -> None:
            progress.update(task, description=what)
            progress.advance(task)

        for name, model in models.items():
            prompts = prompts_of(model)
            note(f"{name}: errors by layer")
            found[name] = {"num_parameters": sum(each.numel() for each in model.parameters())}
            found[name]["errors"] = errors_by_layer(model, prompts[0])
            note(f"{name}: equal tokens")
            found[name]["equal_tokens"] = equal_tokens(model, prompts)
            note(f"{name}: bytes")
            found[name]["bytes_per_token"] = bytes_per_token(model)
            note(f"{name}: steps")
            found[name]["step_ratio"] = step_ratio(model, prompts)
        note("minigpt: grammaticality")
        found["minigpt"]["grammaticality"] = grammaticality(models["minigpt"])
        note("attention alone")
        attention = [attention_ratio(*shape) for shape in ATTENTION]
        note("scales by block")
        by_block = scales_by_block(models["minigpt"], prompts_of(models["minigpt"])[0])
    record(
        "kv_quantization",
        {
            "block_size": BLOCK_SIZE,
            "num_text_tokens": NUM_TEXT,
            "num_prompts": NUM_PROMPTS,
            "num_free_tokens": NUM_FREE,
            "models": found,
            "attention": {"points": attention},
            "by_block": by_block,
        },
    )


def random_llama() -> Decoder:
    """Llama's shape at a small size, with weights as Llama's are before training: normal, of deviation 0.02."""
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=2000,
        hidden_size=512,
        intermediate_size=1376,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        max_seq_len=1024,
        sliding_windows=(None,) * 6,
    )
    model = Decoder(config).eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data.normal_(0, 0.02)
    return model


def prompts_of(model: Model) -> list[list[int]]:
    """NUM_PROMPTS prompts of NUM_TEXT tokens: texts of the grammar for MiniGPT, any tokens for the other."""
    prompts = []
    for seed in range(NUM_PROMPTS):
        rng, tokens = random.Random(seed), list[int]()
        while len(tokens) < NUM_TEXT:
            if isinstance(model, MiniGPT):
                tokens += Tokenizer().encode_words(sample_text(rng))
            else:
                tokens.append(rng.randrange(model.config.vocab_size))
        prompts.append(tokens[:NUM_TEXT])
    return prompts


# --- error ------------------------------------------------------------------------------------------------------------


class Watched(KVCache):
    """A dense cache that notes what attention reads and gives, and rounds rows first if asked to."""

    def __init__(self, model: Model, dtype: torch.dtype | None) -> None:
        config = model.config
        super().__init__(config.num_layers, 1, config.num_kv_heads, config.max_seq_len, config.head_dim)
        self.rounded_to = dtype
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.outputs: list[Tensor] = []
        self.rounded_outputs: dict[str, list[Tensor]] = {name: [] for name in KV_CACHE_DTYPES}

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """As `KVCache.append`, of the rounded rows; the exact ones are noted."""
        self.rows.append((k, v))
        super().append(layer, rounded(k, self.rounded_to), rounded(v, self.rounded_to))

    def attend(self, layer: int, q: Tensor, *, window: int | None = None) -> Tensor:
        """As `KVCache.attend`; noted are its output, and what it would be over the exact rows rounded."""
        out = super().attend(layer, q, window=window)
        self.outputs.append(out)
        for name, dtype in KV_CACHE_DTYPES.items():
            k, v = (rounded(each, dtype) for each in self.rows[layer])
            alone = KVCache(1, 1, k.shape[1], k.shape[2], k.shape[3])
            alone.append(0, k, v)
            self.rounded_outputs[name].append(alone.attend(0, q, window=window))
        return out


def rounded(rows: Tensor, dtype: torch.dtype | None) -> Tensor:
    """What a quantized cache gives back of rows `[…, d]`."""
    return rows if dtype is None else dequantize_rows(*quantize_rows(rows, dtype))


@torch.inference_mode()
def errors_by_layer(model: Model, tokens: Sequence[int]) -> list[dict[str, float]]:
    """Of attention's output over a whole text, layer by layer."""
    exact = Watched(model, None)
    model(torch.tensor([tokens]), exact)
    layers: list[dict[str, float]] = [{"layer": layer} for layer in range(model.config.num_layers)]
    for name, dtype in KV_CACHE_DTYPES.items():
        other = Watched(model, dtype)
        model(torch.tensor([tokens]), other)
        for entry, out, own, carried in zip(
            layers, exact.outputs, exact.rounded_outputs[name], other.outputs, strict=True
        ):
            entry[f"{name}_own"], entry[f"{name}_carried"] = relative(own, out), relative(carried, out)
    return layers


def relative(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm of the exact."""
    return float(f"{((found - exact).norm() / exact.norm()).item():.3g}")


# --- tokens -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def equal_tokens(model: Model, prompts: Sequence[Sequence[int]]) -> dict[str, dict[str, float]]:
    """How often a greedy token is that of the float32 cache."""
    exact = [model(torch.tensor([prompt])).argmax(-1) for prompt in prompts]
    params = SamplingParams(max_tokens=NUM_FREE, ignore_eos=True)
    started = [list(prompt[:20]) for prompt in prompts]
    free = {name: token_ids(LLM(model, kv_cache_dtype=dtype), started, params) for name, dtype in DTYPES.items()}
    found = {}
    for name, dtype in KV_CACHE_DTYPES.items():
        forced = [model(torch.tensor([prompt]), Watched(model, dtype)).argmax(-1) for prompt in prompts]
        same = torch.stack(forced).eq(torch.stack(exact)).float().mean()
        pairs = list(zip(free[name], free["float32"], strict=True))
        prefixes = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), NUM_FREE) for pair in pairs]
        found[name] = {
            "forced": round(same.item(), 4),
            "free": round(sum(a == b for pair in pairs for a, b in zip(*pair, strict=True)) / NUM_FREE / len(pairs), 4),
            "mean_tokens_before_the_first_difference": sum(prefixes) / len(prefixes),
        }
    return found


def token_ids(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(prompts, params)]


def grammaticality(model: Model) -> dict[str, dict[str, Any]]:
    """Of the same prompts and seeds over each cache."""
    tokenizer, found = Tokenizer(), {}
    texts = [PROMPTS[i % len(PROMPTS)] for i in range(NUM_COMPLETIONS)]
    params = [SamplingParams(max_tokens=128, temperature=1.0, seed=seed) for seed in range(NUM_COMPLETIONS)]
    for name, dtype in DTYPES.items():
        llm = LLM(model, tokenizer=tokenizer, kv_cache_dtype=dtype)
        answers = llm.generate(texts, params)
        judged = [judge(text, answer.token_ids, tokenizer) for text, answer in zip(texts, answers, strict=True)]
        num_wrong = sum(each.error is not None for each in judged)
        found[name] = {"completions": len(judged), "share": round(1 - num_wrong / len(judged), 4)}
    return found


# --- bytes and time ---------------------------------------------------------------------------------------------------


def bytes_per_token(model: Model) -> dict[str, float]:
    """Counted: the bytes of all tensors of a storage, over its slots. And how many times as many tokens fit."""
    found = {}
    for name, dtype in DTYPES.items():
        storage = LLM(model, kv_cache_dtype=dtype, num_blocks=64).storage
        assert storage is not None
        tensors = []
        for layer in range(storage.num_layers):
            tensors += [storage.k(layer), storage.v(layer)]
            if isinstance(storage, QuantizedStorage):
                tensors += [storage.k_scale(layer), storage.v_scale(layer)]
        found[name] = sum(each.nbytes for each in tensors) / (64 * BLOCK_SIZE)
    return found | {f"times_{name}": round(found["float32"] / found[name], 2) for name in KV_CACHE_DTYPES}


def step_ratio(model: Model, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Decode steps of a batch, in turns."""
    least, names = {name: [float("inf")] * STEPS for name in DTYPES}, list(DTYPES)
    for _ in range(REPEATS):
        engines = {name: LLM(model, kv_cache_dtype=dtype) for name, dtype in DTYPES.items()}
        for llm in engines.values():
            touch(llm)
            for index in range(BATCH):
                llm.add_request(list(prompts[index % len(prompts)]), SamplingParams(max_tokens=99, ignore_eos=True))
            llm.step()  # the prompts
        for step in range(STEPS):
            for name in names[step % 3 :] + names[: step % 3]:
                start = time.process_time()
                engines[name].step()
                least[name][step] = min(least[name][step], time.process_time() - start)
    ratios = {name: round(sum(least[name]) / sum(least["float32"]), 3) for name in KV_CACHE_DTYPES}
    return {"batch": BATCH, "context": len(prompts[0]), **ratios}


def touch(llm: LLM) -> None:
    """Write to all of a cache's memory: the first write to a page takes as long as some kernels."""
    assert llm.storage is not None
    for layer in range(llm.storage.num_layers):
        llm.storage.k(layer).view(torch.uint8).fill_(0)
        llm.storage.v(layer).view(torch.uint8).fill_(0)


def attention_ratio(heads: int, kv_heads: int, head_dim: int, batch: int, context: int) -> dict[str, Any]:
    """The decode kernel alone, in turns."""
    num_blocks = batch * -(-context // BLOCK_SIZE)
    k, v = torch.randn(2, num_blocks, BLOCK_SIZE, kv_heads, head_dim)
    metadata = kernels.AttentionMetadata(torch.randperm(num_blocks).view(batch, -1), torch.full((batch,), context))
    q = torch.randn(batch, heads, head_dim)
    caches: dict[str, tuple[tuple[Tensor, Tensor], dict[str, Any]]] = {"float32": ((k, v), {})}
    for name, dtype in KV_CACHE_DTYPES.items():
        (k_numbers, k_scale), (v_numbers, v_scale) = quantize_rows(k, dtype), quantize_rows(v, dtype)
        caches[name] = ((k_numbers, v_numbers), {"k_scale": k_scale, "v_scale": v_scale})
    least = dict.fromkeys(caches, float("inf"))
    for _ in range(40):
        for name, (cache, scales) in caches.items():
            start = time.thread_time()
            kernels.paged_attention(q, *cache, metadata, **scales)
            least[name] = min(least[name], time.thread_time() - start)
    ratios = {name: round(least[name] / least["float32"], 2) for name in KV_CACHE_DTYPES}
    return {"heads": f"{heads}/{kv_heads} of {head_dim}", "batch": batch, "context": context, **ratios}


# --- a scale for each block -------------------------------------------------------------------------------------------


@torch.inference_mode()
def scales_by_block(model: Model, tokens: Sequence[int]) -> dict[str, dict[str, float]]:
    """Keys and values of all layers, in whole blocks, rounded in three ways."""
    watched = Watched(model, None)
    model(torch.tensor([tokens]), watched)
    rows = torch.cat([each for pair in watched.rows for each in pair])  # [2 · L, H_kv, S, d]
    blocks = rows.unfold(2, BLOCK_SIZE, BLOCK_SIZE).flatten(0, 2).transpose(1, 2)  # [N, block_size, d]
    found = {}
    for name, dtype in KV_CACHE_DTYPES.items():
        scale = blocks.abs().amax(dim=(1, 2)) / LARGEST[dtype]
        at_once = nearest(blocks / scale[:, None, None], dtype)
        one_by_one, grown = filled_one_by_one(blocks, dtype)
        assert grown.equal(scale)
        differs = at_once.float() != one_by_one.float()
        found[name] = {
            "error_by_row": relative(rounded(blocks, dtype), blocks),
            "error_at_once": relative(at_once.float() * scale[:, None, None], blocks),
            "error_one_by_one": relative(one_by_one.float() * scale[:, None, None], blocks),
            "share_that_differs": round(differs.float().mean().item(), 4),
        }
    return found


def filled_one_by_one(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers and scales of blocks `[N, block_size, d]` after each of their rows was added to those before."""
    numbers, scale = torch.zeros(blocks.shape).to(dtype), torch.zeros(len(blocks))
    for t in range(BLOCK_SIZE):
        grown = torch.maximum(scale, blocks[:, t].abs().amax(dim=1) / LARGEST[dtype])
        before = numbers.float() * scale[:, None, None]
        again = nearest(before / grown[:, None, None], dtype)
        is_larger = (grown > scale)[:, None, None]
        numbers = torch.where(is_larger, again.float(), numbers.float()).to(dtype)
        numbers[:, t] = nearest(blocks[:, t] / grown[:, None], dtype)
        scale = grown
    return numbers, scale


if __name__ == "__main__":
    main()
