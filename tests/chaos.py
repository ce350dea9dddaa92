"""Chaos: 500 requests through a router over three servers, while everything fails that can.

A third of the clients leave. Engines and servers are killed, stopped and restarted, connections are reset on a slow
network, keys are reloaded, and hostile requests come in between. Every answer has to be the one that an undisturbed
engine gives, or its beginning and one error with a code. At the end no block, descriptor, process or file is left.

`make check` runs it, alone on the machine, with the same seed each time: what is done, and to whom. Another:

    MINICACHE_CHAOS_SEED=7 pytest tests/chaos.py
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.grammar import sample_text

SEED: Final = int(os.environ.get("MINICACHE_CHAOS_SEED", "0"))
NUM_REQUESTS, AT_ONCE, NUM_SERVERS = 500, 16, 3
MAIN: Final = "from minicache_cli import main; main()"
CODES: Final = ("worker_died", "no_worker", "queue_full", "engine_died", "not_ready", "stopping")
"""Of errors that a client may get while servers die."""

AGAIN: Final = ("no_worker", "queue_full", "not_ready", "stopping")
"""Nothing was begun, so clients ask again."""

ABANDONED: Final = 4
"""The status of a server that did not complete all answers before it ended."""

HOSTILE: Final = (
    *(b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": ' + b"[" * 5000, b'{"prompt": {}}'),
    *(b'{"prompt": "x", "n": 1e999}', b'{"prompt": "x", "max_tokens": -1}', b'{"prompt": [1e30]}'),
    *(b'{"prompt": "Yesterday I", "top_k": 1' + b"0" * 26 + b"}", b'{"prompt": "Yesterday I", "stop": [""]}'),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": "Yesterday I", "n": 128, "logprobs": 20, "max_tokens": 10000}'),
)

pytestmark = pytest.mark.timeout(600)


class Network:
    """A slow network in front of a server: what is sent is held for some milliseconds."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port, self._rng = port, rng
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        self._server.close()
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Break all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.ensure_future(self._pipe(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError):
            while data := await reader.read(256):
                await asyncio.sleep(self._rng.uniform(0, 0.01))
                writer.write(data)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()


class Command:
    """A command of minicache that listens, on the same port each time that it is started."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log, self._arguments, self.port = log, arguments, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.has_begun = False
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        self.has_begun = False
        with self.log.open("a") as stderr:
            arguments = (*self._arguments, "--port", str(self.port), "--log-format", "json")
            self.process = await asyncio.create_subprocess_exec(sys.executable, "-c", MAIN, *arguments, stderr=stderr)
        async with httpx.AsyncClient(trust_env=False) as client:
            while self.process.returncode is None:
                with suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/health")).status_code == 200:
                        self.has_begun = True
                        return
                await asyncio.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def kill(self) -> None:
        """SIGKILL, if it has not ended."""
        if self.process.returncode is None:
            self.process.kill()

    async def end(self, *statuses: int) -> None:
        """SIGTERM; it has to end with one of these statuses."""
        self.process.terminate()
        status = await asyncio.wait_for(self.process.wait(), 60)
        assert status in statuses, f"{self._arguments[0]} ended with {status}:\n{self.log.read_text()[-3000:]}"

    @property
    def family(self) -> list[psutil.Process]:
        """Its process and their children: with a server, the engine."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        return []

    async def metric(self, name: str) -> float:
        """The sum of a metric."""
        async with httpx.AsyncClient(trust_env=False) as client:
            lines = (await client.get(f"{self.url}/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def write_keys(path: Path, number: int) -> None:
    """Keys; all but ada's are others each time."""
    new = path.with_suffix(".new")
    new.write_text(f'[keys.ada]\nkey = "ada"\n[keys.guest-{number}]\nkey = "guest-{number}"\n')
    new.replace(path)  # a server that starts reads all of it


class Trouble:
    """What happens to the servers until `stop`. `counts` says how often what happened."""

    def __init__(self, servers: list[Command], networks: list[Network], router: Command, keys: Path) -> None:
        self._servers, self._networks, self._router, self._keys = servers, networks, router, keys
        self._is_over = False
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Until `stop`; then all servers are whole."""
        each = [self._of_server(n, random.Random(f"{SEED} server {n}")) for n in range(NUM_SERVERS)]
        await asyncio.gather(*each, self._of_clients(random.Random(f"{SEED} clients")))

    def stop(self) -> None:
        self._is_over = True

    async def _of_server(self, number: int, rng: random.Random) -> None:
        server, network = self._servers[number], self._networks[number]
        ways: list[Callable[[], Awaitable[None]]] = [
            lambda: self._kill_engine(server),
            lambda: self._kill(server, rng.uniform(0, 2)),
            lambda: self._restart(server),
            lambda: self._freeze(server.family[:1], rng.uniform(0.5, 6)),
            lambda: self._freeze(server.family[1:], rng.uniform(0.5, 6)),
            lambda: self._reset(network),
        ]
        names = ("engine killed", "server killed", "restarted", "server frozen", "engine frozen", "network reset")
        while not self._is_over:
            await asyncio.sleep(rng.uniform(0.5, 4))
            way = rng.randrange(len(ways))
            self.counts[names[way]] += 1
            await ways[way]()

    async def _of_clients(self, rng: random.Random) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            while not self._is_over:
                await asyncio.sleep(rng.uniform(0.1, 0.6))
                if rng.random() < 0.2:
                    self.counts["keys reloaded"] += 1
                    write_keys(self._keys, self.counts["keys reloaded"])
                    for server in self._servers:
                        if server.has_begun:
                            with suppress(ProcessLookupError):
                                server.process.send_signal(signal.SIGHUP)
                    continue
                self.counts["hostile"] += 1
                target = rng.choice([self._router, *self._servers])
                headers = {"Content-Type": "application/json", "Authorization": "Bearer ada"}
                with suppress(httpx.HTTPError):  # the server may be dead
                    url = f"{target.url}/v1/completions"
                    answer = await client.post(url, content=rng.choice(HOSTILE), headers=headers)
                    assert answer.status_code in (400, 413, 422, 429, 502, 503), answer.text[:500]

    async def _kill_engine(self, server: Command) -> None:
        for engine in server.family[1:]:
            engine.kill()

    async def _kill(self, server: Command, seconds: float) -> None:
        server.kill()
        await server.process.wait()
        await asyncio.sleep(seconds)
        await server.start()

    async def _restart(self, server: Command) -> None:
        await server.end(0, ABANDONED)
        await server.start()

    async def _freeze(self, processes: list[psutil.Process], seconds: float) -> None:
        for process in processes:
            process.suspend()
        await asyncio.sleep(seconds)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    async def _reset(self, network: Network) -> None:
        network.reset()


async def ask(client: httpx.AsyncClient, prompt: str, wanted: str, rng: random.Random) -> str:
    """One request, checked: how it has ended, "complete", "left" or an error's code."""
    leaves_after = rng.randrange(40) if rng.random() < 1 / 3 else None
    body = {"prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    if leaves_after is None and rng.random() < 0.25:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == wanted
            return "complete"
        return code_of(answer.json())
    text, num_events = "", 0
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        if answer.status_code != 200:
            return code_of(json.loads(await answer.aread()))
        last = ""
        async for line in answer.aiter_lines():
            if num_events == leaves_after:
                assert wanted.startswith(text)
                return "left"
            if not line:
                continue
            num_events += 1
            last = line.removeprefix("data: ")
            if last == "[DONE]":
                break
            event = json.loads(last)
            if "error" in event:
                assert wanted.startswith(text)
                return code_of(event)
            text += event["choices"][0]["text"]
    assert last == "[DONE]", f"a stream ended without [DONE]: {last}"
    assert text == wanted
    return "complete"


def code_of(error: dict[str, Any]) -> str:
    code: str = error["error"]["code"]
    assert code in CODES, error
    return code


async def all_requests(url: str, prompts: list[str], wanted: list[str]) -> list[str]:
    """How each of them has ended."""
    slots = asyncio.Semaphore(AT_ONCE)
    headers = {"Authorization": "Bearer ada"}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=90) as client:

        async def one(number: int) -> str:
            async with slots:
                rng = random.Random(f"{SEED} request {number}")
                end = await ask(client, prompts[number], wanted[number], rng)
                while end in AGAIN:
                    await asyncio.sleep(rng.uniform(0.5, 1.5))
                    end = await ask(client, prompts[number], wanted[number], rng)
                return end

        return await asyncio.gather(*map(one, range(len(prompts))))


def left_behind(mark: str) -> list[str]:
    """Processes that were started with a mark in their environment, and have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MINICACHE_CHAOS") == mark:
                found.append(f"{process.pid} {process.status()}: {' '.join(process.cmdline())}")
    return found


async def chaos(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """How the requests finished, and what happened to the servers."""
    rng = random.Random(SEED)
    prompts = [" ".join(sample_text(rng)[:6]) for _ in range(NUM_REQUESTS)]
    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    wanted = [answer.text for answer in LLM("minigpt", num_blocks=2048).generate(prompts, params)]
    keys = folder / "keys.toml"
    write_keys(keys, 0)
    options = ("--num-blocks", "300", "--drain-seconds", "5", "--api-keys", str(keys))
    async with AsyncExitStack() as stack:
        servers = [Command(folder / f"server-{n}.log", "serve", *options) for n in range(NUM_SERVERS)]
        await asyncio.gather(*(server.start() for server in servers))
        networks = [Network(server.port, random.Random(f"{SEED} network {server.port}")) for server in servers]
        urls = []
        for network in networks:
            urls.append(f"http://127.0.0.1:{await network.start()}")
            stack.push_async_callback(network.stop)
        router = Command(folder / "router.log", "route", *urls)
        await router.start()
        for command in (*servers, router):
            stack.callback(command.kill)
        fresh = {command: sizes(command) for command in (*servers, router)}
        trouble = Trouble(servers, networks, router, keys)
        troubling = asyncio.ensure_future(trouble.run())
        ends = Counter(await all_requests(router.url, prompts, wanted))
        trouble.stop()
        await troubling
        print(ends, trouble.counts)
        until = time.monotonic() + 60
        while problems := await wrong(servers, router, fresh):
            assert time.monotonic() < until, problems
            await asyncio.sleep(1)
        await asyncio.gather(*(command.end(0) for command in (router, *servers)))
    return ends, trouble.counts


def sizes(command: Command) -> tuple[int, float]:
    """Descriptors and resident memory in MB of a command's processes."""
    family = command.family
    return sum(each.num_fds() for each in family), sum(each.memory_info().rss for each in family) / 1e6


async def wrong(servers: list[Command], router: Command, fresh: dict[Command, tuple[int, float]]) -> list[str]:
    """What is not as if nothing had happened."""
    found = []
    for server in servers:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        values = {name: await server.metric(name) for name in names}
        found += [f"{server.log.name}: {name} is {value}" for name, value in values.items() if value]
    if running := await router.metric("minicache:route_requests_running"):
        found.append(f"the router has {running} requests")
    for command, (num_fds, rss) in fresh.items():
        now = sizes(command)
        if now[0] > num_fds + 10:
            found.append(f"{command.log.name}: {now[0]} descriptors, {num_fds} at first")
        if now[1] > 1.1 * rss + 20:
            found.append(f"{command.log.name}: {now[1]:.0f} MB, {rss:.0f} at first")
    return found


def test_chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    for name, value in {"TMPDIR": str(scratch), "MINICACHE_CHAOS": str(tmp_path), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    try:
        ends, troubles = asyncio.run(chaos(tmp_path))
        assert ends["complete"] > NUM_REQUESTS / 3, (ends, troubles)
        assert left_behind(str(tmp_path)) == []
        tracebacks = [log.name for log in tmp_path.glob("*.log") if "Traceback" in log.read_text()]
        assert tracebacks == []
        # Who is killed cannot remove the folder of its socket.
        assert len(list(scratch.iterdir())) <= troubles["server killed"]
    except BaseException:
        print(f"MINICACHE_CHAOS_SEED={SEED}")
        raise
