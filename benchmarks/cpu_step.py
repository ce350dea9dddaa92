"""Where a decode step of the engine goes on a CPU: through the model's modules, and fused.

The random Llama of `benchmarks/engine.py` decodes 1, 8 and 32 sequences of about 130 tokens. The same engine runs its
steps in two ways in turn: fused (`minicache.model.fused`), and through the modules, as it runs any model. Of the fused
steps some are run with a clock around the products, attention and the small kernels; what is left of the forward pass
is Python between them, and what is left of the step is the engine: scheduler, picking, emitting. Then a step of the
prompts of 32 requests. CPU time of one thread; minimum and median.

    python -m benchmarks.cpu_step
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from rich.progress import track

from benchmarks._record import record
from benchmarks.engine import SHAPE, make_work
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.kernels.cpu import rows
from minicache.kernels.cpu.steps import StepPlan
from minicache.model import MiniGPT, fused

BATCHES = (1, 8, 32)
WARM_UP, ROUNDS, STEPS = 40, 10, 5
SMALL_KERNELS = ("rms_norm", "add_rms_norm", "silu_mul", "rope_store")
PROMPT_ROUNDS = 7


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MiniGPT(SHAPE).eval()
    decode = {str(batch): decode_steps(model, batch) for batch in track(BATCHES, description="Decoding")}
    record(
        "cpu_step",
        {
            "model": f"random Llama, {model.num_parameters():,} parameters, float32",
            "threads": 1,
            "repeats": ROUNDS * STEPS,
            "decode": decode,
            "prompts": prompt_steps(model),
        },
    )


def decode_steps(model: MiniGPT, batch: int) -> dict[str, Any]:
    """Microseconds of a decode step of so many sequences, by way and by part."""
    llm = new_engine(model, batch)
    for _ in range(WARM_UP):
        llm.step()
    runner = llm.runner
    seconds: dict[str, list[float]] = {"fused": [], "modules": [], "forward": []}
    parts: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            seconds["fused"].append(timed(llm.step))
        for _ in range(STEPS):
            with clocks() as clock:
                llm.step()
            parts.append(clock)
        llm.runner = None
        for _ in range(STEPS):
            seconds["modules"].append(timed(llm.step))
        llm.runner = runner
    least = {name: min(part[name] for part in parts) for name in parts[0]}
    fused_us, forward = min(seconds["fused"]) * 1e6, least.pop("forward") * 1e6
    shares = {name: value * 1e6 for name, value in least.items()}
    shares["between"] = forward - sum(shares.values())
    shares["engine"] = fused_us - forward
    return {
        "modules_us": min(seconds["modules"]) * 1e6,
        "fused_us": fused_us,
        "median_modules_us": statistics.median(seconds["modules"]) * 1e6,
        "median_fused_us": statistics.median(seconds["fused"]) * 1e6,
        "modules_over_fused": min(seconds["modules"]) * 1e6 / fused_us,
        "parts_us": shares,
        "products_share": shares["products"] / fused_us,
    }


def prompt_steps(model: MiniGPT) -> dict[str, Any]:
    """Milliseconds of the step that computes all prompts of 32 requests, in both ways."""
    seconds: dict[str, list[float]] = {"fused": [], "modules": []}
    for _ in track(range(PROMPT_ROUNDS), description="Prompts"):
        for name, values in seconds.items():
            llm = new_engine(model, 32)
            if name == "modules":
                llm.runner = None
            values.append(timed(llm.step))
    return {
        "num_tokens": sum(map(len, make_work().prompts)),
        "modules_ms": min(seconds["modules"]) * 1e3,
        "fused_ms": min(seconds["fused"]) * 1e3,
        "modules_over_fused": min(seconds["modules"]) / min(seconds["fused"]),
    }


def new_engine(model: MiniGPT, batch: int) -> LLM:
    """An engine with so many requests, none of which ends while it is measured."""
    llm = LLM(model, max_num_seqs=batch)
    for prompt in make_work(batch).prompts:
        llm.add_request(prompt, SamplingParams(max_tokens=SHAPE.max_seq_len - len(prompt), ignore_eos=True))
    return llm


def timed(call: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """CPU seconds of the products, attention, the small kernels and the whole forward pass while this is open."""
    seconds = dict.fromkeys(("products", "attention", "kernels", "forward"), 0.0)

    def clocked(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.thread_time()
            result = call(*args)
            seconds[part] += time.thread_time() - start
            return result

        return run

    places: list[tuple[Any, str, str]] = [
        (fused, "_product", "products"),
        (StepPlan, "attend", "attention"),
        (fused, "logits_at", "forward"),
    ]
    places += [(rows, name, "kernels") for name in SMALL_KERNELS]
    with ExitStack() as stack:
        for place, name, part in places:
            stack.enter_context(mock.patch.object(place, name, clocked(part, getattr(place, name))))
        yield seconds


if __name__ == "__main__":
    main()
