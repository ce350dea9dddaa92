"""Thirty people and one server: how long they wait for a first token, by how often they ask.

`minicache serve` runs as deploy/minicache.service starts it. The load client, `minicache bench serve`, sends it what a
class sends: prompts of 24 tokens and answers of 64. First a person asks twice a minute, then every ten seconds, every
three, every second (a Poisson process of all thirty); then all press Enter at once, each with one request and, in the
end, each with four; the server has 128 admission slots.

    python -m benchmarks.workshop
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks._record import record

NUM_PEOPLE = 30
PERIODS = (30.0, 10.0, 3.0, 1.0)
"""Seconds from one request of a person to the next."""
SECONDS = 20.0
"""For so long requests come, at each rate; at least NUM_PEOPLE of them."""
AT_ONCE = (1, 4)
"""Requests of each person, sent together with everyone's."""
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 24, 64
UNIT = Path(__file__).parents[1] / "deploy" / "minicache.service"
MINICACHE = str(Path(sys.executable).with_name("minicache"))
console = Console(highlight=False)


def main() -> None:
    loads = []
    with a_server() as url:
        send(url, 64, "inf")  # the first steps of a process are slower
        for period in PERIODS:
            rate = NUM_PEOPLE / period
            load = {"load": f"a request each, every {period:g} s", "requests_per_second": f"{rate:g}"}
            loads.append(load | send(url, max(NUM_PEOPLE, round(rate * SECONDS)), f"{rate}"))
        for each in AT_ONCE:
            load = {"load": f"{each} each, all at once", "requests_per_second": "at once"}
            loads.append(load | send(url, NUM_PEOPLE * each, "inf"))
    show(loads)
    settings = {
        "num_people": NUM_PEOPLE,
        "num_prompt_tokens": NUM_PROMPT_TOKENS,
        "num_output_tokens": NUM_OUTPUT_TOKENS,
    }
    record("workshop", {**settings, "loads": loads, "by_load": {"steady": loads[1], "burst": loads[len(PERIODS)]}})


def options() -> list[str]:
    """The server's, from the unit."""
    text = UNIT.read_text(encoding="utf-8").replace("\\\n", " ")
    [line] = re.findall(r"^ExecStart=\S+ (.+)$", text, re.MULTILINE)
    return str(line).split()


@contextmanager
def a_server() -> Iterator[str]:
    """`minicache serve` with the unit's options, on a free port; without keys."""
    words = options()
    words[words.index("--port") + 1] = "0"
    keys = words.index("--api-keys")
    del words[keys : keys + 2]
    environment = {name: value for name, value in os.environ.items() if name != "MINICACHE_API_KEY"}
    environment["OMP_NUM_THREADS"] = "1"
    with (
        tempfile.TemporaryFile("w+") as log,  # a pipe that no one reads would stop the server
        subprocess.Popen([MINICACHE, *words], stderr=log, env=environment) as process,
    ):
        try:
            while '"listening"' not in (lines := os.pread(log.fileno(), 2**16, 0).decode()):
                if process.poll() is not None:
                    raise RuntimeError(lines)
                time.sleep(0.1)
            yield next(json.loads(line)["url"] for line in lines.splitlines() if '"listening"' in line)
        finally:
            process.terminate()


def send(url: str, num_requests: int, rate: str) -> dict[str, Any]:
    """A load, and what is kept of its report."""
    command = [MINICACHE, "bench", "serve", "--json", "--url", url, "--num-requests", str(num_requests), "--rate", rate]
    command += ["--num-prompt-tokens", str(NUM_PROMPT_TOKENS), "--num-output-tokens", str(NUM_OUTPUT_TOKENS)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return summary(json.loads(done.stdout))


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Of the load client's report: what was answered and refused, latencies in milliseconds, tokens a second."""
    told = report["report"]
    latencies = {
        f"{name}_{part}": round(1e3 * told[name][part], 1) for name in ("ttft", "itl") for part in ("p50", "p99")
    }
    return {
        "num_requests": told["num_requests"],
        "num_ok": told["num_ok"],
        "num_refused": told["num_refused"],
        **latencies,
        "seconds_p99": round(told["latency"]["p99"], 2),
        "tokens_per_second": round(told["tokens_per_second"]),
    }


def show(loads: list[dict[str, Any]]) -> None:
    """A line for each load."""
    table = Table(box=SIMPLE_HEAD)
    headings = ("", "requests/s", "answered", "refused", "TTFT p50 ms", "TTFT p99 ms", "ITL p99 ms", "tokens/s")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    fields = ("requests_per_second", "num_ok", "num_refused", "ttft_p50", "ttft_p99", "itl_p99", "tokens_per_second")
    for load in loads:
        table.add_row(load["load"], *(str(load[field]) for field in fields))
    console.print(table)


if __name__ == "__main__":
    main()
