"""Writing down what a benchmark found: the figures, the machine, the command and the date.

from _record import record
record("decode_cost", {"tokens": 512, "speedup": 31.4})       # → benchmarks/results/decode_cost.json
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
FACTS = ("machine", "command", "date")


def record(name: str, figures: dict[str, Any]) -> Path:
    """Write `benchmarks/results/<name>.json`: the figures first, then on what, how and when they were made.

    Args:
        name: the benchmark's name, its script's without `.py`.
        figures: what was found, as JSON can hold it.

    Returns:
        The file that was written.

    Raises:
        ValueError: a figure has the name of one of the facts that are added: machine, command, date.
    """
    if taken := [fact for fact in FACTS if fact in figures]:
        raise ValueError(f"record() adds {', '.join(taken)} itself: give the figure another name")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    facts = {"machine": machine(), "command": command(), "date": date.today().isoformat()}
    path.write_text(json.dumps(figures | facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def machine() -> str:
    """One line: CPU model and cores, the threads that torch uses, its release, Python's, and the system's."""
    cores = f"{os.cpu_count()} {'core' if os.cpu_count() == 1 else 'cores'}"
    threads = f"{torch.get_num_threads()} {'thread' if torch.get_num_threads() == 1 else 'threads'}"
    python = platform.python_version()
    return f"{_cpu()}, {cores}, torch {torch.__version__} on {threads}, Python {python}, {platform.system()}"


def command() -> str:
    """The command line that is running, as one would type it at the top of the repository."""
    return shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])


def _cpu() -> str:
    """The CPU's model name; where the system does not tell, its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
