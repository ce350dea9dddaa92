"""What routers find in the replicas' prefix caches: ours next to SGLang's and Ray's, over the same load.

Two engines of MiniGPT with 80 blocks of 16 tokens and 16 batch slots. 240 requests, eight at a time: each begins with
one of eight texts of 128 tokens, drawn at random, and goes on with 24 tokens of its own; 8 tokens are generated. The
hit rate is what the engines themselves count: tokens of prompts found, by tokens of prompts looked up. Its bound is
0.84, 128 tokens of 152, and the first request of each text finds nothing.

Fronts: `minicache route` (ours), sglang-router (SGLang's, a Rust program), both before two `minicache serve`; and Ray
Serve, with our routers, with its own, and with the one that it has for language models (a private import: this is a
benchmark). Engines are started anew for each policy. The figures depend on how requests interleave: each policy is run
several times, and the least, the median and the most are recorded.

    python -m benchmarks.routing [--runs 3] [route] [sglang] [ray]

Ray and sglang-router are the extra `scale`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import httpx
from rich.console import Console

from benchmarks._record import record
from minicache.grammar import Tokenizer, sample_text

NUM_SHARED, SHARED_TOKENS, OWN_TOKENS, NUM_REQUESTS, CONCURRENCY, MAX_TOKENS = 8, 128, 24, 240, 8, 8
NUM_BLOCKS, MAX_NUM_SEQS = 80, 16
OURS = ("round_robin", "power_of_two", "prefix_affinity")
SGLANG = ("random", "round_robin", "power_of_two", "cache_aware")
LOAD = {"shared": NUM_SHARED, "shared_tokens": SHARED_TOKENS, "own_tokens": OWN_TOKENS, "requests": NUM_REQUESTS}
NAMES = {"route": "minicache route", "sglang": "sglang-router", "ray": "Ray Serve"}
SECONDS = 300.0
MINICACHE = (sys.executable, "-c", "from minicache_cli import main; main()")

console = Console(highlight=False)
logging.getLogger("httpx").setLevel(logging.WARNING)  # ray.llm has all loggers say what they do


@dataclass(frozen=True)
class Front:
    """What is asked, and who counts.

    Attributes:
        url: where requests go.
        engines: whose /metrics say what was found.
    """

    url: str
    engines: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fronts", nargs="*", default=["route", "sglang", "ray"])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name, of_policies in {"route": route_fronts, "sglang": sglang_fronts, "ray": ray_fronts}.items():
        if name in arguments.fronts:
            with of_policies() as fronts:
                for policy, front_of in fronts.items():
                    runs = []
                    for seed in range(arguments.runs):
                        with front_of() as front:
                            runs.append(asyncio.run(measure(front, prompts(seed))))
                    rates = sorted(run["hit_rate"] for run in runs)
                    between = f"{rates[0]:.3f} to {rates[-1]:.3f}"
                    of_policy: dict[str, Any] = {
                        "front": NAMES[name],
                        "policy": policy,
                        "hit_rate": f"{median(rates):.3f}",
                    }
                    of_policy |= {"between": between, "ttft_p50_ms": median(run["ttft_p50_ms"] for run in runs)}
                    found.append(of_policy)
                    console.print(f"{name:8}{policy:20}{median(rates):.3f}  ({between})")
                    record("routing", {"load": LOAD, "runs": arguments.runs, "fronts": found})  # so far


# The load


def prompts(seed: int) -> list[str]:
    """Texts, since SGLang's router compares texts."""
    tokenizer, rng = Tokenizer(), random.Random(f"routing {seed}")

    def text(num_tokens: int) -> str:
        words: list[str] = []
        while len(token_ids := tokenizer.encode(" ".join(words))) < num_tokens:
            words += sample_text(rng)
        return tokenizer.decode(token_ids[:num_tokens])

    shared = [text(SHARED_TOKENS) for _ in range(NUM_SHARED)]
    return [f"{rng.choice(shared)} {text(OWN_TOKENS).strip()}" for _ in range(NUM_REQUESTS)]


async def measure(front: Front, asked: list[str]) -> dict[str, float]:
    """Send all, and see what was found."""
    slots, first_tokens = asyncio.Semaphore(CONCURRENCY), []
    async with httpx.AsyncClient(timeout=SECONDS) as client:

        async def one(prompt: str) -> None:
            body = {"model": "minigpt", "prompt": prompt, "max_tokens": MAX_TOKENS, "stream": True, "temperature": 0}
            async with slots:
                begun, first = time.perf_counter(), None
                async with client.stream("POST", f"{front.url}/v1/completions", json=body) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        if first is None and line.startswith("data: {"):
                            first = time.perf_counter() - begun
            assert first is not None
            first_tokens.append(first)

        await asyncio.gather(*map(one, asked))
        pages = [(await client.get(f"{url}/metrics")).text for url in front.engines]

    def total(name: str) -> float:
        sample = re.compile(rf"^{name}{{[^}}]*}} (\S+)", re.MULTILINE)
        return sum(float(number) for page in pages for number in sample.findall(page))

    hit_rate = total("vllm:prefix_cache_hits_total") / total("vllm:prefix_cache_queries_total")
    return {"hit_rate": round(hit_rate, 3), "ttft_p50_ms": round(1000 * median(first_tokens), 1)}


# The fronts

Fronts = dict[str, Callable[[], Any]]


@contextmanager
def route_fronts() -> Iterator[Fronts]:
    """`minicache route`, before two servers."""

    @contextmanager
    def front_of(policy: str) -> Iterator[Front]:
        with two_servers() as workers:
            port = free_port()
            command = [
                *MINICACHE,
                "route",
                f"--port={port}",
                f"--policy={policy}",
                "--log-level=error",
                "--workers",
                *workers,
            ]
            with running(command, f"http://127.0.0.1:{port}/v1/models") as url:
                yield Front(url, workers)

    yield {policy: partial(front_of, policy) for policy in OURS}


@contextmanager
def sglang_fronts() -> Iterator[Fronts]:
    """sglang-router, before two servers."""

    @contextmanager
    def front_of(policy: str) -> Iterator[Front]:
        with two_servers() as workers:
            port = free_port()
            command = [sys.executable, "-m", "sglang_router.launch_router", "--host=127.0.0.1", f"--port={port}"]
            command += [f"--policy={policy}", f"--prometheus-port={free_port()}", "--log-level=warn"]
            command += ["--worker-urls", *workers]
            with running(command, f"http://127.0.0.1:{port}/v1/models") as url:
                yield Front(url, workers)

    yield {policy: partial(front_of, policy) for policy in SGLANG}


@contextmanager
def ray_fronts() -> Iterator[Fronts]:
    """Ray Serve, started once; a fleet for each policy."""
    from minicache.plugins import ray_serve  # isort: skip  # it says how Ray is to run, before Ray is imported

    from ray.serve.config import RequestRouterConfig

    from benchmarks._ray_prefix_aware import OnTokens
    from minicache.engine.options import ReplicaOptions
    from minicache.plugins.ray_serve import FleetOptions
    from minicache_cli.fleet import make_api

    engine, port = ReplicaOptions(num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS, prefix_caching=True), free_port()
    fleets = {policy: FleetOptions(engine, policy=policy) for policy in OURS}
    fleets["its power of two"] = FleetOptions(engine, router=RequestRouterConfig())
    fleets["its prefix-aware router"] = FleetOptions(engine, router=RequestRouterConfig(request_router_class=OnTokens))

    @contextmanager
    def front_of(options: FleetOptions) -> Iterator[Front]:
        url = f"http://127.0.0.1:{port}"
        with ray_serve.fleet_running(options, make_api):
            yield Front(url, (url,))

    with ray_serve.ray_started(port=port):
        yield {name: partial(front_of, options) for name, options in fleets.items()}


@contextmanager
def two_servers() -> Iterator[tuple[str, ...]]:
    """Two `minicache serve`, with empty caches."""
    options = [f"--num-blocks={NUM_BLOCKS}", f"--max-num-seqs={MAX_NUM_SEQS}"]
    with ExitStack() as stack:
        urls = []
        for port in (free_port(), free_port()):
            command = [*MINICACHE, "serve", f"--port={port}", "--log-level=error", *options]
            urls.append(stack.enter_context(running(command, f"http://127.0.0.1:{port}/health")))
        yield tuple(urls)


@contextmanager
def running(command: list[str], asked: str) -> Iterator[str]:
    """A program, from when it answers at a URL; gives the URL's beginning."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + SECONDS
            while not answers(asked):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"it does not serve: {' '.join(command)}")
                time.sleep(0.1)
            yield "/".join(asked.split("/")[:3])
        finally:
            process.terminate()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
