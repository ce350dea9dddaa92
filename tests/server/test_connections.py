"""What a connection may send, and how many there may be: bounds that hold before any route sees a request."""

from __future__ import annotations

import errno
import gc
import json
import logging
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.server.conftest import Breakable, running
from tests.server.test_robustness import HEAD, post, read_all, read_until, streaming
from tests.server.test_running import CERTIFICATE, KEY

from minicache.serving.http.connections import MAX_HEAD_NBYTES, MAX_QUEUED, BoundedProtocol
from minicache.serving.http.listener import MAX_ACCEPTED, Listener
from minicache.serving.http.running import TLS

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"


@pytest.fixture(scope="module")
def engine_kind() -> str:
    """Where the engine is makes no difference here."""
    return "thread"


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Iterator[Any]:
    with serve_for_module() as started:
        yield started


def connections(server: Any) -> list[BoundedProtocol]:
    return list(server.server.server_state.connections)


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [getattr(each, "fields", {}) for each in caplog.records if each.name == "minicache.access"]


# Requests behind requests


def test_requests_behind_a_stream_are_queued_to_a_bound_and_all_are_answered(
    serve: Any, model: Any, gate: threading.Event
) -> None:
    """The rest is not parsed, and the connection is not read."""
    server = serve()
    model.before = lambda token_ids: gate.wait(60)
    longest = 0
    received = bytearray()

    def is_full() -> bool:
        nonlocal longest
        for each in connections(server):
            longest = max(longest, len(each.pipeline))
            return len(each.pipeline) >= MAX_QUEUED and not each.transport.is_reading()
        return False

    with server.connect() as connection:
        sent = streaming(max_tokens=5) + HEALTH * 20_000
        sending = threading.Thread(target=send_until_reset, args=(connection, sent))
        sending.start()
        server.wait_until(is_full)
        gate.set()
        while received.count(b'"ok"') < 2_000:
            received += connection.recv(2**16)
            server.wait_until(lambda: is_full() or True)
        connection.shutdown(socket.SHUT_RDWR)
        sending.join()
    assert longest <= MAX_QUEUED + 14
    assert received.index(b"[DONE]") < received.index(b'"ok"')


def send_until_reset(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        connection.sendall(data)


@pytest.mark.parametrize("request_", [b"GET /health HTTP/1.1\r\n\r\n", post(b"{}")], ids=["heads", "bodies"])
def test_no_pipelined_request_loses_its_answer(server: Any, request_: bytes) -> None:
    with server.connect() as connection:
        last = request_.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        sending = threading.Thread(target=connection.sendall, args=(request_ * 500 + last,))
        sending.start()
        received = read_all(connection)
        sending.join()
    assert received.count(b"HTTP/1.1 ") == 501


def test_what_cannot_be_parsed_does_not_end_up_in_the_middle_of_an_answer(
    serve: Any, model: Any, gate: threading.Event
) -> None:
    server = serve()
    model.before = lambda token_ids: gate.wait(60)
    with server.connect() as connection:
        connection.sendall(streaming(max_tokens=5))
        server.wait_until(lambda: server.engine.num_unfinished)
        connection.sendall(b"nonsense\r\n\r\n")
        received = read_all(connection)
    gate.set()
    assert received.count(b"HTTP/1.1") <= 1
    assert b"400" not in received


# Heads and trailers


def test_a_head_may_come_in_one_piece_but_not_be_longer_than_one_in_many(server: Any) -> None:
    def ask(nbytes: int) -> bytes:
        with server.connect() as connection:
            start = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-A: "
            connection.sendall(start + b"a" * (nbytes - len(start) - 4) + b"\r\n\r\n")
            return read_all(connection)

    assert ask(MAX_HEAD_NBYTES).startswith(b"HTTP/1.1 200 ")
    refused = ask(MAX_HEAD_NBYTES + 1)
    assert refused.startswith(b"HTTP/1.1 431 ")
    assert b"65,536 bytes" in refused


def test_a_target_has_8192_bytes_at_most(server: Any) -> None:
    def ask(nbytes: int) -> bytes:
        with server.connect() as connection:
            target = b"/health?" + b"a" * (nbytes - 8)
            connection.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return read_all(connection)

    assert ask(8192).startswith(b"HTTP/1.1 200 ")
    assert ask(8193).startswith(b"HTTP/1.1 414 ")
    assert ask(60_000).startswith(b"HTTP/1.1 414 ")


def test_a_request_has_256_headers_at_most(server: Any) -> None:
    def ask(number: int) -> bytes:
        with server.connect() as connection:
            more = b"".join(b"X-%d: a\r\n" % each for each in range(number - 2))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + more + b"\r\n")
            return read_all(connection)

    assert ask(256).startswith(b"HTTP/1.1 200 ")
    refused = ask(257)
    assert refused.startswith(b"HTTP/1.1 431 ")
    assert b"more than 256 headers" in refused


def test_a_head_behind_a_body_is_counted_from_its_beginning(server: Any) -> None:
    with server.connect() as connection:
        connection.sendall(post(b" " * 200_000) + b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 60_000 + b"\r\n\r\n")
        assert read_until(connection, b"ok").count(b"HTTP/1.1 ") == 2


def test_a_trailer_is_no_header(serve: Any) -> None:
    server = serve(api_key="key")
    with server.connect() as connection:
        trailers = b"Authorization: Bearer key\r\nX-Request-Id: of-a-trailer\r\n"
        connection.sendall(CHUNKED + b"Connection: close\r\n\r\n2\r\n{}\r\n0\r\n" + trailers + b"\r\n")
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 401 ")
    assert b"of-a-trailer" not in received


@pytest.mark.parametrize("line", [b"a: b\r\n" * 1000, b"a" * 4096], ids=["many", "one without an end"])
def test_trailers_without_an_end_are_refused(server: Any, line: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(CHUNKED + b"\r\n2\r\n{}\r\n0\r\n")
        with pytest.raises(ConnectionError):
            connection.sendall(line * (2**26 // len(line)))
    assert server.ask("GET", "/health").status == 200


def test_a_body_in_very_small_chunks_is_taken(server: Any) -> None:
    body = json.dumps({"prompt": "I", "max_tokens": 1}).encode() + b" " * 30_000
    with server.connect() as connection:
        chunks = b"".join(b"1;of=one\r\n%c\r\n" % byte for byte in body)
        connection.sendall(CHUNKED + b"Connection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_spaces_behind_a_value_are_not_part_of_it(server: Any) -> None:
    """RFC 9110, section 5.5. A length of "5000000000 " was none, and the body waited for."""
    with server.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 5000000000 \r\nX-Request-Id: mine \t\r\n\r\n")
        head = read_until(connection, b"body_too_large")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"x-request-id: mine\r\n" in head


# Who leaves, and who does not read


def test_a_client_that_reads_nothing_is_disconnected_and_all_of_it_given_back(
    serve: Any, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = serve(unread_seconds=0.2)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(("127.0.0.1", server.port))
    deaf.sendall(streaming(n=4, max_tokens=400, logprobs=20))
    server.wait_until(lambda: any(line["reason"] == "unread" for line in access_lines(caplog)))
    server.wait_until(lambda: not connections(server))
    server.wait_until_idle()
    server.assert_all_is_given_back()
    deaf.close()


def test_also_one_whose_answer_is_complete_is_disconnected(serve: Any) -> None:
    """It lies in the server, which has closed the connection already."""
    server = serve(unread_seconds=0.2)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(("127.0.0.1", server.port))
    deaf.sendall(b"GET /static/live.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
    server.wait_until(lambda: connections(server))
    server.wait_until(lambda: not connections(server))
    deaf.close()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_to_read_that_is_none_is_refused(serve: Any, seconds: float) -> None:
    with pytest.raises(ValueError, match="unread_seconds"):
        serve(unread_seconds=seconds)


# Descriptors


def test_connections_that_descriptors_do_not_suffice_for_are_closed_and_logged_once(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    kept = server.open()
    assert server.exchange(kept, "GET", "/health").status == 200
    with monkeypatch.context() as patched:
        patched.setattr("minicache.serving.http.listener.max_connections", lambda: 0)
        for _ in range(20):
            with server.connect() as connection, suppress(ConnectionError):
                connection.sendall(HEALTH)
                assert connection.recv(1) == b""
        assert server.exchange(kept, "GET", "/health").status == 200
    assert server.ask("GET", "/health").status == 200
    kept.close()
    lines = [each.getMessage() for each in caplog.records if each.name == "minicache.server"]
    assert len(lines) == 1
    assert "connections are refused, 1 so far" in lines[0]


def test_who_only_connects_keeps_no_one_out(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The places of idle connections are taken, the oldest first; not that of a client that waits for its answer."""
    monkeypatch.setattr("minicache.serving.http.connections.max_connections", lambda: 10)
    server = serve()
    with ExitStack() as stack:
        waiting = stack.enter_context(server.connect())
        waiting.sendall(HEAD + b"Content-Length: 2\r\n\r\n{")
        assert server.ask("GET", "/health").status == 200  # by now the server has read that head
        idle = [stack.enter_context(server.connect()) for _ in range(20)]
        assert server.ask("GET", "/health").status == 200
        waiting.sendall(b"}")
        assert waiting.recv(12) == b"HTTP/1.1 400"
        idle[-1].sendall(HEALTH)
        assert idle[-1].recv(12) == b"HTTP/1.1 200"
        with suppress(ConnectionError):
            assert idle[0].recv(1) == b""


def test_a_crowd_that_comes_in_one_turn_takes_one_place_each(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicache.serving.http.connections.max_connections", lambda: 10)
    server, goes_on = serve(), threading.Event()
    server.server._loop.call_soon_threadsafe(goes_on.wait, 60)
    with ExitStack() as stack:
        crowd = [stack.enter_context(server.connect()) for _ in range(20)]
        goes_on.set()
        assert server.ask("GET", "/health").status == 200
        num_open = 0
        for connection in crowd:
            connection.setblocking(False)
            try:
                connection.recv(1)
            except BlockingIOError:
                num_open += 1
            except ConnectionError:
                pass
        assert num_open <= 7


def test_the_limit_of_descriptors_is_raised_and_clients_have_half_of_it() -> None:
    code = """
import resource, sys
from minicache.serving.http.listener import max_connections, raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), max_connections())
"""

    def limits(soft: int, hard: int) -> list[int]:
        return list(map(int, subprocess.check_output([sys.executable, "-c", code, str(soft), str(hard)]).split()))

    assert limits(256, 900) == [900, 900, 450]
    assert limits(900, 900) == [900, 900, 450]
    assert limits(256, 12_000)[::2] == [10_240, 5_120]
    assert limits(11_000, 12_000)[::2] == [11_000, 5_120]


def test_without_a_descriptor_asyncio_is_told_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """It logs the error, and goes on at once, some thousand times."""
    with Listener("127.0.0.1", 0) as listener:
        listener.listen()
        listener.setblocking(False)

        def accept(of: socket.socket) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(socket.socket, "accept", accept)
        with pytest.raises(OSError, match="Too many") as first:
            listener.accept()
        assert not isinstance(first.value, BlockingIOError)
        for _ in range(2):
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_a_crowd_is_accepted_in_several_turns() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(Listener("127.0.0.1", 0))
        listener.listen(100)
        listener.setblocking(False)
        for _ in range(MAX_ACCEPTED + 5):
            stack.enter_context(socket.create_connection(listener.getsockname()))

        def accept_all() -> int:
            number = 0
            with suppress(BlockingIOError):
                while True:
                    listener.accept()[0].close()
                    number += 1
            return number

        assert [accept_all() for _ in range(3)] == [MAX_ACCEPTED, 5, 0]


def test_a_tls_connection_that_does_not_begin_is_closed(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minicache.serving.http.running.HANDSHAKE_SECONDS", 0.1)
    (tmp_path / "both").write_text(CERTIFICATE + KEY)
    server = serve(tls=TLS(certfile=tmp_path / "both"))
    with server.connect() as connection:
        assert read_all(connection) == b""
    context = ssl.create_default_context(cafile=str(tmp_path / "both"))
    with server.connect() as raw, context.wrap_socket(raw, server_hostname="localhost") as connection:
        connection.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert b"200 OK" in read_all(connection)


# Names, and where redirects lead


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "::1", "10.0.0.7:80"])
@pytest.mark.parametrize("names", [(), ("lab.example",)])
def test_an_address_is_answered(named: Any, host: str, names: tuple[str, ...]) -> None:
    assert named(*names).ask("GET", "/v1/models", headers={"Host": host}).status == 200


@pytest.mark.parametrize("host", ["localhost", "LocalHost:8000", "a.localhost", "localhost.:80", "LAB.example:8000"])
def test_a_name_of_this_machine_or_a_given_one_is_answered(named: Any, host: str) -> None:
    assert named("lab.example").ask("GET", "/v1/models", headers={"Host": host}).status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/", "/metrics", "/health"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "a b"]
)
def test_another_name_is_not_answered(named: Any, host: str, path: str) -> None:
    """Else a page of evil.example, which has its name point to 127.0.0.1, could use the model."""
    answer = named().ask("GET", path, headers={"Host": host})
    assert answer.status == 421
    assert answer.json["error"]["code"] == "host_not_allowed"
    assert "--allow-host" in answer.json["error"]["message"]


@pytest.fixture(scope="module")
def named(minigpt: Any) -> Iterator[Any]:
    """Servers that answer to these names."""
    with ExitStack() as stack:
        started: dict[tuple[str, ...], Any] = {}

        def start(*names: str) -> Any:
            if names not in started:
                started[names] = stack.enter_context(running(Breakable(minigpt), "thread", allow_hosts=names))
            return started[names]

        yield start


def test_without_such_a_check_any_name_is_answered(server: Any) -> None:
    assert server.ask("GET", "/health", headers={"Host": "evil.example"}).status == 200


@pytest.mark.parametrize("path", ["/health/", "/metrics/", "/live/", "/v1/completions/"])
def test_a_slash_too_many_is_not_redirected(server: Any, path: str) -> None:
    answer = server.ask("POST" if "v1" in path else "GET", path, headers={"Host": "evil.example"})
    assert answer.status == 404
    assert not re.search("evil", str(answer.headers))


# What is left of a request


def test_answered_requests_leave_nothing_for_the_garbage_collector(server: Any) -> None:
    """A collection of 50,000 objects that refer to each other stops all streams for 80 ms."""

    def ask(num_requests: int) -> int:
        gc.collect()
        with server.connect() as connection:
            connection.sendall(HEALTH * num_requests)
            received = b""
            while received.count(b'"ok"') < num_requests:
                received += connection.recv(2**16)
        server.wait_until(lambda: not connections(server))
        return gc.collect()

    gc.disable()
    try:
        ask(10)
        assert ask(100) < 100
    finally:
        gc.enable()
