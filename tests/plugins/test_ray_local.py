"""A sweep on Ray gives what a process gives. Skipped where the extra `scale` is not installed."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from minicache.errors import EngineDiedError
from minicache.simulator.sweep import Point, grid

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.usefixtures("ray_installed")
def test_a_sweep() -> None:
    from minicache.plugins.ray_local import in_ray, ray_running

    points = grid(Point(count=12, num_blocks=2000), [10.0, 30.0], ["round_robin"], ["fair", "chunked"], [2], [0])
    with ExitStack() as stack:
        for attempt in range(3):  # Ray gives itself half a minute to start, on a busy machine too little
            try:
                stack.enter_context(ray_running(2))
                break
            except EngineDiedError:
                if attempt == 2:
                    raise
        assert dict(in_ray(points)) == {point: point.run() for point in points}
        with pytest.raises(ValueError, match="no workload"):
            list(in_ray([Point(workload="nothing")]))
