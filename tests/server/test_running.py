"""How a server ends: told to, told twice, out of patience, killed. And how `minicache serve` begins, or does not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from minicache.cli import app

SECONDS = 60


def stream_from(port: int, **fields: Any) -> socket.socket:
    """A client in the middle of a stream: it has had its first event."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    body = json.dumps({"prompt": "I", "stream": True, "ignore_eos": True, **fields}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    connection.sendall(head % len(body) + body)
    received = b""
    while b"data: " not in received:
        piece = connection.recv(1000)
        assert piece
        received += piece
    return connection


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with connection:
        while piece := connection.recv(65536):
            received += piece
    return received


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS).close()
    except ConnectionError:  # refused; or reset, if it was in the line when that was closed
        return True
    return False


def wait_for_refusal(port: int) -> None:
    end = time.monotonic() + SECONDS
    while not is_refused(port):
        assert time.monotonic() < end, "the server goes on listening"


def test_told_to_stop_it_finishes_what_is_under_way_and_takes_nothing_new(
    serve: Any, model: Any, gate: threading.Event
) -> None:
    server = serve(drain_seconds=SECONDS)
    first = stream_from(server.port, max_tokens=20)
    model.before = lambda token_ids: gate.wait(SECONDS)
    kept = server.open()
    assert server.exchange(kept, "GET", "/health").status == 200
    threading.Timer(0, server.server.stop).start()
    wait_for_refusal(server.port)
    with pytest.raises(ConnectionError):
        server.exchange(kept, "POST", "/v1/completions", {"prompt": "I"})
    gate.set()
    events = read_all(first)
    assert events.count(b"data: [DONE]") == 1
    assert b'"finish_reason": "length"' in events
    assert b"error" not in events
    server.stop()


def test_until_it_stops_to_listen_new_requests_are_503(serve: Any) -> None:
    server = serve()
    server.server._loop.call_soon_threadsafe(server.served.stop)
    server.wait_until(lambda: server.engine.is_draining)
    answer = server.complete()
    assert answer.status == 503
    assert answer.json["error"]["code"] == "stopping"
    assert answer.headers["retry-after"]
    assert server.ask("GET", "/health").status == 503
    assert 'reason="stopping"} 1.0' in server.ask("GET", "/metrics").body.decode()


def test_out_of_patience_it_ends_streams_with_an_error(serve: Any, model: Any, gate: threading.Event) -> None:
    server = serve(drain_seconds=0.05)
    stream = stream_from(server.port, max_tokens=500)
    model.before = lambda token_ids: gate.wait(SECONDS)
    server.server.stop()
    events = read_all(stream)
    gate.set()
    error, done = events.split(b"data: ")[-2:]
    assert json.loads(error.split(b"\n")[0])["error"]["code"] == "stopping"
    assert done.startswith(b"[DONE]\n\n")


def test_told_twice_it_does_not_wait(serve: Any, model: Any, gate: threading.Event) -> None:
    server = serve(drain_seconds=10 * SECONDS)
    stream = stream_from(server.port, max_tokens=500)
    model.before = lambda token_ids: gate.wait(SECONDS)
    server.server.stop()
    server.server.stop()
    read_all(stream)
    gate.set()
    server.stop()


def test_who_does_not_read_does_not_hold_up_the_end(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicache.server.running._GRACE", 0)
    server = serve(drain_seconds=0.1)

    def make_buffers_small() -> bool:
        for each in (connections := list(server.server.server_state.connections)):
            each.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bool(connections)

    with stream_from(server.port, max_tokens=400, logprobs=20, n=2):
        server.wait_until(make_buffers_small)
        server.stop()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_patience_that_is_no_number_of_seconds_is_refused(serve: Any, seconds: float) -> None:
    with pytest.raises(ValueError, match="drain_seconds"):
        serve(drain_seconds=seconds)


# The command, as a process


NURSERY = """
import os, sys
import minicache.engine.logprobs, minicache.server.running
from minicache.cli import main
for line in sys.stdin:
    if not (pid := os.fork()):
        sys.argv[1:] = line.split()
        main()
    print("pid", pid, flush=True)
    print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""To import PyTorch takes longer than all the rest, so it is done once: each server is a fork of this."""


class Nursery:
    """Runs one `minicache serve` after another, each in a process of its own."""

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.pid = 0
        return self

    def __exit__(self, *error: object) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()

    def start(self, port: int) -> int:
        """Start a server; returns the port on which it listens."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"serve --num-blocks 64 --port {port}\n")
        self._process.stdin.flush()
        self.pid, at = int(self._line("pid").split()[1]), self._line("metrics")
        return int(at.rsplit(":", 1)[1].split("/")[0])

    def end(self, signal_number: int) -> None:
        os.kill(self.pid, signal_number)

    def status(self) -> int:
        status = int(self._line("status").split()[1])
        self.pid = 0
        return status

    def _line(self, start: str) -> str:
        """The next line that begins so. (The two processes write in any order, but "pid" is there long before.)"""
        assert self._process.stdout is not None
        line = "\n"
        while line and not line.startswith(start):
            line = self._process.stdout.readline()
        assert line, "the server has ended; what it says is on stderr"
        return line


def children(pid: int) -> list[int]:
    """Its child processes; none where that cannot be told."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return list(map(int, path.read_text().split())) if path.exists() else []


def wait_for_the_end(pids: list[int]) -> None:
    """Nobody waits for an orphan: it may stay as a zombie."""
    end = time.monotonic() + SECONDS
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < end, "an engine has outlived its server"
        time.sleep(0.01)


def test_killed_and_started_again_it_serves_on_the_same_port_until_sigterm() -> None:
    with Nursery() as nursery:
        port = nursery.start(0)
        stream = stream_from(port, max_tokens=500)
        engines = children(nursery.pid)
        nursery.end(signal.SIGKILL)
        assert nursery.status() == -signal.SIGKILL
        wait_for_the_end(engines)
        with suppress(ConnectionError):
            assert b"[DONE]" not in read_all(stream)
        assert nursery.start(port) == port
        stream = stream_from(port, max_tokens=100)
        nursery.end(signal.SIGTERM)
        assert b"data: [DONE]" in read_all(stream)
        assert nursery.status() == -signal.SIGTERM


# What the user sees when it does not begin


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-model-len", "100000"], "the model takes 512 tokens"),  # the engine's process says so
        (["--in-process", "--device", "nowhere"], "no device"),
        (["--in-process", "--replicas", "2"], "leave out --in-process"),
        (["--in-process", "--tensor-parallel", "2"], "leave out --in-process"),
        (["--api-key", ""], "the API key is empty"),
        (["--drain-seconds", "inf"], "drain_seconds must be"),
        (["--in-process", "--preemption", "swap"], "num_host_blocks"),
    ],
)
def test_options_that_cannot_be_are_told_in_words(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--num-blocks", "64", *options])
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", "").split())
