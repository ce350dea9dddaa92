"""For all tests: Hypothesis finds the same examples in every run, so that the same code gets the same grade."""

from __future__ import annotations

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
