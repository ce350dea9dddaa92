"""Two real servers behind the real command: hit rates by policy, and a worker that is killed under load."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.proxy.conftest import contents, text_in

from minicache.grammar import Tokenizer, sample_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MAIN = "from minicache_cli import main; main()"
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


class Process:
    """A `minicache` command that listens, in a process group of its own."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN, *arguments, "--port", "0", "--log-format", "json"],
                stderr=stderr,
                start_new_session=True,
            )
        self.url = ""

    def wait(self) -> str:
        """Its URL, once it listens."""
        while self.process.poll() is None:
            for line in self._log.read_text().splitlines():
                if '"listening"' in line and line.endswith("}"):
                    self.url = str(json.loads(line)["url"])
                    return self.url
            time.sleep(0.05)
        raise AssertionError(self._log.read_text())

    def send(self, number: signal.Signals) -> None:
        """A signal, to all of its processes."""
        os.killpg(self.process.pid, number)

    def end(self) -> int:
        """SIGTERM, and its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(20)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    logs = tmp_path_factory.mktemp("logs")
    started = [Process(logs / f"{n}", "serve", "--num-blocks", "80", "--max-num-seqs", "16") for n in range(2)]
    try:
        for each in started:
            each.wait()
        yield started
    finally:
        for each in started:
            each.end()


@cache
def text(seed: str, num_tokens: int) -> str:
    """A text of so many tokens, in MiniGPT's English."""
    rng, words, tokenizer = random.Random(seed), [], Tokenizer()
    while len(token_ids := tokenizer.encode(" ".join(words))) < num_tokens:
        words += sample_text(rng)
    return tokenizer.decode(token_ids[:num_tokens])


NUM_CLIENTS, NUM_TOKENS = 8, 270
"""While a worker dies. The answers of all clients at one worker do not fit into its cache: some are preempted."""


def prompts(count: int) -> list[str]:
    """Eight beginnings of 128 tokens, drawn at random, and 24 tokens of each request's own."""
    rng = random.Random(0)
    return [text(f"shared {rng.randrange(8)}", 128) + " " + text(f"own {number}", 24) for number in range(count)]


async def ask_all(
    url: str,
    bodies: Sequence[dict[str, Any]],
    under_way: dict[int, bytes] | None = None,
) -> list[bytes]:
    """All answers, of so many clients at a time. `under_way` has what has come of those that are not complete."""
    slots, under_way = asyncio.Semaphore(NUM_CLIENTS), {} if under_way is None else under_way
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:

        async def ask(number: int, body: dict[str, Any]) -> bytes:
            async with slots:
                under_way[number] = b""
                sent = body | {"temperature": 0, "stream": True}
                async with client.stream("POST", "/v1/completions", json=sent) as response:
                    assert response.status_code == 200
                    async for piece in response.aiter_raw():
                        under_way[number] += piece
                return under_way.pop(number)

        return await asyncio.gather(*map(ask, range(len(bodies)), bodies))


def counts(workers: Sequence[Process]) -> dict[str, float]:
    found = dict.fromkeys((HITS, QUERIES), 0.0)
    for worker in workers:
        for line in httpx.get(f"{worker.url}/metrics", trust_env=False).text.splitlines():
            for name in found:
                if line.startswith(name):
                    found[name] += float(line.rpartition(" ")[2])
    return found


def test_affinity_finds_more_in_the_caches_than_power_of_two(workers: list[Process], tmp_path: Path) -> None:
    asked, rates = prompts(120), {}
    urls, policies = [each.url for each in workers], ("power_of_two", "prefix_affinity")
    routers = {name: Process(tmp_path / name, "route", *urls, "--policy", name) for name in policies}
    try:
        for policy, router in routers.items():
            router.wait()
            before = counts(workers)
            bodies = [{"prompt": prompt, "max_tokens": 4, "cache_salt": policy} for prompt in asked]
            answers = asyncio.run(ask_all(router.url, bodies))
            after = counts(workers)
            assert all(len(contents(answer)) == 4 for answer in answers)
            rates[policy] = (after[HITS] - before[HITS]) / (after[QUERIES] - before[QUERIES])
    finally:
        ends = [router.end() for router in routers.values()]
    assert ends == [0, 0]
    assert rates["prefix_affinity"] > rates["power_of_two"] + 0.05


async def ask_all_and_kill(router: Process, bodies: Sequence[dict[str, Any]], victim: Process) -> list[bytes]:
    """All answers. The victim is killed when it has begun some of them, and is to complete them.

    What the router has of a worker is not seen from outside, and on a busy machine a worker may be far ahead of it. So
    the victim is stopped first. The other worker completes its answers until each client waits for the victim.
    """
    under_way: dict[int, bytes] = {}
    asking = asyncio.create_task(ask_all(router.url, bodies, under_way))
    async with httpx.AsyncClient(trust_env=False) as client:
        while not asking.done():
            if any(under_way.values()):
                victim.send(signal.SIGSTOP)
                while await num_running(client, router, victim) < len(under_way) and not asking.done():
                    await asyncio.sleep(0.05)
                if any(under_way.values()):
                    victim.send(signal.SIGKILL)
                    break
                victim.send(signal.SIGCONT)  # it had begun none, or completed all
            await asyncio.sleep(0.001)
    return await asking


async def num_running(client: httpx.AsyncClient, router: Process, worker: Process) -> float:
    """How many requests a worker has, as the router says."""
    metrics = (await client.get(f"{router.url}/metrics")).text
    name = f'minicache:route_requests_running{{worker="{worker.url}"}} '
    return next((float(line.removeprefix(name)) for line in metrics.splitlines() if line.startswith(name)), 0.0)


def test_a_worker_is_killed_under_load_and_every_token_comes_once(workers: list[Process], tmp_path: Path) -> None:
    """The answers are those that one worker alone gives. It must be the last test: it leaves one worker."""
    bodies = [
        {"prompt": prompt[-200:].partition(" ")[2], "max_tokens": NUM_TOKENS, "ignore_eos": True}
        for prompt in prompts(24)
    ]
    alone = asyncio.run(ask_all(workers[0].url, bodies))
    victim = random.choice(workers)
    router = Process(tmp_path / "log", "route", *(each.url for each in workers), "--policy", "round_robin")
    try:
        router.wait()
        answers = asyncio.run(ask_all_and_kill(router, bodies, victim))
        metrics = httpx.get(f"{router.url}/metrics", trust_env=False).text
    finally:
        assert router.end() == 0
    for answer, wanted in zip(answers, alone, strict=True):
        events = contents(answer)
        assert text_in(events) == text_in(contents(wanted))
        assert sum(len(each["choices"][0]["token_ids"]) for each in events) == NUM_TOKENS
    assert "minicache:route_streams_continued_total 0.0" not in metrics
    assert "minicache:route_requests_lost_total 0.0" in metrics
