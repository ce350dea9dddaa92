"""A sweep on Ray gives what a process gives. Skipped where the extra `scale` is not installed."""

from __future__ import annotations

import pytest

from minicache.simulator.sweep import Point, grid

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.usefixtures("ray_installed")
def test_a_sweep() -> None:
    from minicache.plugins.ray_local import in_ray, ray_running

    points = grid(Point(count=12, num_blocks=2000), [10.0, 30.0], ["round_robin"], ["fair", "chunked"], [2], [0])
    with ray_running(2):
        assert dict(in_ray(points)) == {point: point.run() for point in points}
        with pytest.raises(ValueError, match="no workload"):
            list(in_ray([Point(workload="nothing")]))
