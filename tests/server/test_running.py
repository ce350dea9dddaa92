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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from minicache.cli import app

SECONDS = 60


def stream_from(port: int, **fields: Any) -> socket.socket:
    """A client in the middle of a stream: it has had its first event."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    body = json.dumps({"prompt": "I", "stream": True, "ignore_eos": True, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
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
    except ConnectionRefusedError:
        return True
    return False


def wait_for_refusal(port: int) -> None:
    end = time.monotonic() + SECONDS
    while not is_refused(port):
        assert time.monotonic() < end, "the server goes on listening"


def test_told_to_stop_it_finishes_what_is_under_way_and_takes_nothing_new(serve: Any, model: Any) -> None:
    server = serve(drain_seconds=SECONDS)
    go = threading.Event()
    first = stream_from(server.port, max_tokens=20)
    model.before = lambda token_ids: go.wait(SECONDS)
    kept = server.open()
    assert server.exchange(kept, "GET", "/health").status == 200
    threading.Timer(0, server.server.stop).start()
    wait_for_refusal(server.port)
    with pytest.raises((ConnectionError, OSError)):
        for _ in range(2):
            server.exchange(kept, "POST", "/v1/completions", {"prompt": "I"})
            kept.auto_open = 0
    go.set()
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


def test_out_of_patience_it_ends_streams_with_an_error(serve: Any, model: Any) -> None:
    server = serve(drain_seconds=0.05)
    stream = stream_from(server.port, max_tokens=500)
    go = threading.Event()
    model.before = lambda token_ids: go.wait(SECONDS)
    server.server.stop()
    events = read_all(stream)
    go.set()
    error, done = events.split(b"data: ")[-2:]
    assert json.loads(error.split(b"\n")[0])["error"]["code"] == "stopping"
    assert done.startswith(b"[DONE]\n\n")


def test_told_twice_it_does_not_wait(serve: Any, model: Any) -> None:
    server = serve(drain_seconds=10 * SECONDS)
    stream = stream_from(server.port, max_tokens=500)
    go = threading.Event()
    model.before = lambda token_ids: go.wait(SECONDS)
    server.server.stop()
    server.server.stop()
    read_all(stream)
    go.set()
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


@contextmanager
def command(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`minicache serve`, and the port on which it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "minicache", "serve", "--num-blocks", "64", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        said = ""
        while "/metrics" not in said:
            line = process.stdout.readline()
            assert line, f"it has ended: {said}"
            said += line
        yield process, int(said.rsplit(":", 1)[1].split("/")[0])
    finally:
        process.kill()
        process.communicate()


def test_killed_and_started_again_it_serves_on_the_same_port_until_sigterm() -> None:
    with command("--port", "0") as (killed, port):
        stream = stream_from(port, max_tokens=500)
        killed.send_signal(signal.SIGKILL)
        killed.wait(SECONDS)
        with pytest.raises((ConnectionError, AssertionError)):
            assert b"[DONE]" in read_all(stream)
    with command("--port", str(port)) as (told, again):
        assert again == port
        stream = stream_from(port, max_tokens=300)
        told.send_signal(signal.SIGTERM)
        assert b"data: [DONE]" in read_all(stream)
        assert told.wait(SECONDS) == -signal.SIGTERM


# What the user sees when it does not begin


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-model-len", "100000"], "the model takes 512 tokens"),
        (["--device", "nowhere"], "no device"),
        (["--api-key", ""], "the API key is empty"),
        (["--drain-seconds", "inf"], "drain_seconds must be"),
        (["--scheduler", "static", "--preemption", "swap"], "preemption"),
    ],
)
def test_options_that_cannot_be_are_told_in_words(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--num-blocks", "64", *options])
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", "").split())
