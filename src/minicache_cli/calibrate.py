"""`minicache calibrate`: how long a step of the engine takes on this machine, for the simulator to reckon with."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import track

from minicache_cli.folders import make_folder
from minicache_cli.labs import Mine, use_labs
from minicache_cli.show import machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicache.engine.llm import LLM
    from minicache.scheduler import Scheduler, SchedulerOutput
    from minicache.simulator.costs import HostCost, StepLoad

app = typer.Typer()

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
PROMPTS: Final = (4, 24, 80, 180, 320)
"""Tokens of a burst's prompts, in the mean: from half to one and a half of it. Unequal, because a real batch is, and
equal ones are quicker: the engine can put them into one rectangle. Every size is measured with every length."""
NUM_DECODES: Final = 8
"""Decode steps of each burst."""
MAX_NUM_BATCHED_TOKENS: Final = 1024
"""Per step. A larger burst is admitted over several steps, so steps with both prefill and decode are measured too."""
NUM_BLOCKS: Final = 2048
FEATURES: Final = {
    "per_sequence": "num_sequences",
    "per_new_token": "num_new_tokens",
    "per_cached_token": "num_cached_tokens",
    "per_prefill": "num_prefills",
    "per_prefill_pair": "num_prefill_pairs",
}
"""What a step's time grows with: field of `HostCost` → field of `StepLoad`."""
SWAPPED_BLOCKS: Final = 64


@dataclass(frozen=True, slots=True)
class Measurement:
    """A step of the engine: what was in it, and how long it took."""

    load: StepLoad
    seconds: float


@app.command(rich_help_panel="For teachers and authors")
def calibrate(
    out: Annotated[Path, typer.Option(help="Output file.")] = Path("out/calibration.json"),
    rounds: Annotated[int, typer.Option(min=1, help="Measurements per step; the median is used.")] = 3,
    mine: Mine = False,
) -> None:
    """Measure the engine's steps with MiniGPT on this machine, on one thread, for `minicache simulate --host`."""
    console = Console(highlight=False)
    if mine:
        use_labs(console)
    make_folder(out.parent)
    import torch

    torch.set_num_threads(1)  # steps this small are slower on two
    measurements = measure(rounds, console)
    cost = fit(measurements, swap_seconds(rounds))
    cost.save(out)
    shortest = min(each.seconds for each in measurements)
    console.print(f"{len(measurements)} steps, {1e3 * shortest:.2f} ms the shortest. Time of a step:", soft_wrap=True)
    for name, seconds in (
        ("fixed", cost.fixed),
        ("with more than one request", cost.together),
        ("per request in the batch", cost.per_sequence),
        ("per new token", cost.per_new_token),
        ("per cached token read", cost.per_cached_token),
        ("per request in prefill", cost.per_prefill),
        ("per pair of prompt tokens of which one attends to the other", cost.per_prefill_pair),
    ):
        console.print(f"  {1e6 * seconds:8,.4g} µs {name}")
    errors = [abs(cost.step_seconds(each.load) / each.seconds - 1) for each in measurements]
    console.print(f"Median error on these steps: {median(errors):.1%}.")
    console.print(f"{out} written. Use it: minicache simulate --host {out}", soft_wrap=True)


def measure(rounds: int, console: Console) -> list[Measurement]:
    """Bursts of all sizes and lengths through the engine, step by step. Each is run `rounds` times.

    Returns:
        Every step of every burst, with the median of its times.
    """
    from minicache.engine.llm import LLM
    from minicache.scheduler.observe import Observer
    from minicache.simulator.costs import StepLoad

    class Loads(Observer):
        """Notes what the next step will compute."""

        latest: StepLoad

        def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
            batch = zip(output.num_scheduled_tokens.values(), output.scheduled, strict=True)
            self.latest = StepLoad.of((num_new, request.num_computed_tokens) for num_new, request in batch)

    loads = Loads()
    engine = LLM(
        scheduler="paged",
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        observers=[loads],
    )
    bursts = [(batch, prompt) for batch in BATCHES for prompt in PROMPTS]
    times: defaultdict[tuple[int, int], list[list[float]]] = defaultdict(list)
    seen: dict[tuple[int, int], list[StepLoad]] = {}
    warm_up = (3, 24)  # the first steps of a process are slower: none of the bursts
    for burst in track([warm_up, *bursts * rounds], description="Measuring", console=console, transient=True):
        _add(engine, *burst)
        seconds, seen[burst] = [], []
        while engine.has_unfinished:
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
            seen[burst].append(loads.latest)
        times[burst].append(seconds)
    return [
        Measurement(load, median(each))
        for burst in bursts
        for load, each in zip(seen[burst], zip(*times[burst], strict=True), strict=True)
    ]


def _add(engine: LLM, batch: int, prompt: int) -> None:
    """Give the engine a burst of requests with random prompts of about that length, always the same ones."""
    from minicache.engine.sampling import SamplingParams

    rng, vocab_size = Random(f"{batch} {prompt}"), engine.model.config.vocab_size
    params = SamplingParams(max_tokens=1 + NUM_DECODES, ignore_eos=True)
    for _ in range(batch):
        length = rng.randint(prompt // 2, prompt * 3 // 2)
        engine.add_request([rng.randrange(vocab_size) for _ in range(length)], params)


def fit(measurements: Sequence[Measurement], per_swapped_token: float) -> HostCost:
    """The `HostCost` that comes closest, in relative terms, with no negative number in it.

    Least squares over seconds divided by seconds, so a step of 5 ms counts as much as one of 500. A coefficient
    that would be negative is left out and the rest is fitted again (a step does not get faster by having more in it).
    """
    import numpy as np

    from minicache.simulator.costs import HostCost

    seconds = np.array([each.seconds for each in measurements])
    features = np.array([_features(each.load) for each in measurements])
    kept = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, kept] / seconds[:, None], np.ones(len(seconds)), rcond=None)
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    names = ("fixed", "together", *FEATURES)
    costs = dict.fromkeys(names, 0.0) | {names[place]: float(found[turn]) for turn, place in enumerate(kept)}
    return HostCost(machine=_machine(), model="MiniGPT", per_swapped_token=per_swapped_token, **costs)


def _features(load: StepLoad) -> tuple[int, ...]:
    """What `HostCost`'s numbers are multiplied with, in their order."""
    return 1, int(load.num_sequences > 1), *(getattr(load, name) for name in FEATURES.values())


def swap_seconds(rounds: int) -> float:
    """How long it takes to copy one token's keys and values to the host or back, in blocks, median of the rounds."""
    from minicache.cache.paged import PagedStorage
    from minicache.cache.swap import HostStorage
    from minicache.memory.blocks import BlockPool
    from minicache.model import load_minigpt

    config = load_minigpt().config
    pool = BlockPool(SWAPPED_BLOCKS, 16)
    storage = PagedStorage(pool, config.num_layers, config.num_kv_heads, config.head_dim)
    host = HostStorage(storage, SWAPPED_BLOCKS)
    pairs = [(block, SWAPPED_BLOCKS - 1 - block) for block in range(SWAPPED_BLOCKS)]
    times = []
    for _ in range(2 * rounds + 1):
        start = time.perf_counter()
        host.swap_out(pairs)
        host.swap_in([(to, block) for block, to in pairs])
        times.append(time.perf_counter() - start)
    return median(times) / (2 * SWAPPED_BLOCKS * pool.block_size)


def _machine() -> str:
    """The CPU's model and what runs on it, in a line."""
    import torch

    return f"{machine()}, {torch.get_num_threads()} thread, torch {torch.__version__}"
