"""How a server ends: told to, told twice, out of patience, killed. And how `minicache serve` begins, or does not."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from minicache.serving.http.running import TLS
from minicache_cli import app

SECONDS = 60


def stream_from(port: int, host: str = "127.0.0.1", **fields: Any) -> socket.socket:
    """A client in the middle of a stream: it has had its first event."""
    connection = socket.create_connection((host, port), timeout=SECONDS)
    body = json.dumps({"prompt": "I", "stream": True, "ignore_eos": True, **fields}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
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


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the server has logged of itself."""
    return [each.getMessage() for each in caplog.records if each.name == "minicache.server"]


def test_told_to_stop_it_finishes_what_is_under_way_and_takes_nothing_new(
    serve: Any, model: Any, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "minicache")
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
    assert server.server.num_given_up == 0
    assert told(caplog) == ["draining: 1 answer, up to 60 s", "drained"]


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


def test_out_of_patience_it_ends_streams_with_an_error(
    serve: Any, model: Any, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "minicache")
    server = serve(drain_seconds=0.05)
    stream = stream_from(server.port, max_tokens=500, n=2)
    model.before = lambda token_ids: gate.wait(SECONDS)
    server.server.stop()
    events = read_all(stream)
    gate.set()
    error, done = events.split(b"data: ")[-2:]
    assert json.loads(error.split(b"\n")[0])["error"]["code"] == "stopping"
    assert done.startswith(b"[DONE]\n\n")
    server.stop()
    assert server.server.num_given_up == 2
    assert told(caplog) == ["draining: 2 answers, up to 0.05 s", "abandoned 2 answers after 0.05 s"]


def test_told_twice_it_does_not_wait(serve: Any, model: Any, gate: threading.Event) -> None:
    server = serve(drain_seconds=10 * SECONDS)
    stream = stream_from(server.port, max_tokens=500)
    model.before = lambda token_ids: gate.wait(SECONDS)
    server.server.stop()
    server.server.stop()
    read_all(stream)
    gate.set()
    server.stop()
    assert server.server.num_given_up == 1


def test_who_does_not_read_does_not_hold_up_the_end(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicache.serving.http.running._GRACE", 0)
    server = serve(drain_seconds=0.1)

    def make_buffers_small() -> bool:
        for each in (connections := list(server.server.server_state.connections)):
            each.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bool(connections)

    with stream_from(server.port, max_tokens=400, logprobs=20, n=2):
        server.wait_until(make_buffers_small)
        server.stop()
    assert server.server.num_given_up


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_patience_that_is_no_number_of_seconds_is_refused(serve: Any, seconds: float) -> None:
    with pytest.raises(ValueError, match="drain_seconds"):
        serve(drain_seconds=seconds)


# Behind a proxy, and encrypted


def test_behind_a_proxy_that_takes_a_prefix_away_all_is_where_it_was(serve: Any) -> None:
    server = serve(root_path="/minicache", api_key="key")
    key = {"Authorization": "Bearer key"}
    assert server.ask("GET", "/v1/models", None, key).status == 200
    assert server.ask("GET", "/v1/models").status == 401
    for path in ("/minicache/v1/models", "/minicache/minicache/v1/models", "//v1/models"):
        assert server.ask("GET", path).status == 404
    assert server.ask("GET", "/openapi.json").json["servers"] == [{"url": "/minicache"}]
    page = server.ask("GET", "/").body.decode()
    assert not re.findall(r"""(?:src|href)=["']/""", page), "a link that leaves the prefix"


@pytest.mark.parametrize("path", ["minicache", "/minicache/", "/", "/a b", "/é"])
def test_a_prefix_that_is_no_path_is_refused(serve: Any, path: str) -> None:
    with pytest.raises(ValueError, match="root_path"):
        serve(root_path=path)


CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBrjCCAVSgAwIBAgIUYiOqDNKVvgnJQ1XfzG0cnzzv5rgwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMjIxMTgxNFoYDzIxMjYxMDI5
MjExODE0WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAS1jjMxVC9iJDCJ+4Z2od+swlVIaiG8J9TJKi00qv+HnhguMdLtFppz
mI9eZfw5Ju98w8q4afUdI3b/vkFMDdZto4GBMH8wHQYDVR0OBBYEFH/noQSZMN8o
2FZQrt6/RFqzjSAtMB8GA1UdIwQYMBaAFH/noQSZMN8o2FZQrt6/RFqzjSAtMA8G
A1UdEwEB/wQFMAMBAf8wLAYDVR0RBCUwI4IJbG9jYWxob3N0hwR/AAABhxAAAAAA
AAAAAAAAAAAAAAABMAoGCCqGSM49BAMCA0gAMEUCIQDWbjeVL/FEkYf/RUUIaUL/
5qhC+KLIdFklM/snIqKrrwIgN+esHilEOvJDEmE9g+sVtftOS1lPyYGI+AZt2KXI
i44=
-----END CERTIFICATE-----
"""
KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgd1gSuvMcLeKuxu2u
9gCvwbmeDmUROQiZ71F/8aKOT1mhRANCAAS1jjMxVC9iJDCJ+4Z2od+swlVIaiG8
J9TJKi00qv+HnhguMdLtFppzmI9eZfw5Ju98w8q4afUdI3b/vkFMDdZt
-----END PRIVATE KEY-----
"""
"""For "localhost" and its addresses, made for these tests: it protects nothing."""
OTHER_KEY = """-----BEGIN EC PRIVATE KEY-----
MHcCAQEEIOpQ8NLw21KoyxP0S7PiOEe6I+Se21N3jYzTsRZZDD7UoAoGCCqGSM49
AwEHoUQDQgAEhckACNTQr+bC3124SkftKo3Zs1vRw4hX5DVNB6v2VQYD6EL4p5c+
kZtzy4adGlxsZwSm6Cg6Pfl5iDp6h6m5/w==
-----END EC PRIVATE KEY-----
"""
ENCRYPTED_KEY = """-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-128-CBC,BA980303B581869C0333C8C32A776310

CmZ0BhyL9mYuGKQWyBkgK3wISo33k389DrdVy61eaG5IDiErKra/FwM5qePfMuWu
RvJVrccpDK8QHpJzl+Ffh1aRuqlddnRJCd39+/QekwzgPsTkBZFSxGrLnxLp3GHu
1flCKbW2YQe+iHWbHCI0kc8EHv0M2x+wZRvovmMP5zM=
-----END EC PRIVATE KEY-----
"""


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    """A folder of such files."""
    files = {"both": CERTIFICATE + KEY, "certificate": CERTIFICATE, "key": KEY, "none": "nothing\n"}
    for name, text in {**files, "other": OTHER_KEY, "encrypted": ENCRYPTED_KEY}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_over_https_it_answers_those_who_trust_it_and_whom_it_trusts(
    serve: Any, pem: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("minicache.serving.http.running._GOODBYE_SECONDS", 0.1)
    server = serve(tls=TLS(certfile=pem / "certificate", keyfile=pem / "encrypted", password="sesame"))
    trusting = ssl.create_default_context(cafile=str(pem / "certificate"))
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=trusting, timeout=SECONDS)
    fields = {"prompt": "Yesterday I", "stream": True, "max_tokens": 20, "ignore_eos": True}
    answer = server.exchange(connection, "POST", "/v1/completions", fields)
    assert len(answer.events) == 21
    with pytest.raises(ssl.SSLCertVerificationError):
        http.client.HTTPSConnection("127.0.0.1", server.port, timeout=SECONDS).connect()
    server.stop()  # though the client keeps its connection
    assert "timeout" not in caplog.text
    connection.close()

    server = serve(tls=TLS(certfile=pem / "both", ca_certs=pem / "certificate"))
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=trusting, timeout=SECONDS)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        server.exchange(connection, "GET", "/health")
    trusting.load_cert_chain(pem / "both")
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=trusting, timeout=SECONDS)
    assert server.exchange(connection, "GET", "/health").status == 200
    connection.close()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"certfile": "nowhere"}, "nowhere cannot be read: No such file"),
        ({"certfile": "."}, "cannot be read: Is a directory"),
        ({"certfile": "none"}, "must have a certificate and its private key, in PEM; or give --ssl-keyfile"),
        ({"certfile": "certificate"}, "or give --ssl-keyfile"),
        ({"certfile": "certificate", "keyfile": "none"}, "none its private key"),
        ({"certfile": "certificate", "keyfile": "other"}, "other does not match the certificate"),
        ({"certfile": "certificate", "keyfile": "encrypted"}, "set --ssl-keyfile-password"),
        ({"certfile": "certificate", "keyfile": "encrypted", "password": "wrong"}, "its password is wrong"),
        ({"certfile": "both", "ca_certs": "none"}, "none must have certificates"),
        ({"certfile": "both", "ca_certs": "nowhere"}, "nowhere cannot be read"),
    ],
)
def test_files_that_do_not_do_are_named(pem: Path, files: dict[str, str], words: str) -> None:
    options: dict[str, Any] = {name: each if name == "password" else pem / each for name, each in files.items()}
    with pytest.raises(ValueError, match=re.escape(words)):
        TLS(**options).check()


# The command, as a process


NURSERY = """
import os, sys
import minicache.engine.logprobs, minicache.serving.http.running
from minicache_cli import main
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
        self.pid, self.at = 0, ""
        return self

    def __exit__(self, *error: object) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()

    def start(self, port: int, *options: str) -> int:
        """Start a server; returns the port on which it listens."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"serve --num-blocks 64 --port {port} {' '.join(options)}\n")
        self._process.stdin.flush()
        self.pid = int(self._line("pid").split()[1])  # at once: it has to be killed if it does not begin
        self.at = self._line("metrics").split()[1]
        return int(self.at.rsplit(":", 1)[1].split("/")[0])

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
    """Its child processes; none where that is unknown."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return list(map(int, path.read_text().split())) if path.exists() else []


def wait_for_the_end(pids: list[int]) -> None:
    """No one waits for an orphan: it may stay as a zombie."""
    end = time.monotonic() + SECONDS
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < end, "an engine has outlived its server"
        time.sleep(0.01)


def status_of(port: int, host: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("GET", "/health", headers={"Host": host})
    with closing(connection):
        return connection.getresponse().status


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_and_started_again_it_serves_on_the_same_port_until_sigterm_and_tells_how_it_ended() -> None:
    with Nursery() as nursery:
        port = nursery.start(0)
        stream = stream_from(port, max_tokens=500)
        engines = children(nursery.pid)
        nursery.end(signal.SIGKILL)
        assert nursery.status() == -signal.SIGKILL
        wait_for_the_end(engines)
        with suppress(ConnectionError):
            assert b"[DONE]" not in read_all(stream)
        assert nursery.start(port, "--allow-host", "lab.example") == port
        assert [status_of(port, host) for host in ("lab.example", "evil.example")] == [200, 421]
        stream = stream_from(port, max_tokens=100)
        nursery.end(signal.SIGTERM)
        assert b"data: [DONE]" in read_all(stream)
        assert nursery.status() == 0
        port = nursery.start(0, "--in-process", "--host", "[::1]", "--drain-seconds", "0.01")
        assert nursery.at == f"http://[::1]:{port}/metrics"
        stream = stream_from(port, "::1", max_tokens=500, n=20)
        nursery.end(signal.SIGTERM)
        assert b'"code": "stopping"' in read_all(stream)
        assert nursery.status() == 4


# What the user sees when it does not begin


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-model-len", "100000"], "the model takes 512 tokens"),  # the engine's process says so
        (["--in-process", "--device", "nowhere"], "no device"),
        (["--in-process", "--replicas", "2"], "leave out --in-process"),
        (["--in-process", "--tensor-parallel", "2"], "leave out --in-process"),
        (["--api-key", ""], "the API key is empty"),
        (["--drain-seconds", "inf"], "drain_seconds must be"),
        (["--unread-seconds", "0"], "unread_seconds must be"),
        (["--in-process", "--preemption", "swap"], "num_host_blocks"),
        (["--ssl-certfile", "nowhere.pem"], "nowhere.pem cannot be read"),
        (["--ssl-keyfile", "nowhere.pem"], "--ssl-certfile"),
        (["--root-path", "minicache/"], 'such as "/minicache"'),
        (["--host", "nowhere.invalid"], "Try another --host"),
    ],
)
def test_options_that_cannot_be_are_told_in_words(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--num-blocks", "64", *options])
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", "").split())
