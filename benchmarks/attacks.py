"""What hostile clients cost the others: a canary's longest wait for a token, and the memory of the server.

`minicache serve` with two engines, keys and 1,024 descriptors, and `minicache route` before it, are attacked in ways
that need no key, or that of one client. Meanwhile the canary, which has a key of its own, streams one answer after
another, each on a new connection. Each attack is made twice. Recorded are the longest time between two of the
canary's tokens, whichever answers they belong to, in both; and of the second the resident memory of all processes
before it, at most, and some seconds after it, and the statuses that the attacker got. Attackers run in a process of
their own, on the same machine: on two cores their work is part of what is measured, and so "quiet", without an
attack, comes first.

    python -m benchmarks.attacks [NAME…]

Keys of results/attacks.json: `goal_ms`; `attacks` (a list: attack, target, gap_ms, canary_failed, mb_before,
mb_most, mb_after, statuses: how often each).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
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


# --- what the attackers do --------------------------------------------------------------------------------------------


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def post(body: bytes | dict[str, Any], *headers: str, key: str = "attacker", length: int | None = None) -> bytes:
    """A request for a completion."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(content) if length is None else length
    head = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    head += [f"Authorization: Bearer {key}", f"Content-Length: {size}"]
    return "\r\n".join([*head, "", ""]).encode() + content


def status_of(answer: bytes) -> str:
    """The status of a response; "closed" if there is none."""
    return answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"


def exchange(port: int, *pieces: bytes) -> Counter[str]:
    """Send some bytes, and read until the server closes or says nothing for SECONDS: the first status."""
    answer = b""
    with connect(port) as client, suppress(OSError):
        for piece in pieces:
            client.sendall(piece)
        while more := client.recv(2**16):
            answer = answer or more
            if b"\r\n0\r\n\r\n" in more or answer[9:12] >= b"400":
                break
    return Counter([status_of(answer)])


def at_once(number: int, act: Callable[[], Counter[str]]) -> Counter[str]:
    """The same, several times at once."""
    found: Counter[str] = Counter()
    lock = threading.Lock()

    def run() -> None:
        with suppress(OSError):
            one = act()
            with lock:
                found.update(one)

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def quiet(port: int) -> Counter[str]:
    """Nothing."""
    time.sleep(SECONDS)
    return Counter()


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
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        trailer, until = b"X-Trailer: " + b"x" * 8000 + b"\r\n", time.monotonic() + SECONDS
        with connect(port) as client:
            client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n".encode())
            with suppress(OSError):
                while time.monotonic() < until:
                    client.sendall(trailer * 8)
            with suppress(OSError):
                return Counter([status_of(client.recv(2**16))])
        return Counter(["closed"])

    return at_once(4, act)


def long_heads(port: int) -> Counter[str]:
    """Heads of a megabyte in one piece."""
    head = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"x" * 2**20 + b"\r\n\r\n"
    return sum((exchange(port, head) for _ in range(50)), Counter())


def logprobs(port: int) -> Counter[str]:
    """128 answers, each token with 20 others: 500 tokens, which is refused, and 93, the most that is admitted."""
    wish = {"prompt": PROMPT, "n": 128, "logprobs": 20, "ignore_eos": True}
    return sum(
        (exchange(port, post({**wish, "max_tokens": most}, "Connection: close")) for most in (500, 93)), Counter()
    )


def near_stops(port: int) -> Counter[str]:
    """128 equal answers, and sixteen stop strings that are nearly in them."""
    wish = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    with connect(port) as client:
        client.sendall(post(wish, "Connection: close"))
        answer = b""
        while more := client.recv(2**16):
            answer += more
    text = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
    found: Counter[str] = Counter()
    for length in (400, 60):  # refused, and admitted
        stops = [text[at : at + length] + "#" for at in range(16)]
        found += exchange(port, post({**wish, "n": 128, "stop": stops}, "Connection: close"))
    return found


def idle_connections(port: int) -> Counter[str]:
    """1,200 connections, more than the server has descriptors."""
    clients: list[socket.socket] = []
    with suppress(OSError):
        clients.extend(connect(port) for _ in range(1200))
    time.sleep(SECONDS)
    for client in clients:
        client.close()
    return Counter({"opened": len(clients)})


def slow_heads(port: int) -> Counter[str]:
    """200 connections that send a letter a second."""
    clients = [connect(port) for _ in range(200)]
    for letter in b"GET /health"[: int(SECONDS)]:
        for client in clients:
            with suppress(OSError):
                client.send(bytes([letter]))
        time.sleep(1)
    for client in clients:
        client.close()
    return Counter()


def nested_json(port: int) -> Counter[str]:
    """Megabytes of empty lists in a field that is ignored, ten times."""
    body = b'{"prompt": "Yesterday I", "max_tokens": 1, "ignored": [' + b"[]," * (2**20) + b"0]}"
    return sum((exchange(port, post(body, "Connection: close")) for _ in range(10)), Counter())


def many_tokens(port: int) -> Counter[str]:
    """A prompt of half a million token ids, ten times."""
    body = b'{"max_tokens": 1, "prompt": [' + b"1," * 500_000 + b"1]}"
    return sum((exchange(port, post(body, "Connection: close")) for _ in range(10)), Counter())


def huge_length(port: int) -> Counter[str]:
    """Bodies that say that they will have five gigabytes."""
    return sum((exchange(port, post(b"{", length=5 * 10**9)) for _ in range(20)), Counter())


def never_reading(port: int) -> Counter[str]:
    """300 streams whose clients do not read."""
    wish = {"prompt": PROMPT, "max_tokens": 500, "stream": True, "ignore_eos": True, "logprobs": 20}
    clients = []
    for _ in range(300):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(SECONDS)
        with suppress(OSError):
            client.connect(("127.0.0.1", port))
            client.sendall(post(wish))
        clients.append(client)
    time.sleep(SECONDS)
    for client in clients:
        client.close()
    return Counter()


def odd_headers(port: int) -> Counter[str]:
    """A space behind a header, and cookies of 60 kB."""
    wish = {"prompt": PROMPT, "max_tokens": 1}
    odd = ("X-A: a ", "Cookie: a=" + "x" * 60_000)
    return sum((exchange(port, post(wish, each, "Connection: close")) for each in odd * 10), Counter())


OF_BOTH: Final[tuple[Attack, ...]] = (
    *(quiet, pipelining, trailers, long_heads, slow_heads, nested_json, many_tokens, huge_length, odd_headers),
)
OF_SERVER: Final[tuple[Attack, ...]] = (*OF_BOTH, logprobs, near_stops, idle_connections, never_reading)


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
                client.sendall(post(wish, "Connection: close", key="canary"))
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
    wire.send(next(each for each in OF_SERVER if each.__name__ == name)(port))


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


def measured(attack: Attack, port: int, canary: Canary, processes: list[psutil.Process]) -> dict[str, Any]:
    """Two attacks: how the canary fared, and the memory of the second. The first takes what a server keeps for good."""
    canary.reset()
    attacked(attack.__name__, port, processes)
    time.sleep(REST_SECONDS)
    before = memory_mb(processes)
    statuses, most = attacked(attack.__name__, port, processes)
    gap, num_failed = canary.worst, canary.num_failed
    time.sleep(REST_SECONDS)
    return {
        "attack": attack.__name__,
        "gap_ms": round(1e3 * gap),
        "canary_failed": num_failed,
        "mb_before": round(before),
        "mb_most": round(most),
        "mb_after": round(memory_mb(processes)),
        "statuses": dict(statuses),
    }


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    only = sys.argv[1:]
    found = []
    with ExitStack() as stack:
        keys = Path(stack.enter_context(TemporaryDirectory())) / "keys.toml"
        keys.write_text(KEYS)
        served = [stack.enter_context(minicache("serve", "--replicas", "2", "--api-keys", str(keys)))]
        served.append(stack.enter_context(minicache("route", f"http://127.0.0.1:{served[0][0]}")))
        for target, (port, _), attacks in zip(("serve", "route"), served, (OF_SERVER, OF_BOTH), strict=True):
            canary = Canary(port)
            stack.callback(canary.stop)
            time.sleep(2)
            asked = [each for each in attacks if not only or each.__name__ in only]
            processes = [each for _, each in served]
            attacking = track(asked, description=f"Attacking {target}")
            found += [{"target": target} | measured(attack, port, canary, processes) for attack in attacking]
            canary.stop()
    show(found)
    if not only:
        from benchmarks._record import record

        record("attacks", {"goal_ms": GOAL_MS, "attacks": found})


def show(found: list[dict[str, Any]]) -> None:
    """A row for each attack."""
    table = Table(title="The canary's longest wait, and the server's memory", box=SIMPLE_HEAD)
    for heading in ("target", "attack", "wait, ms", "failed", "MB before", "most", "after", "statuses"):
        table.add_column(heading, justify="right" if heading[0] in "wfMma" and heading != "attack" else "left")
    for each in found:
        statuses = ", ".join(f"{number} × {name}" for name, number in each["statuses"].items())
        row = [each[name] for name in ("gap_ms", "canary_failed", "mb_before", "mb_most", "mb_after")]
        table.add_row(each["target"], each["attack"], *map(str, row), statuses)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
