"""Asynchronous scheduling: how long a model waits for Python in a decode step, and what overlapping them gains.

Two engines on the same model, one with `async_scheduling=True`, decode 1, 8 and 64 requests in turn. In each round the
requests are new, so both compute the same steps: WARM_UP steps with the prompts, and then a window of steps that is
timed. Recorded is the time of a step, and the part of it in which the model does not run: neither its forward pass nor
the picking of its tokens, wherever their Python runs. Minimum and median of the windows; the median ratio is of pairs
of windows, one right after the other. One thread for PyTorch. Two models: the shipped one, and SmolLM2-135M-Instruct
(`minicache pull smollm2`).

    python -m benchmarks.async_scheduling
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks._record import record
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.model import Decoder, MiniGPT, load_minigpt
from minicache.model.gguf import load_gguf
from minicache.model.shelf import find_on_shelf

BATCHES = (1, 8, 64)
STEPS = {"minigpt": {1: 60, 8: 60, 64: 30}, "smollm2": {1: 20, 8: 16, 64: 6}}
ROUNDS = {"minigpt": 60, "smollm2": 20}
NUM_PROMPT, WARM_UP = 16, 4
MODES = ("synchronous", "asynchronous")


class Busy:
    """An engine whose model's time is kept: that of `run_model` and of `sample`, in whichever thread.

    Args:
        model: what it runs.
        overlaps: whether it schedules asynchronously.

    Attributes:
        llm: the engine.
        seconds: in which the model ran.
    """

    def __init__(self, model: MiniGPT | Decoder, *, overlaps: bool) -> None:
        self.llm = LLM(model, num_blocks=max(BATCHES) * 8, async_scheduling=overlaps)
        self.seconds = 0.0
        for name in ("run_model", "sample"):
            setattr(self.llm, name, self._timed(getattr(self.llm, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed

    def window(self, batch: int, num_steps: int) -> tuple[float, float]:
        """Seconds of a step, and of that the share in which the model does not run."""
        params = SamplingParams(max_tokens=num_steps + 2 * WARM_UP, ignore_eos=True)
        prompts = [[5 + (number + place) % 300 for place in range(NUM_PROMPT)] for number in range(batch)]
        names = [self.llm.add_request(prompt, params) for prompt in prompts]
        for _ in range(WARM_UP):
            self.llm.step()
        busy, begun = self.seconds, time.perf_counter()
        for _ in range(num_steps):
            self.llm.step()
        seconds, busy = time.perf_counter() - begun, self.seconds - busy
        for name in names:
            self.llm.abort_request(name)
        while self.llm.has_unfinished:
            self.llm.step()
        return seconds / num_steps, max(0.0, 1 - busy / seconds)


def main() -> None:
    torch.set_num_threads(1)
    models: dict[str, MiniGPT | Decoder] = {"minigpt": load_minigpt(), "smollm2": load_gguf(find_on_shelf("smollm2"))}
    figures = {name: of_model(name, model) for name, model in models.items()}
    show(figures)
    record("async_scheduling", {"num_prompt_tokens": NUM_PROMPT, "threads": 1, **figures})


def of_model(name: str, model: MiniGPT | Decoder) -> dict[str, Any]:
    """Both engines, in turn, at each batch size."""
    engines = {mode: Busy(model, overlaps=mode == "asynchronous") for mode in MODES}
    for engine in engines.values():  # the first steps of a process are slower
        engine.window(BATCHES[1], STEPS[name][BATCHES[1]])
    batches = {}
    for batch in BATCHES:
        windows: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for turn in track(range(ROUNDS[name]), description=f"{name}, {batch} requests"):
            for mode in MODES if turn % 2 else MODES[::-1]:
                windows[mode].append(engines[mode].window(batch, STEPS[name][batch]))
        batches[str(batch)] = compared(windows, batch)
    return {"num_parameters": model.num_parameters(), "rounds": ROUNDS[name], "batches": batches}


def compared(windows: dict[str, list[tuple[float, float]]], batch: int) -> dict[str, Any]:
    """What is recorded of a batch size."""
    seconds = {mode: [each for each, _ in windows[mode]] for mode in MODES}
    ratios = [before / after for before, after in zip(*seconds.values(), strict=True)]
    return {
        "ms_per_step": {mode: round(1000 * min(seconds[mode]), 4) for mode in MODES},
        "median_ms_per_step": {mode: round(1000 * statistics.median(seconds[mode]), 4) for mode in MODES},
        "share_without_the_model": {
            mode: round(statistics.median(share for _, share in windows[mode]), 4) for mode in MODES
        },
        "tokens_per_second": {mode: round(batch / min(seconds[mode]), 1) for mode in MODES},
        "asynchronous_over_synchronous": round(min(seconds[MODES[0]]) / min(seconds[MODES[1]]), 4),
        "median_asynchronous_over_synchronous": round(statistics.median(ratios), 4),
    }


def show(figures: dict[str, Any]) -> None:
    """A table, a line for each model and batch size."""
    table = Table(box=SIMPLE_HEAD, title="A step with and without asynchronous scheduling")
    for heading in ("model", "requests", "ms", "async", "waits", "async", "tokens/s", "median"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, its in figures.items():
        for batch, each in its["batches"].items():
            table.add_row(
                name,
                batch,
                *(f"{each['ms_per_step'][mode]:.3f}" for mode in MODES),
                *(f"{each['share_without_the_model'][mode]:.1%}" for mode in MODES),
                f"× {each['asynchronous_over_synchronous']:.3f}",
                f"× {each['median_asynchronous_over_synchronous']:.3f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
