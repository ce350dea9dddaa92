"""The files of deploy/ as an operator uses them, on free ports of 127.0.0.1: real programs before a real server."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PREFIX = "/minicache"
KEYS = DEPLOY / "keys.toml"
KEY = tomllib.loads(KEYS.read_text(encoding="utf-8"))["keys"]["teacher"]["key"]
SECONDS = 60
"""So long a test waits for what has to happen; then it has failed."""


def program(name: str, package: str) -> str:
    """The path of a program that a Debian package brings."""
    if path := shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin"):
        return path
    if os.environ.get("MINICACHE_REQUIRE_DEPLOY") == "1":
        pytest.fail(f"no {name}: install the package `{package}`")
    pytest.skip(f"no {name}: install the package `{package}` to have deploy/ tested")


def changed(text: str, changes: dict[str, str]) -> str:
    """A configuration with some of its words replaced. Each has to be there, once."""
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(what: Callable[[], object], of: str) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < end, f"it has not come to that: {of}"
        time.sleep(0.02)


@contextmanager
def running(command: list[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program for as long as the block lasts; then it gets a SIGTERM, and must end."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, **options)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def answers(port: int, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether a program listens; one that has ended fails the test with its log."""
    assert process.poll() is None, log.read_text(errors="replace")[-3000:]
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# --- the server -----------------------------------------------------------------------------------------------------


def unit_command() -> list[str]:
    """The words of ExecStart in minicache.service."""
    unit = (DEPLOY / "minicache.service").read_text(encoding="utf-8").replace("\\\n", " ")
    [line] = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    return str(line).split()


@dataclass
class Server:
    """`minicache serve` as the unit starts it, on another port.

    Attributes:
        port: where it listens.
        process: its process, the engine's parent.
        log: what it has written.
    """

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        return exchange(connection, method, path, body, headers)

    def metric(self, name: str) -> float:
        """A sample, by its name and its labels that are no engine's."""
        text = self.ask("GET", "/metrics")[2].decode()
        name, _, label = name.partition("{")
        lines = [line for line in text.splitlines() if line.startswith(name + "{") and label.rstrip("}") in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    @property
    def engine_pid(self) -> int:
        [child] = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    @contextmanager
    def frozen_engine(self) -> Iterator[None]:
        """Nothing is generated in this block."""
        os.kill(self.engine_pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.engine_pid, signal.SIGCONT)


@contextmanager
def serving(folder: Path, **changes: str) -> Iterator[Server]:
    """A server that is ready. Changes are of the unit's options: max_waiting="0"."""
    port, log = free_port(), folder / "serve.log"
    command = unit_command()
    assert Path(command[0]).name == "minicache"
    for name, value in {"port": str(port), "api_keys": str(KEYS), **changes}.items():
        command[command.index("--" + name.replace("_", "-")) + 1] = value
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command[0] = str(Path(sys.executable).with_name("minicache"))
    with running(command, log, env=environment) as process:
        server = Server(port, process, log)
        wait_until(lambda: answers(port, process, log), "the server listens")
        wait_until(lambda: server.ask("GET", "/health")[0] == 200, "the server is ready")
        yield server


@contextmanager
def serving_fleet(folder: Path) -> Iterator[dict[int, int]]:
    """Two servers and the router, by the commands of fleet/compose.yaml; gives port there → port here."""
    services = yaml.safe_load((DEPLOY / "fleet/compose.yaml").read_text(encoding="utf-8"))["services"]
    ports = {number: free_port() for number in (8000, 8001, 8002)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        for name in ("worker-1", "worker-2", "router"):
            command = " ".join(services[name]["command"])
            for there, here in ports.items():
                command = command.replace(str(there), str(here))
            words, log = [str(Path(sys.executable).with_name("minicache")), *command.split()], folder / f"{name}.log"
            process = stack.enter_context(running(words, log, env=environment))
            port = int(re.findall(r"--port=(\d+)", command)[0])
            wait_until(partial(answers, port, process, log), f"{name} listens")
            wait_until(partial(is_healthy, port), f"{name} is ready")
        yield ports


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    return exchange(connection, "GET", "/health", None, {})[0] == 200


# --- a client -------------------------------------------------------------------------------------------------------


def exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: dict[str, str]
) -> tuple[int, http.client.HTTPMessage, bytes]:
    data = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


@dataclass
class Proxy:
    """A proxy with TLS, and clients for it.

    Attributes:
        port: where it listens.
        trust: knows its certificate.
        log: a line for each request.
    """

    port: int
    trust: ssl.SSLContext
    log: Path

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self.port, context=self.trust, timeout=SECONDS)

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        headers = {"Authorization": f"Bearer {KEY}", **{name.replace("_", "-"): it for name, it in headers.items()}}
        return exchange(self.connect(), method, PREFIX + path, body, headers)

    @contextmanager
    def stream(self, num_tokens: int = 400) -> Iterator[Stream]:
        """An answer of so many tokens under way."""
        connection = self.connect()
        body = {
            "model": "minigpt",
            "prompt": "Yesterday I",
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", f"{PREFIX}/v1/completions", json.dumps(body), headers)
        try:
            yield Stream(connection)
        finally:
            connection.close()


class Stream:
    """The events of an answer, as they come.

    Attributes:
        num_tokens: that have come.
        is_done: whether [DONE] has.
    """

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._response: http.client.HTTPResponse | None = None
        self.num_tokens, self.is_done = 0, False

    def leave(self) -> None:
        """Close the connection in the middle."""
        assert self._response is not None
        self._response.close()
        self._connection.close()

    def read(self, num_tokens: int | None = None) -> None:
        """Wait for so many more tokens; None: for the end."""
        if self._response is None:
            self._response = self._connection.getresponse()
            assert self._response.status == 200, self._response.read()
        end = None if num_tokens is None else self.num_tokens + num_tokens
        while not self.is_done and (end is None or self.num_tokens < end):
            line = self._response.readline().strip()
            if line == b"data: [DONE]":
                self.is_done = True
            elif line:
                assert line.startswith(b"data: "), line
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                self.num_tokens += len(event["choices"][0]["logprobs"]["tokens"])


# --- proxies --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of localhost, signed by itself, and its private key."""
    folder = tmp_path_factory.mktemp("certificate")
    cert, key = folder / "fullchain.pem", folder / "privkey.pem"
    command = [program("openssl", "openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


NGINX = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log notice;
{user}
events {{}}
http {{
    {temporary}
    include {site};
}}
"""


@contextmanager
def nginx(server_port: int, certificate: tuple[Path, Path], folder: Path) -> Iterator[Proxy]:
    command, port, plain = program("nginx", "nginx-light"), free_port(), free_port()
    cert, key = certificate
    text = changed(
        (DEPLOY / "nginx.conf").read_text(encoding="utf-8"),
        {
            "server 127.0.0.1:8000;": f"server 127.0.0.1:{server_port};",
            "listen 80;": f"listen 127.0.0.1:{plain};",
            "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
            "/etc/ssl/minicache/fullchain.pem": str(cert),
            "/etc/ssl/minicache/privkey.pem": str(key),
            "/var/log/nginx/minicache.log": str(folder / "access.log"),
        },
    )
    site, whole, log = folder / "site.conf", folder / "nginx.conf", folder / "nginx.log"
    site.write_text(text.replace("workshop.example.org", "localhost"), encoding="utf-8")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    user = "user root;" if os.geteuid() == 0 else ""  # its workers would not be let into the folder
    whole.write_text(NGINX.format(folder=folder, user=user, temporary=temporary, site=site), encoding="utf-8")
    with running([command, "-e", str(log), "-p", str(folder), "-c", str(whole)], log) as process:
        wait_until(lambda: answers(port, process, log), "nginx listens")
        yield Proxy(port, ssl.create_default_context(cafile=str(cert)), folder / "access.log")


@contextmanager
def caddy(server_port: int, certificate: tuple[Path, Path], folder: Path) -> Iterator[Proxy]:
    command, port = program("caddy", "caddy"), free_port()
    cert, key = certificate
    text = changed(
        (DEPLOY / "Caddyfile").read_text(encoding="utf-8"),
        {
            "\nworkshop.example.org {": f"\nhttps://localhost:{port} {{\n\tbind 127.0.0.1\n\ttls {cert} {key}",
            "reverse_proxy 127.0.0.1:8000": f"reverse_proxy 127.0.0.1:{server_port}",
        },
    )
    config, log = folder / "Caddyfile", folder / "caddy.log"
    config.write_text(f"{{\n\tadmin off\n\tauto_https disable_redirects\n}}\n{text}", encoding="utf-8")
    home = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with running([command, "run", "--adapter", "caddyfile", "--config", str(config)], log, env=home) as process:
        wait_until(lambda: answers(port, process, log), "Caddy listens")
        yield Proxy(port, ssl.create_default_context(cafile=str(cert)), log)


@pytest.fixture(name="program", scope="session")
def program_fixture() -> Callable[[str, str], str]:
    return program


@pytest.fixture(name="wait_until", scope="session")
def wait_until_fixture() -> Callable[[Callable[[], object], str], None]:
    return wait_until


PROXIES = {"nginx": nginx, "caddy": caddy}


@pytest.fixture(scope="session")
def key() -> str:
    """One that the server admits, and that has no limits."""
    return KEY


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One for all tests that do not end it, with four admission slots."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), max_num_seqs="4", max_waiting="0") as server:
        yield server


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request: pytest.FixtureRequest, server: Server, certificate: tuple[Path, Path]) -> Iterator[Proxy]:
    with tempfile.TemporaryDirectory() as folder, PROXIES[request.param](server.port, certificate, Path(folder)) as it:
        yield it


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, int]]:
    """The fleet of fleet/compose.yaml: port there → port here."""
    with serving_fleet(tmp_path_factory.mktemp("fleet")) as ports:
        yield ports


@pytest.fixture
def server_to_stop(tmp_path: Path) -> Iterator[Server]:
    """One for a test that ends it."""
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def proxies(certificate: tuple[Path, Path], tmp_path: Path) -> Iterator[Callable[[int], list[Proxy]]]:
    """A function that puts every proxy in front of a server."""
    with ExitStack() as stack:

        def start(server_port: int) -> list[Proxy]:
            started = []
            for name, proxy in PROXIES.items():
                (tmp_path / name).mkdir()
                started.append(stack.enter_context(proxy(server_port, certificate, tmp_path / name)))
            return started

        yield start


# --- Prometheus -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def promtool() -> Callable[..., None]:
    """A function that runs it, and fails with what it says."""

    def run(*words: object) -> None:
        command = [program("promtool", "prometheus"), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    return exchange(connection, "GET", "/-/ready", None, {})[0] == 200


@pytest.fixture(scope="module")
def prometheus_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A context manager: Prometheus asks what its configuration says, at other ports, five times a second.

    It gives the port at which Prometheus answers.
    """

    @contextmanager
    def start(ports: dict[int, int], configuration: str = "prometheus.yml") -> Iterator[int]:
        command, port, folder = program("prometheus", "prometheus"), free_port(), tmp_path_factory.mktemp("prometheus")
        changes = {
            "scrape_interval: 5s": "scrape_interval: 200ms",
            "evaluation_interval: 5s": "evaluation_interval: 1s",
        }
        changes |= {f"127.0.0.1:{there}": f"127.0.0.1:{here}" for there, here in ports.items()}
        text = changed((DEPLOY / configuration).read_text(encoding="utf-8"), changes)
        (folder / "prometheus.yml").write_text(text, encoding="utf-8")
        shutil.copy(DEPLOY / "alerts.yml", folder)
        options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data"}
        options["web.listen-address"] = f"127.0.0.1:{port}"
        log = folder / "prometheus.log"
        with running([command, *(f"--{name}={value}" for name, value in options.items())], log) as process:
            wait_until(lambda: answers(port, process, log), "Prometheus listens")
            wait_until(lambda: is_ready(port), "Prometheus is ready")
            yield port

    return start
