"""Many runs of a simulated fleet: rates, policies, schedulers and sizes. Given, not built. Pure standard library.

A run is a `Point`: names and numbers, so another process can be sent it, and a file can hold it. What carries points to
processes is a function: `in_processes` here, Ray in `minicache.plugins.ray_local`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

from minicache.errors import ResultsError, WorkerDiedError, require_count
from minicache.fleet import create_router
from minicache.scheduler import Scheduler, create_scheduler, has_option
from minicache.simulator.fleet import FleetSimulation
from minicache.simulator.machine import published_machine
from minicache.simulator.traffic import Traffic

LONGEST_STEP: Final = 2048
"""Tokens of a step, if a point has no number of its own: the prompts of other requests are not held up for long."""

Result = dict[str, Any]
"""What is kept of a run, as JSON holds it: see `Point.run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run. Replicas have prefix caches where prompts have tokens and the scheduler shares blocks.

    Attributes:
        workload: of `TRAFFIC`.
        rate: requests a second, at the whole fleet.
        count: requests.
        seed: of the requests and of what the router draws.
        policy: of `create_router`.
        num_replicas: replicas.
        scheduler: a replica's, of `create_scheduler`.
        model: a published one, as for `published_machine`.
        accelerator: what each replica runs on, likewise.
        num_blocks: blocks of a replica's cache; None: what the weights leave.
        max_num_seqs: batch slots of a replica.
        max_num_batched_tokens: the most tokens of a step; None: `LONGEST_STEP`, or the longest request where a prompt
            is computed in one step.
        code: a fingerprint of the code that runs, so results of other code are not taken for its own.
    """

    workload: str = "chats"
    rate: float = 2.0
    count: int = 1000
    seed: int = 0
    policy: str = "round_robin"
    num_replicas: int = 1
    scheduler: str = "chunked"
    model: str = "llama-3-8b"
    accelerator: str = "a100-40gb"
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    code: str = ""

    def simulation(self) -> FleetSimulation:
        """The run, not begun.

        Raises:
            TypeError: a number has the wrong type.
            ValueError: a name is not known, or a number is out of its bounds.
        """
        machine = published_machine(self.model, self.accelerator, num_blocks=self.num_blocks)
        traffic = Traffic(self.workload, self.rate, self.count, self.seed)
        longest_step = self.max_num_batched_tokens
        if longest_step is None:
            in_chunks = has_option(self.scheduler, "long_prefill_threshold")
            longest_step = LONGEST_STEP if in_chunks else max(LONGEST_STEP, traffic.max_model_len)

        def make_scheduler() -> Scheduler:
            return create_scheduler(
                self.scheduler,
                num_blocks=machine.num_blocks,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=longest_step,
                max_model_len=traffic.max_model_len,
                prefix_caching=traffic.has_tokens and has_option(self.scheduler, "prefix_caching"),
            )

        router = create_router(self.policy, seed=self.seed, capacity_blocks=machine.num_blocks)
        return FleetSimulation(router, make_scheduler, machine.cost, traffic, num_replicas=self.num_replicas)

    def check(self) -> None:
        """Refuse what cannot be run, without making a thousand replicas.

        Raises:
            TypeError: a number has the wrong type.
            ValueError: a name is not known, or a number is out of its bounds.
        """
        require_count("num_replicas", self.num_replicas)
        replace(self, num_replicas=1).simulation()

    def run(self) -> Result:
        """Run it.

        Returns:
            Requests (`num_finished`, `num_refused`), the `hit_rate`, seconds (`ttft_p50`, `ttft_p99`, `tpot_p50`,
            `tpot_p99`, `latency_p99`, `makespan`), `requests_per_second` and `replica_hours`. No time of this machine
            is in it: the same point has the same result everywhere.
        """
        report = self.simulation().run()
        return {
            "num_finished": report.num_finished,
            "num_refused": report.num_refused,
            "hit_rate": report.hit_rate,
            "ttft_p50": report.ttft.p50,
            "ttft_p99": report.ttft.p99,
            "tpot_p50": report.tpot.p50,
            "tpot_p99": report.tpot.p99,
            "latency_p99": report.latency.p99,
            "makespan": report.makespan,
            "requests_per_second": report.requests_per_second,
            "replica_hours": report.replica_seconds / 3600,
        }


def grid(
    base: Point,
    rates: Iterable[float],
    policies: Sequence[str],
    schedulers: Iterable[str],
    sizes: Iterable[int],
    seeds: Iterable[int],
) -> list[Point]:
    """`base` with every combination, each once. One replica needs no router: it has the first policy alone."""
    points = (
        replace(base, num_replicas=size, policy=policy, scheduler=scheduler, rate=rate, seed=seed)
        for size, policy, scheduler, rate, seed in product(sizes, policies, schedulers, rates, seeds)
        if size != 1 or policy == policies[0]
    )
    return list(dict.fromkeys(points))


class ResultsFile:
    """Results as they come, a line of JSON each. Whatever interrupts a sweep, the lines before it stay.

    There is no header: a result's key is its whole `Point`. An unterminated last line is dropped.

    Args:
        file: is made if it is not there. Its folder is.

    Raises:
        ResultsError: the file holds something else.
        OSError: it cannot be read or written.
    """

    def __init__(self, file: Path) -> None:
        self._results: dict[Point, Result] = {}
        self._file: BinaryIO = file.open("a+b")
        try:
            self._file.seek(0)
            kept = 0
            for number, line in enumerate(self._file, start=1):
                if not line.endswith(b"\n"):  # its writer was ended in the middle of it
                    break
                try:
                    row = json.loads(line)
                    self._results[Point(**row["point"])] = row["result"]
                except (ValueError, TypeError, KeyError) as error:
                    problem = f"{file}, line {number}: no result of a sweep; give another file, or remove it"
                    raise ResultsError(problem) from error
                kept += len(line)
            self._file.truncate(kept)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, point: Point) -> bool:
        return point in self._results

    def __getitem__(self, point: Point) -> Result:
        return self._results[point]

    def add(self, point: Point, result: Result) -> None:
        """Write a result, down to the disk."""
        line = json.dumps({"point": asdict(point), "result": result}) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._results[point] = result


def in_processes(
    points: Sequence[Point], num_processes: int, prepare: Callable[[], object]
) -> Iterator[tuple[Point, Result]]:
    """Run points in processes of this machine. If the loop over the results is left, the processes are ended.

    Args:
        points: what to run.
        num_processes: how many at a time, ≥ 1.
        prepare: is called first in each process; a function of a module.

    Yields:
        Each point with its result, in the order in which they end.

    Raises:
        WorkerDiedError: a process has died, for want of memory perhaps.
    """
    import multiprocessing  # here, as a browser has none
    from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
    from concurrent.futures.process import BrokenProcessPool

    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_processes, context, initializer=_begin, initargs=(prepare,))
    try:
        running: dict[Future[Result], Point] = {pool.submit(Point.run, point): point for point in points}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise WorkerDiedError("a process of the sweep has died, for want of memory perhaps") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        pool.shutdown()


def _begin(prepare: Callable[[], object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first ends the others
    prepare()
