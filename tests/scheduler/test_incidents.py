"""The incident room is what its table says: each bug shows in its counter, and each fix removes it."""

from __future__ import annotations

import pytest

from minicache_course.incidents.table import INCIDENTS, Incident, Workload, measure

each_incident = pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.slug)

COUNTERS = {
    "cap": (0, 1),
    "order": ("0", "1"),
    "thrash": (17_000, 170),
    "victim": (74, 0),
    "ignore": (10, 0),
    "livelock": ("LivelockError", ""),
    "feasible": (1, 0),
    "copy": ("OutOfBlocksError", ""),
}
"""Of each incident, the counter that proves it: with the bug, and without."""


def test_there_are_eight() -> None:
    assert [incident.number for incident in INCIDENTS] == list(range(1, 9))
    assert list(COUNTERS) == [incident.slug for incident in INCIDENTS]


@each_incident
def test_the_counter_proves_it(incident: Incident) -> None:
    with_bug, without = COUNTERS[incident.slug]
    kinds = [incident.broken, incident.fixed, *([] if incident.slug == "livelock" else [incident.base])]
    counts = [getattr(measure(incident.workload, kind), incident.counter) for kind in kinds]
    assert counts == [with_bug, *[without] * (len(kinds) - 1)]


@each_incident
def test_the_fix_serves_everybody(incident: Incident) -> None:
    counters = measure(incident.workload, incident.fixed)
    forked = [incident.workload.fork[1]] if incident.workload.fork else []
    names = [name for name, *_ in incident.workload.requests]
    assert sorted(counters.finished) == sorted(names + forked)
    assert (counters.num_unfinished, counters.num_unbacked_tokens, counters.num_idle_blocks) == (0, 0, 0)


def test_who_was_seated_by_force_waits_its_passes_again() -> None:
    """A count that is never set back evicts at every step: 89,619 prefill tokens here."""
    workload = Workload({"num_blocks": 25}, (("0", 195, 200, "text"), ("1", 200, 200, "text")))
    fixed, engine = (measure(workload, kind) for kind in (INCIDENTS[3].fixed, INCIDENTS[3].base))
    assert fixed == engine
    assert (fixed.num_prefill_tokens, fixed.num_unfinished) == (2357, 0)
