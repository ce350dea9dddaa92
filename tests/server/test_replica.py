"""The engine in a real process: killed, stopped in its tracks, told to end, orphaned; and several of them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minicache.engine.llm import LLM
from minicache.engine.options import ReplicaOptions
from minicache.engine.sampling import SamplingParams
from minicache.errors import CheckpointError, EngineDiedError, EngineNotReadyError
from minicache.grammar import Tokenizer
from minicache.serving.http.app import create_app
from minicache.serving.http.metrics import Metrics
from minicache.serving.http.running import Server
from minicache.serving.replica import client as replica_client
from minicache.serving.replica.client import EngineClient, Replica
from minicache.serving.replica.process import starter

SECONDS = 60
OPTIONS = ReplicaOptions(num_blocks=600, num_threads=1)
LONG = {"prompt": "Yesterday I", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}


class Served:
    """A server with an engine in a process, or with several."""

    def __init__(self, num_replicas: int = 1, max_waiting: int = 256, options: ReplicaOptions = OPTIONS) -> None:
        self.client = EngineClient(starter(options), Tokenizer(), num_replicas=num_replicas, max_waiting=max_waiting)
        listening = threading.Event()

        def on_listening(port: int) -> None:
            self.port = port
            listening.set()

        self.server = Server(create_app(self.client), port=0, drain_seconds=10, on_listening=on_listening)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        assert listening.wait(SECONDS)

    def pid(self, number: int = 0) -> int:
        process = self.client.replicas[number].process
        assert process is not None
        return process.pid

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def begin(self, **fields: Any) -> socket.socket:
        """A stream that has had its first event."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        body = json.dumps(LONG | fields).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        connection.sendall(head % len(body) + b"Connection: close\r\n\r\n" + body)
        received = b""
        while b"data: " not in received:
            received += connection.recv(1000)
        return connection

    def metric(self, name: str) -> float:
        text = self.ask("GET", "/metrics")[1].decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    def until(self, what: Any) -> None:
        end = time.monotonic() + SECONDS
        while not what():
            assert time.monotonic() < end, "it has not come to that"
            time.sleep(0.02)

    def until_healthy(self) -> None:
        self.until(lambda: self.ask("GET", "/health")[0] == 200)

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    pid = served.pid()
    served.stop()
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return b"\nState:\tZ" not in Path(f"/proc/{pid}/status").read_bytes() if Path("/proc/self").exists() else True


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with connection:
        while piece := connection.recv(65536):
            received += piece
    return received


def test_signals_of_a_terminal_or_a_service_manager_are_not_for_the_engine(served: Served) -> None:
    stream = served.begin(max_tokens=60)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(served.pid(), number)
    events = read_all(stream)
    assert b'"finish_reason": "length"' in events
    assert b"[DONE]" in events
    assert served.client.replicas[0].num_starts == 1


def test_an_engine_that_is_killed_fails_its_requests_by_name_and_is_started_again(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "minicache")
    streams = [served.begin() for _ in range(3)]
    whole: list[tuple[int, bytes]] = []
    waiting = threading.Thread(
        target=lambda: whole.append(served.ask("POST", "/v1/completions", LONG | {"stream": False}))
    )
    waiting.start()
    served.until(lambda: served.client.num_unfinished == 4)
    os.kill(served.pid(), signal.SIGKILL)
    for stream in streams:
        error, done = read_all(stream).split(b"data: ")[-2:]
        told = json.loads(error.split(b"\n")[0])["error"]
        assert (told["type"], told["code"]) == ("server_error", "engine_died")
        assert "SIGKILL" in told["message"]
        assert done.startswith(b"[DONE]")
    waiting.join(SECONDS)
    status, body = whole[0]
    assert (status, json.loads(body)["error"]["code"]) == (503, "engine_died")
    status, body = served.ask("GET", "/health")
    assert (status, json.loads(body)["error"]["code"]) == (503, "not_ready")
    assert "SIGKILL" in json.loads(body)["error"]["message"] or "starting" in json.loads(body)["error"]["message"]
    assert served.ask("POST", "/v1/completions", LONG)[0] == 503
    assert served.ask("GET", "/v1/models")[0] == 200  # what is known stays known
    served.until_healthy()
    status, body = served.ask("POST", "/v1/completions", {"prompt": "Yesterday I", "max_tokens": 8, "temperature": 0})
    [right] = LLM(num_blocks=64).generate(["Yesterday I"], SamplingParams(max_tokens=8))
    assert json.loads(body)["choices"][0]["text"] == right.text
    assert served.metric("minicache:engine_deaths_total") == 1
    assert served.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 4
    assert served.metric("vllm:num_requests_running") == 0
    assert served.metric("vllm:e2e_request_latency_seconds_count") == served.metric("vllm:request_success_total")
    lines = [each.getMessage() for each in caplog.records if each.name == "minicache"]
    assert lines[0] == "engine 0: the engine's process was killed by SIGKILL; requests lost: 4"
    assert lines[-1] == f"engine 0 is ready, process {served.pid()}"


@pytest.mark.slow
def test_the_stack_of_an_engine_that_crashes_is_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    os.kill(served.pid(), signal.SIGSEGV)
    served.until(lambda: "SIGSEGV" in caplog.text)
    lines = [each.getMessage() for each in caplog.records if each.name == "minicache.engine.0"]
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert any("minicache/serving/replica/core.py" in line for line in lines)
    served.until_healthy()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_an_engine_of_several_ranks_is_started_again_when_one_is_killed() -> None:
    served = Served(options=replace(OPTIONS, tensor_parallel_size=2))
    try:
        engine = served.pid()
        [rank] = map(int, Path(f"/proc/{engine}/task/{engine}/children").read_text().split())
        stream = served.begin()
        os.kill(rank, signal.SIGKILL)
        error, done = read_all(stream).split(b"data: ")[-2:]
        assert json.loads(error.split(b"\n")[0])["error"]["code"] == "engine_died"
        assert done.startswith(b"[DONE]")
        served.until_healthy()
        body = served.ask("POST", "/v1/completions", {"prompt": "Yesterday I", "max_tokens": 8, "temperature": 0})[1]
        [right] = LLM(num_blocks=64).generate(["Yesterday I"], SamplingParams(max_tokens=8))
        assert json.loads(body)["choices"][0]["text"] == right.text
        engine = served.pid()
        [rank] = map(int, Path(f"/proc/{engine}/task/{engine}/children").read_text().split())
        os.kill(engine, signal.SIGKILL)
        served.until(lambda: not is_alive(rank))
    finally:
        served.stop()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_an_engine_that_hangs_is_told_and_killed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.until_healthy()
    num_starts = served.client.replicas[0].num_starts
    for name, seconds in (("WATCH_SECONDS", 0.05), ("REFUSE_SECONDS", 0.2), ("MAX_IDLE_SECONDS", 1e9)):
        monkeypatch.setattr(replica_client, name, seconds)
    stream = served.begin()
    os.kill(served.pid(), signal.SIGSTOP)
    served.until(lambda: served.ask("GET", "/health")[0] == 503)
    told = json.loads(served.ask("POST", "/v1/completions", LONG)[1])["error"]
    assert told["code"] == "not_ready"
    assert "engine 0 has done nothing for" in told["message"]
    assert "1 answers in progress" in told["message"]
    os.kill(served.pid(), signal.SIGCONT)
    served.until_healthy()
    assert b'"finish_reason": "length"' in read_all(stream)
    stream = served.begin()
    monkeypatch.setattr(replica_client, "MAX_IDLE_SECONDS", 0.5)
    os.kill(served.pid(), signal.SIGSTOP)
    assert b"engine_died" in read_all(stream)
    monkeypatch.undo()
    served.until_healthy()
    assert served.client.replicas[0].num_starts == num_starts + 1


class Fake:
    """A process that computes, or does not."""

    pid = 0
    seconds = 0.0
    is_killed = False

    def cpu_seconds(self) -> float:
        return self.seconds

    async def wait(self) -> int:
        return 0

    def kill(self) -> None:
        self.is_killed = True


def test_a_long_step_that_computes_is_no_hang() -> None:
    """As a first compilation does, or a long prompt on a slow processor."""
    replica, process = Replica(0), Fake()
    replica.process, replica.is_ready, replica.num_unfinished = process, True, 1
    for _ in range(1000):
        process.seconds += 0.5
        replica.look()
        assert replica.why_not is None
    for number in range(10):
        assert replica.idle_seconds == number
        replica.look()
    assert "for 10 s" in str(replica.why_not)
    replica.heard_at = 1.0  # a step
    replica.look()
    assert replica.why_not is None
    replica.look()
    replica.num_unfinished = 0  # nothing to do
    for _ in range(10):
        replica.look()
    assert replica.idle_seconds == 0


def test_what_an_engine_cannot_be_made_of_is_told_as_it_would_be_here() -> None:
    async def start() -> None:
        async with EngineClient(starter(ReplicaOptions(model="nowhere.safetensors")), None) as client:
            with pytest.raises(EngineNotReadyError):
                client.check_admission(1)
            await client.ready()

    with pytest.raises(CheckpointError, match="there is no checkpoint at nowhere"):
        asyncio.run(start())


class Stillborn:
    """A process that ends as soon as it was started."""

    pid = 0
    num_starts = 0

    async def wait(self) -> int:
        return 3

    def kill(self) -> None:
        pass

    def cpu_seconds(self) -> None:
        pass


def test_an_engine_that_dies_at_its_start_is_started_more_and_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "RESTART_SECONDS", 0.01)
    starts: list[float] = []

    async def stillborn(number: int, address: str) -> Stillborn:
        starts.append(time.monotonic())
        return Stillborn()

    async def work() -> None:
        async with EngineClient(stillborn, None) as client:
            with pytest.raises(EngineDiedError, match="status 3"):
                await client.ready()
            with pytest.raises(EngineNotReadyError, match="status 3"):
                client.check_admission(0)
            while len(starts) < 5:
                await asyncio.sleep(0.01)

    asyncio.run(work())
    for number, (before, after) in enumerate(pairwise(starts)):
        assert after - before >= 0.01 * 2**number


def test_an_engine_is_started_again_though_the_folder_of_its_socket_was_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(replica_client, "RESTART_SECONDS", 0.01)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders: list[Path] = []

    async def stillborn(number: int, address: str) -> Stillborn:
        folders.append(Path(address.removeprefix("ipc://")).parent)
        assert folders[-1].is_dir()
        shutil.rmtree(folders[-1])
        return Stillborn()

    async def work() -> None:
        async with EngineClient(stillborn, None):
            while len(folders) < 3:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(work(), SECONDS))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_engine_that_schedules_asynchronously_gives_the_same_answers(served: Served) -> None:
    """And has nothing left to do once its last step, which no request waits for, is over."""
    ahead = Served(options=replace(OPTIONS, async_scheduling=True))
    try:
        for stop in (None, [" the"]):
            wish = LONG | {"stream": False, "max_tokens": 40, "stop": stop, "n": 2, "temperature": 1, "seed": 1}
            found = [json.loads(each.ask("POST", "/v1/completions", wish)[1])["choices"] for each in (served, ahead)]
            assert found[0] == found[1]
        with ahead.begin():
            pass  # it leaves
        ahead.until(lambda: ahead.metric("vllm:kv_cache_usage_perc") == ahead.metric("vllm:num_requests_running") == 0)
        assert ahead.client.replicas[0].num_starts == 1
    finally:
        ahead.stop()


def test_several_engines_share_the_requests_and_one_that_dies_takes_only_its_own() -> None:
    served = Served(num_replicas=2)
    try:
        streams = [served.begin() for _ in range(4)]
        assert [each.num_unfinished for each in served.client.replicas] == [2, 2]
        os.kill(served.pid(1), signal.SIGKILL)
        served.until(lambda: not served.client.replicas[1].is_ready)
        assert served.ask("GET", "/health")[0] == 200
        ends = Counter(b"engine_died" in read_all(each) for each in streams)
        assert ends == {True: 2, False: 2}
        served.until(lambda: served.client.replicas[1].is_ready)
        assert served.metric('minicache:engine_deaths_total{engine="1"') == 1
        assert served.metric('minicache:engine_deaths_total{engine="0"') == 0
    finally:
        served.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_many_streams_every_token_is_accounted_for_though_the_engine_is_killed() -> None:
    """A third leaves at some token, the engine is killed in the middle: a stream ends right, by name, or was left."""
    num_streams = int(os.environ.get("MINICACHE_LOAD_STREAMS", "120"))
    rng = random.Random(1)
    words = Tokenizer()
    prompts = [[rng.randrange(1, 300) for _ in range(rng.randint(1, 40))] for _ in range(num_streams)]
    counts = [rng.randint(5, 120) for _ in range(num_streams)]
    params = [SamplingParams(max_tokens=each, ignore_eos=True) for each in counts]
    right = [each.token_ids for each in LLM(num_blocks=600).generate(prompts, params)]
    leaves = [rng.randint(1, each) if number % 3 == 0 else None for number, each in enumerate(counts)]

    async def work() -> None:
        async with EngineClient(starter(OPTIONS), words, max_waiting=num_streams) as client:
            metrics = Metrics("minigpt")
            client.on_info = lambda number, info: metrics.add_engine(number, info.cache)
            client.on_stats = metrics.apply
            await client.ready()
            ends: Counter[str] = Counter()
            num_begun = 0

            async def one(number: int) -> None:
                nonlocal num_begun
                got: list[int | None] = []
                while not any(each.is_ready for each in client.replicas):
                    await asyncio.sleep(0.01)
                try:
                    with await client.add_request(prompts[number], params[number]) as stream:
                        num_begun += 1
                        async for chunk in stream:
                            got.append(chunk.token_id)
                            if len(got) == leaves[number]:
                                ends["left"] += 1
                                break
                        else:
                            ends["finished"] += 1
                            assert got == right[number]
                except (EngineDiedError, EngineNotReadyError) as error:
                    ends[type(error).__name__] += 1
                assert got == right[number][: len(got)]

            tasks = [asyncio.create_task(one(number)) for number in range(num_streams)]
            while ends["left"] < num_streams // 10:
                await asyncio.sleep(0.001)
            process = client.replicas[0].process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.gather(*tasks)
            assert sum(ends.values()) == num_streams
            assert ends["EngineDiedError"]
            while not client.replicas[0].is_ready:
                await asyncio.sleep(0.01)
            await asyncio.gather(*(one(number) for number in range(num_streams)))
            assert client.num_unfinished == 0
            assert not client.streams
            assert await client.drain(SECONDS)
            while (picture := json.loads((await client.picture()).json))["running"]:
                await asyncio.sleep(0.05)
            assert picture["pool"]["num_free"] == picture["pool"]["num_blocks"]
            assert not picture["pool"]["lost"]
            numbers: Counter[str] = Counter()
            for family in metrics.collect():
                for sample in family.samples:
                    numbers[sample.name] += int(sample.value)
            assert numbers["vllm:request_success_total"] == numbers["vllm:e2e_request_latency_seconds_count"]
            assert numbers["vllm:num_requests_running"] == numbers["vllm:num_requests_waiting"] == 0
            assert numbers["minicache:engine_deaths_total"] == 1
            print(dict(ends))

    asyncio.run(work())
