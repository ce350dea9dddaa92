"""The proxy as a server: its connections have the bounds of `minicache serve`'s (tests/server/test_connections.py)."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from minicache.fleet import create_router
from minicache.serving.http.running import Server
from minicache.serving.proxy.app import create_app
from minicache.serving.proxy.metrics import Metrics
from minicache.serving.proxy.workers import Workers

SECONDS = 60
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A proxy whose worker is not there."""
    urls = ["http://127.0.0.1:9"]
    api = create_app(Workers(urls, create_router("round_robin"), Metrics(urls), max_unfinished=8), policy="round_robin")
    listening = threading.Event()
    started = Server(api, port=0, drain_seconds=1, on_listening=lambda at: listening.set())
    thread = threading.Thread(target=started.run)
    thread.start()
    assert listening.wait(SECONDS)
    yield started
    started.stop()
    thread.join(SECONDS)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(server.servers[0].sockets[0].getsockname(), timeout=SECONDS)


def answer(server: Server, sent: bytes) -> bytes:
    received = b""
    with connect(server) as connection:
        connection.sendall(sent)
        while piece := connection.recv(2**16):
            received += piece
    return received


def test_a_long_head_and_a_long_body_are_refused(server: Server) -> None:
    assert answer(server, HEAD + b"X-A: " + b"a" * 70_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    length = b"Connection: close\r\nContent-Length: 5000000000 \r\n\r\n"
    assert answer(server, HEAD + length).startswith(b"HTTP/1.1 413 ")


def test_a_trailer_is_no_header(server: Server) -> None:
    sent = (
        HEAD
        + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Request-Id: of-a-trailer\r\n\r\n"
    )
    received = answer(server, sent)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"of-a-trailer" not in received


def test_an_upload_that_is_broken_off_is_one_line_of_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    has_line = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            has_line.set()

    logger, handler = logging.getLogger("minicache.access"), Handler()
    logger.addHandler(handler)
    caplog.set_level(logging.INFO)
    try:
        with connect(server) as connection:
            connection.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n")
            assert connection.recv(2**16).startswith(b"HTTP/1.1 100 ")  # the body is waited for
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert has_line.wait(SECONDS)
        answer(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")  # what comes behind it
    finally:
        logger.removeHandler(handler)
    (line,) = [each.fields for each in caplog.records if each.name == "minicache.access"]  # type: ignore[attr-defined]
    assert (line["status"], line["reason"]) == (499, "client_left")
    assert [each for each in caplog.records if each.levelno >= logging.WARNING or each.exc_info] == []


@pytest.mark.parametrize("path", [b"/health/", b"/metrics/", b"/v1/models/"])
def test_a_slash_too_many_is_not_redirected(server: Server, path: bytes) -> None:
    received = answer(server, b"GET " + path + b" HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
    assert received.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 503 "))
    assert b"evil.example" not in received
