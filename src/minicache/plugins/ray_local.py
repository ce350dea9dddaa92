"""Ray on this machine alone, started on demand and removed completely afterwards. No phase builds this."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from minicache.errors import EngineDiedError, MissingExtraError, WorkerDiedError
from minicache.simulator.sweep import Point, Result

# Ray's ports run what they are sent: with a token they refuse other users of this machine. Set here, the token is not
# written into the home folder. Ray reads it on import, so it has no effect in a process that has imported Ray already.
if "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
# Without clusters of several machines Ray listens on the loopback address only. On Linux it would replace that address,
# the `ray.init` argument below, by the machine's, and listen on all.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
except ModuleNotFoundError as missing:
    raise MissingExtraError("Ray is not installed: pip install 'minicache-course[scale]'") from missing

OBJECT_STORE_NBYTES: Final = 80 * 2**20
"""Ray's shared memory, as small as Ray allows: tokens and results do not go through it."""


@contextmanager
def ray_running(num_cpus: int, *, runtime_env: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Run Ray for the duration of the block, on this machine alone, in a folder that is removed afterwards.

    Args:
        num_cpus: how many tasks may run at a time, if each counts as one; no cores are reserved.
        runtime_env: Ray's description of what its processes start with, such as a `worker_process_setup_hook`.

    Raises:
        EngineDiedError: Ray could not be started.
    """
    given = dict(runtime_env or {})
    runtime = given | {"env_vars": {"OMP_NUM_THREADS": "1", **given.get("env_vars", {})}}
    # It contains sockets, whose paths must be short; those under TMPDIR may not be.
    with tempfile.TemporaryDirectory(prefix="mcray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                "local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_NBYTES,
                logging_level="ERROR",
                log_to_driver=False,
                runtime_env=runtime,
                _temp_dir=folder,
            )
        except Exception as error:  # Ray's timeout is half a minute
            ray.shutdown()
            raise EngineDiedError(f"Ray could not be started; is the machine too busy? {error}") from error
        try:
            yield
        finally:
            ray.shutdown()


def in_ray(points: Sequence[Point]) -> Iterator[tuple[Point, Result]]:
    """Run a sweep's points on Ray, which is running, as `minicache.simulator.sweep.in_processes` does.

    Yields:
        Each point with its result, in the order in which they end.

    Raises:
        WorkerDiedError: a process has died repeatedly.
    """
    run = ray.remote(num_cpus=1)(Point.run)
    running = {run.remote(point): point for point in points}
    while running:
        done, _ = ray.wait(list(running))
        for each in done:
            try:
                result = ray.get(each)
            except ray.exceptions.WorkerCrashedError as error:
                raise WorkerDiedError("a process of the sweep has died, for want of memory perhaps") from error
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            yield running.pop(each), result
