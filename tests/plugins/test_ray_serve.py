"""`minicache fleet` for real: Ray Serve, two engines, HTTP. Skipped where the extra `scale` is not installed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from minicache import LLM, SamplingParams
from minicache.engine.options import ReplicaOptions
from minicache_cli.fleet import make_api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_installed")]

RNG = random.Random(17)
SECONDS = 180
"""So long a test waits for what has to happen; then it has failed."""
REPLICA = b"ray::ServeReplica:minicache:Engine"
"""How Ray calls the process of an engine."""
MOST_TOKENS = 490
"""About what a request of MiniGPT can have, behind a prompt of 15."""
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef"}
"""So a test can ask the Ray of a fleet."""
WATCH = """
import json, sys, threading, time
import minicache.plugins.ray_local  # before Ray, which reads what this sets
import ray
from ray import serve
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), told.set()), daemon=True).start()
while not told.wait(0.1):
    engines = serve.status().applications["minicache"].deployments["Engine"]
    print(json.dumps({"time": time.time(), "states": dict(engines.replica_states)}), flush=True)
"""


Seen = list[tuple[float, dict[str, int]]]
"""How many engines were in each state, and when, the earliest first."""


@dataclass(frozen=True)
class Fleet:
    """A running `minicache fleet`.

    Attributes:
        url: of its API.
        process: the command's.
    """

    url: str
    process: subprocess.Popen[str]

    def replicas(self) -> list[int]:
        """The processes of its engines."""
        return [pid for pid in below(self.process.pid) if command_line(pid).startswith(REPLICA)]

    def generated(self) -> dict[str, float]:
        """How many tokens each engine has sent."""
        found = re.findall(r'^vllm:generation_tokens_total{.*engine="(\d+)".*} (\S+)', self.metrics(), re.MULTILINE)
        return {engine: float(value) for engine, value in found}

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=SECONDS).text

    def metric(self, name: str) -> float:
        """The sum of a metric over the replicas."""
        return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)", self.metrics(), re.MULTILINE))

    @contextmanager
    def watched_by_ray(self) -> Iterator[Seen]:
        """What Ray says of the engines during the block, as it says it."""
        lines = [command_line(pid) for pid in below(self.process.pid)]
        address = next(found[1] for line in lines if (found := re.search(rb"--gcs-address=([\d.:]+)", line)))
        watching = subprocess.Popen(
            [sys.executable, "-c", WATCH, address.decode()],
            env={**os.environ, **TOKEN},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        seen: Seen = []

        def read() -> None:
            assert watching.stdout is not None
            for each in map(json.loads, watching.stdout):
                seen.append((each["time"], each["states"]))

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        try:
            wait_until(lambda: seen, "Ray has told of the engines")
            yield seen
        finally:
            assert watching.stdin is not None
            watching.stdin.close()  # that is all
            watching.wait(SECONDS)
            reading.join(SECONDS)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def below(pid: int) -> list[int]:
    """A process's children, and theirs."""
    try:
        children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [each for child in children for each in below(child)]


def wait_until(what: Any, of: str) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < end, f"in vain for {SECONDS} s: {of}"
        time.sleep(0.3)


@contextmanager
def fleet_of(folder: Path, *options: str) -> Iterator[Fleet]:
    """The command in a home of its own; after it nothing of it is left, running or on disk."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (home := folder / "home").mkdir()
    command = [sys.executable, "-c", "from minicache_cli import main; main()", "fleet", f"--port={port}", *options]
    log = folder / "log"
    process = started(command, {**os.environ, **TOKEN, "HOME": str(home), "COLUMNS": "120"}, log)
    try:
        yield Fleet(f"http://127.0.0.1:{port}", process)
        pids = below(process.pid)
        assert (folders := folders_of(pids))
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0, log.read_text()
        wait_until(lambda: not any(map(command_line, pids)), "Ray's processes have ended")
        assert list(home.iterdir()) == []
        assert not any(each.exists() for each in folders)
    finally:
        end(process)


def folders_of(pids: Sequence[int]) -> set[Path]:
    """Where Ray's processes write."""
    return {Path(found[0].decode()) for pid in pids for found in re.finditer(rb"/tmp/mcray-\w+", command_line(pid))}


def end(process: subprocess.Popen[str]) -> None:
    """End a command that a failed test has left, with all that it started."""
    pids = [process.pid, *below(process.pid)] if process.poll() is None else []
    folders = folders_of(pids)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def started(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[str]:
    """The command, when it serves. Ray gives itself half a minute, on a busy machine too little."""
    for _ in range(3):
        with log.open("w") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, text=True)
        try:
            wait_until(lambda process=process: "Ctrl-C" in log.read_text() or process.poll() is not None, "it serves")
        except BaseException:
            end(process)
            raise
        if process.poll() is None:
            return process
        if "Ray could not be started" not in log.read_text():
            break
    raise AssertionError(log.read_text())


def tokens(num_tokens: int) -> list[int]:
    return [RNG.randrange(1, 200) for _ in range(num_tokens)]


def short_prompts(num_requests: int) -> list[list[int]]:
    """Of 15 tokens, so without a whole block: affinity has nothing to go by, and sends each to the least busy."""
    return [tokens(15) for _ in range(num_requests)]


def clear_prompts(num_requests: int, max_tokens: int) -> list[list[int]]:
    """Short prompts in whose answers one token is always the likeliest, and not by rounding.

    Two may be equally likely, as "the" and "a" are; a batch of another size rounds otherwise, and takes the other one.
    """
    llm, prompts = LLM(), short_prompts(4 * num_requests)
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    clear = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = llm.model(torch.tensor([prompt + answer.token_ids]))[0, len(prompt) - 1 : -1]
        first, second = logits.topk(2).values.unbind(-1)
        if (first - second).min() > 1e-4:
            clear.append(prompt)
    assert len(clear) >= num_requests
    return clear[:num_requests]


async def stream(client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, on: Any = None) -> list[str]:
    """The texts of an answer's events."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    texts = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                texts.append(event["choices"][0]["text"])
                if on is not None:
                    on(len(texts))
    return texts


def ask_all(fleet: Fleet, asked: Sequence[Sequence[int]], max_tokens: int, on: Any = None) -> list[str]:
    """The answers' texts, at most eight asked for at a time."""

    async def ask() -> list[str]:
        eight = asyncio.Semaphore(8)
        async with httpx.AsyncClient(base_url=fleet.url, timeout=SECONDS) as client:

            async def one(prompt: Sequence[int]) -> str:
                async with eight:
                    return "".join(await stream(client, prompt, max_tokens, on))

            return await asyncio.gather(*map(one, asked))

    return asyncio.run(ask())


def test_a_fleet(tmp_path: Path) -> None:
    """One test, since a fleet takes ten seconds to start and more on a busy machine."""
    scaling = ("--replicas=2", "--max-replicas=3", "--target-unfinished=4", "--downscale-delay=1")
    with fleet_of(tmp_path, "--policy=prefix_affinity", "--num-blocks=64", "--max-num-seqs=16", *scaling) as fleet:
        check_that_nothing_listens_to_the_network(fleet)
        check_that_a_prompt_goes_where_its_beginning_is(fleet)
        check_that_a_killed_replica_costs_no_token(fleet)
        check_that_replicas_come_with_load_and_leave_without_breaking_an_answer(fleet)


def test_the_policy_of_the_router_is_the_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    from minicache.fleet import create_router
    from minicache.plugins import ray_serve

    given: dict[str, Any] = {}

    def config(**options: Any) -> Any:
        given.update(options)
        return configured(**options)

    configured = ray_serve.RequestRouterConfig
    monkeypatch.setattr(ray_serve, "RequestRouterConfig", config)
    ray_serve.application(ray_serve.FleetOptions(ReplicaOptions(), policy="power_of_two"), make_api)
    router = object.__new__(given["request_router_class"])
    router.initialize_state(**given["request_router_kwargs"])
    assert type(router.policy) is type(create_router("power_of_two"))


def check_that_nothing_listens_to_the_network(fleet: Fleet) -> None:
    sockets = [each for pid in below(fleet.process.pid) for each in psutil.Process(pid).net_connections("inet")]
    addresses = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert addresses
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}


def check_that_a_prompt_goes_where_its_beginning_is(fleet: Fleet) -> None:
    """Five beginnings of eight blocks, three times each: the second and the third time, all eight are cached."""
    beginnings = [tokens(128) for _ in range(5)]
    for _ in range(3):
        for beginning in beginnings:
            ask_all(fleet, [beginning + tokens(24)], 1)
    assert fleet.metric("vllm:prefix_cache_queries_total") == 15 * (128 + 24)
    assert fleet.metric("vllm:prefix_cache_hits_total") == 10 * 128


def check_that_a_killed_replica_costs_no_token(fleet: Fleet) -> None:
    asked = clear_prompts(6, 60)
    expected = ask_all(fleet, asked, 60)
    victim, *_ = fleet.replicas()
    killed: list[int] = []

    def kill(num_events: int) -> None:
        if num_events == 8 and not killed:
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    assert ask_all(fleet, asked, 60, kill) == expected
    assert killed
    assert fleet.metric("minicache:engine_deaths_total") == 1
    wait_until(lambda: len(fleet.replicas()) == 2, "the replica was replaced")
    assert victim not in fleet.replicas()


def check_that_replicas_come_with_load_and_leave_without_breaking_an_answer(fleet: Fleet) -> None:
    """Each of three replicas has answers under way when Ray ends one of them."""
    asked = clear_prompts(8, MOST_TOKENS)
    expected = ask_all(fleet, asked, MOST_TOKENS)
    with fleet.watched_by_ray() as seen:
        # On a quick machine all may be over before one replica too many is noticed.
        assert any(drains_under_answers(fleet, asked, expected, seen) for _ in range(5))
    assert fleet.metric("minicache:engine_deaths_total") == 1  # none more


def drains_under_answers(fleet: Fleet, asked: Sequence[Sequence[int]], expected: Sequence[str], seen: Seen) -> bool:
    """Whether a replica had answers under way when it was stopped. They are as expected in any case."""
    begun, before, answers = asyncio.run(load_leaves_answers(fleet, asked))
    wait_until(lambda: len(fleet.replicas()) == 2, "one replica has left")
    wait_until(lambda: seen[-1][0] > max(end for _, end in answers), "Ray has told of it")
    assert [text for text, _ in answers] == expected
    had_answers = [engine for engine, after in fleet.generated().items() if after > before[engine] + 10]
    then = next((states for moment, states in reversed(seen) if moment <= begun), {})
    ending = next((moment for moment, states in seen if moment > begun and states.get("STOPPING")), inf)
    return then == {"RUNNING": 3} and len(had_answers) == 3 and ending < min(end for _, end in answers)


async def load_leaves_answers(
    fleet: Fleet, asked: Sequence[Sequence[int]]
) -> tuple[float, dict[str, float], list[tuple[str, float]]]:
    """Twelve clients ask and ask, until three replicas answer; eight more come; then the twelve leave.

    Three replicas are wanted for twenty, if each should have four requests, and two for eight.

    Returns:
        When the twelve had left; how many tokens each engine had sent then; and of each of the eight its answer, and
        when it had that.
    """
    async with httpx.AsyncClient(base_url=fleet.url, timeout=SECONDS) as client:

        async def ask_and_ask(prompt: Sequence[int]) -> None:
            while True:
                await stream(client, prompt, 200)

        async def ask_once(prompt: Sequence[int], has_begun: asyncio.Event) -> tuple[str, float]:
            texts = await stream(client, prompt, MOST_TOKENS, lambda num_texts: has_begun.set())
            return "".join(texts), time.time()

        load = [asyncio.create_task(ask_and_ask(prompt)) for prompt in short_prompts(12)]
        earlier = await asyncio.to_thread(fleet.generated)
        await asyncio.to_thread(wait_until, lambda: num_that_answer(fleet, earlier) == 3, "three replicas answer")
        begun = [asyncio.Event() for _ in asked]
        answers = [asyncio.create_task(ask_once(*each)) for each in zip(asked, begun, strict=True)]
        await asyncio.gather(*(each.wait() for each in begun))
        for each in load:
            each.cancel()
        ended = await asyncio.gather(*load, return_exceptions=True)
        assert [each for each in ended if isinstance(each, Exception)] == []
        return time.time(), await asyncio.to_thread(fleet.generated), await asyncio.gather(*answers)


def num_that_answer(fleet: Fleet, earlier: dict[str, float]) -> int:
    """How many engines have sent tokens since."""
    return sum(after > earlier.get(engine, 0.0) for engine, after in fleet.generated().items())
