"""What engine and server cost over the bare model: four ladders in one run, at 1, 16 and 64 requests.

- **model**: what a step cannot do without. One pass of the model over the same contexts, as the engine runs it, the
  likeliest token of each sequence, and that as Python's ints. No scheduler, no text.
- **engine**: `LLM.step()` in the same thread, as often as it takes.
- **thread**: `minicache serve --in-process`, so many streams over HTTP, each on its own connection. The client is this
  process: the load client, which notes when each token came.
- **server**: `minicache serve`, whose engine has a process of its own; the same clients.

All requests come at once, with prompts of 64 tokens, and want 128 more, whatever these are. Counted are the tokens from
the 33rd to the 97th of each answer: by then all requests run, and none has ended. So all four ladders compute the same
steps. The ladders take turns in another order each round. Time is cut into windows of 16 tokens, recorded is of each
window the least of all rounds, and their sum: what the machine takes while no one disturbs it. Processor time is
recorded too, of server and engine together: on a machine with fewer cores than busy threads, it is what serving costs.

Three models: the shipped one (its steps are short, so all else weighs more), the random Llama of
`benchmarks/engine.py`, 6.6 times as large, and SmolLM2-135M-Instruct (`minicache pull smollm2`). One thread for
PyTorch.

    python -m benchmarks.serving_overhead
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks._record import record
from benchmarks.engine import SHAPE
from minicache.engine.llm import LLM
from minicache.engine.picking import greedy
from minicache.engine.sampling import SamplingParams
from minicache.grammar import Tokenizer
from minicache.memory.blocks import blocks_for
from minicache.model import Decoder, MiniGPT, load_minigpt, save_minigpt
from minicache.model.gguf import load_gguf
from minicache.model.shelf import find_on_shelf
from minicache.model.tokenizer import ModelTokenizer, gguf_tokenizer
from minicache.request import Request
from minicache.scheduler import SchedulerOutput
from minicache.serving.load import Endpoint, LoadRun, fixed_arrivals, make_requests

GOAL = 0.15
BATCHES = (1, 16, 64)
ROUNDS = {"minigpt": 7, "llama": 4, "smollm2": 3}
NUM_PROMPT, NUM_NEW = 64, 128
FIRST, LAST, WINDOW = 32, 96, 16
BLOCK_SIZE = 16
NUM_BLOCKS = max(BATCHES) * blocks_for(NUM_PROMPT + NUM_NEW, BLOCK_SIZE)
LADDERS = ("model", "engine", "thread", "server")


class Words:
    """A tokenizer for the random model: every token is a word, so its answers have a text like any other's."""

    end_token_id = -1

    def __init__(self) -> None:
        self._words = Tokenizer().words[1:]

    def encode(self, text: str) -> list[int]:
        """Prompts are token ids here."""
        raise ValueError("no texts")

    def decode(self, ids: Sequence[int], /) -> str:
        """The words, and spaces between them."""
        return " ".join(self._words[each % len(self._words)] for each in ids)


@dataclass(slots=True)
class Run:
    """One ladder's answer to so many requests.

    Attributes:
        times: when the n-th token had come, the mean of all requests, in seconds from anywhere; NUM_NEW of them.
        cpu: processor time of the process meanwhile, at the same moments; empty if it was not looked at.
    """

    times: list[float]
    cpu: list[float] = field(default_factory=list)

    def windows(self) -> list[float]:
        """Seconds of each window."""
        return [self.times[at + WINDOW] - self.times[at] for at in range(FIRST, LAST, WINDOW)]


def main() -> None:
    torch.set_num_threads(1)
    figures = {name: of_model(name) for name in ROUNDS}
    show(figures)
    record(
        "serving_overhead",
        {
            "goal": GOAL,
            "num_prompt_tokens": NUM_PROMPT,
            "num_new_tokens": NUM_NEW,
            "counted": [FIRST + 1, LAST + 1],
            "window": WINDOW,
            **figures,
        },
    )


def make_model(name: str) -> tuple[MiniGPT | Decoder, Words | Tokenizer | ModelTokenizer]:
    """A model and its tokenizer; everyone who calls this gets the same weights."""
    if name == "minigpt":
        return load_minigpt(), Tokenizer()
    if name == "smollm2":
        path = find_on_shelf(name)
        tokenizer = gguf_tokenizer(path)
        assert tokenizer is not None
        return load_gguf(path), tokenizer
    torch.manual_seed(0)
    return MiniGPT(SHAPE).eval(), Words()


def make_prompts(vocab_size: int, batch: int) -> list[list[int]]:
    """As many prompts."""
    rng = random.Random(batch)
    return [[rng.randrange(1, vocab_size) for _ in range(NUM_PROMPT)] for _ in range(batch)]


def make_llm(kind: type[LLM], name: str) -> LLM:
    """An engine as `minicache serve` makes it, with room for all."""
    model, tokenizer = make_model(name)
    return kind(model, tokenizer=tokenizer, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, prefix_caching=True)


# The four ladders


def of_model(name: str) -> dict[str, Any]:
    """All ladders of one model."""
    model, _ = make_model(name)
    llm = make_llm(LLM, name)
    with a_server(name, in_process=True) as threaded, a_server(name, in_process=False) as apart:
        ladders: dict[str, Callable[[int, int], Run]] = {
            "model": partial(bare, make_llm(LLM, name)),
            "engine": partial(stepped, llm),
            "thread": partial(served, *threaded, model.config.vocab_size),
            "server": partial(served, *apart, model.config.vocab_size),
        }
        rng = random.Random(0)
        turns = [(turn, batch, each) for turn in range(ROUNDS[name]) for batch in BATCHES for each in in_turns(rng)]
        runs: dict[tuple[str, int], list[Run]] = {(each, batch): [] for each in LADDERS for batch in BATCHES}
        for each in LADDERS:  # the first steps of a process are slower
            ladders[each](BATCHES[1], -1)
        for turn, batch, each in track(turns, description=f"Serving {name}"):
            runs[each, batch].append(ladders[each](batch, turn))
    num_parameters = sum(each.numel() for each in model.parameters())
    return {
        "num_parameters": num_parameters,
        "rounds": ROUNDS[name],
        "batches": {str(batch): compared({each: runs[each, batch] for each in LADDERS}, batch) for batch in BATCHES},
    }


def in_turns(rng: random.Random) -> list[str]:
    """The ladders in an order by chance."""
    return rng.sample(LADDERS, len(LADDERS))


def bare(llm: LLM, batch: int, turn: int) -> Run:
    """The model in a loop, as the engine runs it (`LLM.run_model`); every request has its blocks from the start."""
    num_blocks = blocks_for(NUM_PROMPT + NUM_NEW, BLOCK_SIZE)
    requests = []
    for number, prompt in enumerate(make_prompts(llm.model.config.vocab_size, batch)):
        request = Request(number, prompt, NUM_NEW)
        request.block_ids = list(range(number * num_blocks, (number + 1) * num_blocks))
        requests.append(request)
    times, cpu, count = [], [], NUM_PROMPT
    for _ in range(NUM_NEW):
        output = SchedulerOutput(dict.fromkeys(range(batch), count), requests)
        token_ids = greedy(llm.run_model(output)).tolist()
        for request, token_id in zip(requests, token_ids, strict=True):
            request.num_computed_tokens += count
            request.output_token_ids.append(token_id)
        times.append(time.perf_counter())
        cpu.append(time.process_time())
        count = 1
    return Run(times, cpu)


def stepped(llm: LLM, batch: int, turn: int) -> Run:
    """The engine in a loop. The prompts of each turn are others, so the prefix cache finds nothing."""
    vocab_size = llm.model.config.vocab_size
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    for request in requests_of(batch, turn, vocab_size):
        llm.add_request(request.prompt_token_ids, params)
    times, cpu = [], []
    while llm.has_unfinished:
        llm.step()
        times.append(time.perf_counter())
        cpu.append(time.process_time())
    assert len(times) == NUM_NEW
    return Run(times, cpu)


def served(endpoint: Endpoint, cpu: Callable[[], float], vocab_size: int, batch: int, turn: int) -> Run:
    """The server, and as many clients."""
    run = LoadRun(endpoint, requests_of(batch, turn, vocab_size))
    before = cpu()
    asyncio.run(run.run())
    spent = cpu() - before
    for outcome in run.outcomes:
        if outcome.status != "ok" or outcome.num_tokens != NUM_NEW or len(outcome.token_times) != NUM_NEW:
            raise RuntimeError(f"an answer is not what was asked for: {outcome}")
    if max(outcome.token_times[FIRST] for outcome in run.outcomes) > min(
        outcome.token_times[-1] for outcome in run.outcomes
    ):
        raise RuntimeError("not all requests were running together while tokens were counted")
    times = [statistics.fmean(at) for at in zip(*(outcome.token_times for outcome in run.outcomes), strict=True)]
    return Run(times, [spent])


def requests_of(batch: int, turn: int, vocab_size: int) -> list[Any]:
    """What is asked for: all at once, token ids for prompts."""
    arrivals = fixed_arrivals(batch, float("inf"), NUM_PROMPT, NUM_NEW)
    return make_requests(arrivals, model="bench", vocab_size=vocab_size, seed=1000 * turn + batch)


# The server's process


@contextmanager
def a_server(name: str, *, in_process: bool) -> Iterator[tuple[Endpoint, Callable[[], float]]]:
    """A server: where it listens, and a call that asks for its processor time, with its engine's."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(name, in_process, there))
    process.start()

    def cpu() -> float:
        here.send("cpu")
        spent: float = here.recv()
        return spent

    try:
        yield Endpoint("127.0.0.1", here.recv()), cpu
    finally:
        here.send("stop")
        process.join(30)


def serve(name: str, in_process: bool, wire: Connection) -> None:
    """What the process runs."""
    import threading

    from minicache.engine.async_engine import AsyncEngine
    from minicache.engine.options import ReplicaOptions
    from minicache.serving.http.app import create_app
    from minicache.serving.http.running import Server
    from minicache.serving.replica import EngineClient
    from minicache.serving.replica.process import starter

    torch.set_num_threads(1)
    engine: AsyncEngine | EngineClient
    with TemporaryDirectory() as folder:
        if in_process:
            engine = AsyncEngine(make_llm(LLM, name))
        else:
            made, tokenizer = make_model(name)
            model = name
            if name == "llama":
                assert isinstance(made, MiniGPT)
                model = f"{folder}/model.safetensors"
                save_minigpt(made, model)
            del made
            options = ReplicaOptions(
                model=model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_threads=1, prefix_caching=True
            )
            engine = EngineClient(starter(options), tokenizer)
        server = Server(
            create_app(engine, served_model_name="bench"), port=0, drain_seconds=1.0, on_listening=wire.send
        )

        def obey() -> None:
            while wire.recv() == "cpu":
                processes = [each.process for each in engine.replicas] if isinstance(engine, EngineClient) else []
                of_engines = (psutil.Process(each.pid).cpu_times() for each in processes if each)
                wire.send(time.process_time() + sum(each.user + each.system for each in of_engines))
            server.stop()

        threading.Thread(target=obey, daemon=True).start()
        server.run()


# What is recorded


def compared(runs: dict[str, list[Run]], batch: int) -> dict[str, Any]:
    """The ladders of one batch size: milliseconds a step, tokens a second, and how much longer than the model alone."""
    num_steps = LAST - FIRST
    windows = {each: zip(*(run.windows() for run in of), strict=True) for each, of in runs.items()}
    least = {each: sum(map(min, of)) / num_steps for each, of in windows.items()}
    median = {each: statistics.median(sum(run.windows()) for run in of) / num_steps for each, of in runs.items()}
    ms = {each: round(1e3 * seconds, 4) for each, seconds in least.items()}
    return {
        "ms_per_step": ms,
        "median_ms_per_step": {each: round(1e3 * seconds, 4) for each, seconds in median.items()},
        "tokens_per_second": {each: round(batch / seconds, 1) for each, seconds in least.items()},
        "engine_over_model": round(least["engine"] / least["model"] - 1, 4),
        "thread_over_engine": round(least["thread"] / least["engine"] - 1, 4),
        "thread_over_model": round(least["thread"] / least["model"] - 1, 4),
        "server_over_engine": round(least["server"] / least["engine"] - 1, 4),
        "server_over_model": round(least["server"] / least["model"] - 1, 4),
        "cpu_ms_per_token": {each: round(1e3 * min(map(cpu_per_token, of)) / batch, 4) for each, of in runs.items()},
    }


def cpu_per_token(run: Run) -> float:
    """Processor time of all requests for one token each; prompts and ends of answers included, at all ladders alike."""
    return (run.cpu[-1] - (run.cpu[0] if len(run.cpu) > 1 else 0.0)) / NUM_NEW


def show(figures: dict[str, Any]) -> None:
    """Milliseconds a step, and the overhead."""
    table = Table(title="Milliseconds a step, and how much longer than the model alone", box=SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)  # 80 columns
    table.add_column()
    for heading in ("requests", *LADDERS, "engine+", "thread+", "server+"):
        table.add_column(heading, justify="right")
    for name, told in figures.items():
        for batch, found in told["batches"].items():
            ms = [f"{found['ms_per_step'][each]:.2f}" for each in LADDERS]
            over = [f"{found[each]:+.1%}" for each in ("engine_over_model", "thread_over_model", "server_over_model")]
            table.add_row(name, batch, *ms, *over)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
