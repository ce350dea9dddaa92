"""What hostile clients cost the others: a canary's longest wait for a token, and the memory of the server.

`minicache serve` with two engines, keys and 1,024 descriptors, and `minicache route` before it, are attacked in ways
that need no key, or that of one client. Meanwhile the canary, which has a key of its own, streams one answer after
another, each on a new connection. Each attack is made twice. Recorded are the longest time between two of the
canary's tokens, whichever answers they belong to, in both; and of the second the resident memory of all processes
before it, at most, and some seconds after it, and the statuses that the attacker got. Attackers run in a process of
their own, on the same machine: on two cores their work is part of what is measured, and so "quiet", without an
attack, comes first.

    python -m benchmarks.attacks [NAME…]

Keys of results/attacks.json: `goal_ms`; `attacks`, a list: attack, and for serve and route, as in serve_gap_ms, each
of gap_ms, num_failed (answers of the canary), mb_before, mb_most, mb_after, statuses (how often each).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

GOAL_MS: Final = 250
SECONDS: Final = 10.0
"""The longest that an attack goes on."""
REST_SECONDS: Final = 4.0
MAIN: Final = "from minicache_cli import main; main()"
PROMPT: Final = "Yesterday I"
KEYS: Final = '[keys.attacker]\nkey = "attacker"\n[keys.canary]\nkey = "canary"\n'
Attack = Callable[[int], Counter[str]]
"""Attacks a port; returns how often each status was the answer."""


# --- what the attackers do --------------------------------------------------------------------------------------------


def connect(port: int, *, has_room: bool = True) -> socket.socket:
    """A connection; without room, the system keeps little of what is not read."""
    client = socket.socket()
    client.settimeout(SECONDS)
    if not has_room:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", port))
    return client


def get(path: str, *headers: str) -> bytes:
    """A request without a body."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers, "", ""]).encode()


def post(body: bytes | dict[str, Any], *headers: str, key: str = "attacker", length: int | None = None) -> bytes:
    """A request for a completion."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(content) if length is None else length
    head = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", "Connection: close"]
    head += [*headers, f"Authorization: Bearer {key}", f"Content-Length: {size}"]
    return "\r\n".join([*head, "", ""]).encode() + content


def chunked(chunks: bytes) -> bytes:
    """A request whose body comes in chunks, here without the last one."""
    return post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + chunks


def status_of(answer: bytes) -> str:
    """The status of a response; "closed" if there is none."""
    return answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"


def exchange(port: int, request: bytes) -> str:
    """Send some bytes, and read until the server closes or says nothing for SECONDS: the status."""
    answer = b""
    with suppress(OSError), connect(port) as client:
        with suppress(OSError):  # an answer may come before all is sent
            client.sendall(request)
        while more := client.recv(2**16):
            answer = answer or more
    return status_of(answer)


def at_once(number: int, act: Callable[[], Counter[str]]) -> Counter[str]:
    """The same, several times at once."""
    with ThreadPoolExecutor(number) as threads:
        return sum((each.result() for each in [threads.submit(act) for _ in range(number)]), Counter())


def flood(number: int, request: Callable[[int], bytes], *, connections: int = 1) -> Attack:
    """So many requests, each on a connection of its own, as many at once as said. It ends after SECONDS."""

    def attack(port: int) -> Counter[str]:
        left, until = iter(range(number)), time.monotonic() + SECONDS

        def act() -> Counter[str]:
            found: Counter[str] = Counter()
            while time.monotonic() < until and (index := next(left, None)) is not None:
                found[exchange(port, request(index))] += 1
            return found

        return at_once(connections, act)

    return attack


def hold(number: int, begin: bytes, letters: bytes = b"") -> Attack:
    """So many connections at once, kept for SECONDS, on which a request begins, and goes on by a letter a second."""

    def attack(port: int) -> Counter[str]:
        clients = []
        for _ in range(number):
            with suppress(OSError):
                clients.append(connect(port, has_room=False))
                clients[-1].sendall(begin)
        for second in range(int(SECONDS)):
            time.sleep(1)
            for client in clients:
                with suppress(OSError):
                    client.send(letters[second : second + 1])
        found: Counter[str] = Counter()
        for client in clients:
            client.setblocking(False)
            try:
                found[status_of(client.recv(2**16))] += 1
            except BlockingIOError:
                found["open"] += 1
            except OSError:
                found["closed"] += 1
            client.close()
        return found

    return attack


def leave(request: bytes, *, waits: bool) -> Attack:
    """One connection after the other, for SECONDS, and each is reset: at once, or when an answer begins to come."""

    def attack(port: int) -> Counter[str]:
        found, until = Counter[str](), time.monotonic() + SECONDS
        while time.monotonic() < until:
            with suppress(OSError), connect(port) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(request)
                if waits:
                    client.recv(10)
                found["left"] += 1
        return found

    return attack


def pipelining(port: int) -> Counter[str]:
    """12,000 requests in one write, on six connections."""

    def act() -> Counter[str]:
        num_read, until = 0, time.monotonic() + SECONDS
        with connect(port) as client:
            client.setblocking(False)
            data = memoryview(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 12_000)
            while time.monotonic() < until and num_read < 12_000:
                with suppress(BlockingIOError):
                    data = data[client.send(data) :]
                with suppress(BlockingIOError):
                    num_read += client.recv(2**20).count(b"HTTP/1.1 200")
                time.sleep(0.001)
        return Counter({"200": num_read})

    return at_once(6, act)


def trailers(port: int) -> Counter[str]:
    """A body in chunks, and then trailers without end, on four connections."""

    def act() -> Counter[str]:
        trailer, until = b"X-Trailer: " + b"x" * 8000 + b"\r\n", time.monotonic() + SECONDS
        with connect(port) as client:
            client.sendall(chunked(b"2\r\n{}\r\n0\r\n"))
            with suppress(OSError):
                while time.monotonic() < until:
                    client.sendall(trailer * 8)
            with suppress(OSError):
                return Counter([status_of(client.recv(2**16))])
        return Counter(["closed"])

    return at_once(4, act)


def near_stops(port: int) -> Counter[str]:
    """128 equal answers, and sixteen stop strings that are nearly in them: too long together, and admitted."""
    wish = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    answer = b""
    with connect(port) as client:
        client.sendall(post(wish))
        while more := client.recv(2**16):
            answer += more
    text = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
    wishes = [{**wish, "n": 128, "stop": [text[at : at + size] + "#" for at in range(16)]} for size in (400, 60)]
    return flood(2, lambda index: post(wishes[index]))(port)


ODD: Final = ("X-A: a ", "Cookie: a=" + "x" * 60_000)
WISH: Final = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True}
LARGE: Final = (
    {**WISH, "prompt": [PROMPT] * 128, "max_tokens": 30},
    {**WISH, "prompt": [5] * 400, "max_tokens": 100, "n": 128, "return_token_ids": True},
    {**WISH, "stop": ["a" * 63 + chr(98 + at) for at in range(16)], "n": 16},
)
"""Many prompts, many answers with the prompt's tokens in each, many stop strings."""
STRANGE: Final = (
    b'{"prompt": "' + b"\\u0041 " * 140_000 + b'"}',
    b'{"prompt": [' + b"1e5," * 200_000 + b"1]}",
    b'{"prompt": ' + b"9" * 900_000 + b"}",
    b'{"prompt": "' + "".join(map(chr, range(0x4E00, 0x8E00))).encode() * 8 + b'"}',
)
"""Bodies near a megabyte: escapes, floats, one number, and words that the tokenizer does not know."""

ATTACKS: Final[dict[str, Attack]] = {
    "quiet": hold(0, b""),
    # connections
    "idle_connections": hold(1200, b""),  # more than the server has descriptors
    "resets": leave(b"GET /health HT", waits=False),
    "slow_heads": hold(200, b"", b"GET /health"),
    "slow_bodies": hold(300, post(b"{", length=1000), b" " * 10),
    "never_continued": hold(200, post(b"", "Expect: 100-continue", length=1000)),
    "upgrades": flood(500, lambda _: get("/v1/completions", "Connection: Upgrade", "Upgrade: websocket")),
    # heads
    "pipelining": pipelining,
    "long_heads": flood(50, lambda _: get("/health", "X-Long: " + "x" * 2**20)),
    "many_headers": flood(100, lambda _: get("/health", *(f"X-{each}: {each}" for each in range(3000)))),
    "long_paths": flood(500, lambda _: get("/v1/models/" + "%41/" * 15_000)),
    "odd_headers": flood(20, lambda index: post({"prompt": PROMPT}, ODD[index % 2])),
    # bodies
    "trailers": trailers,
    "tiny_chunks": flood(8, lambda _: chunked(b"1\r\n \r\n" * 200_000 + b"2\r\n{}\r\n0\r\n\r\n"), connections=8),
    "huge_length": flood(20, lambda _: post(b"{", length=5 * 10**9)),
    "nested_json": flood(10, lambda _: post(b'{"prompt": "a", "ignored": [' + b"[]," * 2**20 + b"0]}")),
    "many_tokens": flood(10, lambda _: post(b'{"max_tokens": 1, "prompt": [' + b"1," * 500_000 + b"1]}")),
    "strange_json": flood(40, lambda index: post(STRANGE[index % 4]), connections=4),
    # requests
    "wrong_keys": flood(5000, lambda index: post({"prompt": PROMPT}, key=f"k{index}" * 50), connections=50),
    "metrics": flood(3000, lambda _: get("/metrics"), connections=50),
    "live_pages": hold(400, get("/live", "Authorization: Bearer attacker")),
    # answers
    "logprobs": flood(2, lambda index: post({**WISH, "n": 128, "logprobs": 20, "max_tokens": (500, 93)[index]})),
    "near_stops": near_stops,
    "large_requests": flood(24, lambda index: post(LARGE[index % 3]), connections=4),
    "streams": flood(60, lambda _: post({**WISH, "stream": True, "n": 8, "logprobs": 20}), connections=12),
    "leaving": leave(post({**WISH, "stream": True, "n": 8}), waits=True),
    "never_reading": hold(200, post({**WISH, "stream": True, "logprobs": 20})),  # each has two descriptors of a router
}


# --- the canary, and what is attacked ---------------------------------------------------------------------------------


class Canary:
    """Streams answers until it is stopped. `worst` is the longest time without a token, in seconds."""

    def __init__(self, port: int) -> None:
        self._port, self._is_done = port, False
        self._last, self.worst, self.num_failed = time.perf_counter(), 0.0, 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def reset(self) -> None:
        """Begin to measure."""
        self._last, self.worst, self.num_failed = time.perf_counter(), 0.0, 0

    def stop(self) -> None:
        """End."""
        self._is_done = True
        self._thread.join()

    def _run(self) -> None:
        wish = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 0}
        while not self._is_done:
            end = b""
            with suppress(OSError), connect(self._port) as client:
                client.sendall(post(wish, key="canary"))
                while not self._is_done and (data := client.recv(2**16)):
                    end = end[-20:] + data
                    if b"data: {" in data and b'"error"' not in data:
                        now = time.perf_counter()
                        self.worst, self._last = max(self.worst, now - self._last), now
                        time.sleep(0.002)  # a reader has something to do as well
            self.num_failed += not (self._is_done or b"data: [DONE]" in end)
            self.worst = max(self.worst, time.perf_counter() - self._last)


@contextmanager
def minicache(*arguments: str) -> Iterator[tuple[int, psutil.Process]]:
    """A command of minicache that listens: its port, and its process."""

    def few_descriptors() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))

    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", MAIN, *arguments, "--port", "0", "--log-format", "json"],
                stderr=stderr,
                preexec_fn=few_descriptors,
            )
        try:
            while (lines := [line for line in log.read_text().splitlines() if '"listening"' in line]) == []:
                if process.poll() is not None:
                    raise RuntimeError(log.read_text())
                time.sleep(0.05)
            yield int(json.loads(lines[0])["url"].rpartition(":")[2]), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def memory_mb(processes: list[psutil.Process]) -> float:
    """Resident memory of processes and their children, in MB."""
    family = [each for process in processes for each in (process, *process.children(recursive=True))]
    return float(sum(each.memory_info().rss for each in family) / 1e6)


def attack_in_process(name: str, port: int, wire: Connection) -> None:
    """What the attacker's process runs."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    wire.send(ATTACKS[name](port))


def attacked(name: str, port: int, processes: list[psutil.Process]) -> tuple[Counter[str], float]:
    """One attack: the statuses that the attacker got, and the most memory, in MB."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=attack_in_process, args=(name, port, there))
    process.start()
    most = memory_mb(processes)
    while process.is_alive() and not here.poll(0.1):
        most = max(most, memory_mb(processes))
    statuses: Counter[str] = here.recv() if here.poll() else Counter(["attacker died"])
    process.join()
    return statuses, most


def measured(name: str, port: int, canary: Canary, processes: list[psutil.Process]) -> dict[str, Any]:
    """Two attacks: how the canary fared, and the memory of the second. The first takes what a server keeps for good."""
    canary.reset()
    attacked(name, port, processes)
    time.sleep(REST_SECONDS)
    before = memory_mb(processes)
    statuses, most = attacked(name, port, processes)
    gap, num_failed = canary.worst, canary.num_failed
    time.sleep(REST_SECONDS)
    return {
        "gap_ms": round(1e3 * gap),
        "num_failed": num_failed,
        "mb_before": round(before),
        "mb_most": round(most),
        "mb_after": round(memory_mb(processes)),
        "statuses": dict(statuses),
    }


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    only = sys.argv[1:]
    found: dict[str, dict[str, Any]] = {name: {"attack": name} for name in only or ATTACKS}
    with ExitStack() as stack:
        keys = Path(stack.enter_context(TemporaryDirectory())) / "keys.toml"
        keys.write_text(KEYS)
        served = [stack.enter_context(minicache("serve", "--replicas", "2", "--api-keys", str(keys)))]
        served.append(stack.enter_context(minicache("route", f"http://127.0.0.1:{served[0][0]}")))
        for target, (port, _) in zip(("serve", "route"), served, strict=True):
            canary = Canary(port)
            stack.callback(canary.stop)
            time.sleep(2)
            processes = [each for _, each in served]
            for name in track(found, description=f"Attacking {target}"):
                result = measured(name, port, canary, processes)
                found[name] |= {f"{target}_{key}": value for key, value in result.items()}
            canary.stop()
    show(list(found.values()))
    if not only:
        from benchmarks._record import record

        record("attacks", {"goal_ms": GOAL_MS, "attacks": list(found.values())})


def show(found: list[dict[str, Any]]) -> None:
    """A row for each attack and target."""
    table = Table(title="The canary's longest wait, and the server's memory", box=SIMPLE_HEAD)
    table.add_column("attack", no_wrap=True)
    table.add_column("target")
    for heading in ("wait, ms", "failed", "MB before", "most", "after"):
        table.add_column(heading, justify="right")
    table.add_column("statuses")
    for each in found:
        for target in ("serve", "route"):
            statuses = ", ".join(f"{number} × {name}" for name, number in each[f"{target}_statuses"].items())
            numbers = ("gap_ms", "num_failed", "mb_before", "mb_most", "mb_after")
            table.add_row(each["attack"], target, *(str(each[f"{target}_{name}"]) for name in numbers), statuses)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
