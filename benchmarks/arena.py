"""The baselines of the arena, each on all workloads: the board that a learner's policy is compared with.

Nothing is timed: the runs are in simulated time, and the same on every machine. So are the scores.

    python -m benchmarks.arena [--seed 0]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from math import fsum
from typing import Any

from rich.console import Console

from benchmarks._record import record
from minicache_cli.show import progress
from minicache_course.arena import fleet
from minicache_course.arena.baselines import BASELINES, FLEETS, ORACLES, text_of
from minicache_course.arena.score import NUM_LOADS, score
from minicache_course.arena.workloads import WINDOW, WORKLOADS

console = Console(highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    board: list[dict[str, Any]] = []
    plot: dict[str, Any] = {}
    with progress(console, "Serving", len(BASELINES) * NUM_LOADS) as tell:
        for number, name in enumerate(BASELINES):
            before = number * NUM_LOADS
            found = score(text_of(name), seed=seed, oracle=name in ORACLES, tell=partial(_tell, tell, before))
            shares = {
                workload.name: 100 * fsum(shares) / len(shares)
                for workload in WORKLOADS
                for shares in [[cell.share for cell in found.cells if cell.workload == workload.name]]
            }
            board.append(
                {"policy": name, "score": f"{found.percent:.1f}"} | {key: f"{each:.0f}" for key, each in shares.items()}
            )
            plot[name] = [
                {"workload": cell.workload, "rate": cell.rate, "goodput": cell.goodput, "bound": cell.bound / WINDOW}
                for cell in found.cells
            ]
            console.print(name, board[-1])
    fleets: list[dict[str, Any]] = []
    for name in FLEETS:
        found = fleet.score(text_of(name), seed=seed)
        of_loads = {cell.workload: f"{100 * cell.share:.0f}" for cell in found.cells}
        fleets.append({"policy": name, "score": f"{found.percent:.1f}"} | of_loads)
        console.print(fleets[-1])
    board.sort(key=lambda row: -float(row["score"]))
    console.print(record("arena", {"seed": seed, "board": board, "fleets": fleets, "goodput": plot}))


def _tell(tell: Callable[[int], None], before: int, num_done: int) -> None:
    tell(before + num_done)


if __name__ == "__main__":
    main()
