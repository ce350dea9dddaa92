"""For all tests: Hypothesis finds the same examples in every run, so the same code gets the same grade.

And one width of terminal everywhere: a console takes it when it is made, which may be at import.
"""

from __future__ import annotations

import atexit
import gc
import os

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "minicache",
    derandomize=True,
    database=None,
    deadline=None,  # a slow machine is no mistake
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("minicache")

os.environ["COLUMNS"] = "120"

atexit.register(gc.unfreeze)  # or Triton would speak of leaks when it is unloaded


def pytest_collection_finish() -> None:
    """What is loaded stays: no test need look through all of it for garbage, and pytest looks five times at its end."""
    gc.freeze()
