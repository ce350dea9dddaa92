"""Ray, which the extra `scale` brings, for the tests that need it."""

import os
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session")
def ray_installed() -> None:
    """Without Ray the test is skipped, or fails where it has to run."""
    if find_spec("ray") is None:
        if os.environ.get("MINICACHE_REQUIRE_RAY") == "1":
            pytest.fail("no Ray: pip install 'minicache-course[scale]'")
        pytest.skip("no Ray: pip install 'minicache-course[scale]' to have the fleet tested")
