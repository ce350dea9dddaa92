"""How much `minicache verify` explores, how fast, and which of the course's wrong solutions it finds.

- `states`, **counted**: every state of the reference's stages with a few requests on a few blocks. `seconds`, of one
  processor, are measured.
- `wrong`, **counted**: each mistake of phases 6 to 9 (`wrong.toml`) that is in a scheduler or in the memory that it
  keeps is put in place of the reference, in a process of its own, and explored until a rule is broken. Why the others
  are not found is in `verifier_missed.toml`, by reading them.

A copying prototype did 727 states a second, and twenty times that is not reached: a quarter of an action's time is the
scheduler's own, the rest is spread over loading, rules and the canonical form. Loading a state into the objects of the
one before, noting once what all actions of a state begin with, and a leaner canonical form have gained 7 % together.

    python -m benchmarks.verifier
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from minicache_course.workspace import find_workspace
from minicache_course.wrong import Wrong, load_wrong

PHASES: Final = (6, 7, 8, 9)
STAGES: Final = {
    "minicache.scheduler.paged": ("paged", "chunked"),
    "minicache.scheduler.queue": ("fair",),
    "minicache.scheduler.fair": ("fair",),
    "minicache.scheduler.prefix_caching": ("fair", "chunked"),
    "minicache.memory.prefix": ("fair",),
    "minicache.scheduler.sharing": ("fair", "chunked"),
    "minicache.scheduler.chunked": ("chunked",),
}
"""The modules of which a mistake is a scheduler's, and the stages that may show it."""
BOUNDS: Final = ((2, 3), (3, 4))
"""Requests and blocks, one after the other, where a mistake is looked for."""
REFERENCE: Final = ("paged", "fair", "chunked")
"""The stages of the reference that are explored, as `make check` does."""
NUM_REQUESTS: Final = 3
BLOCKS: Final = (3, 4, 5)
"""With so many requests, on pools of so many blocks."""
MISSED: Final = Path(__file__).with_name("verifier_missed.toml")
LIMIT: Final = 3_000
"""States of a case in which a mistake is looked for."""
ENDLESS: Final = 60
"""Seconds for one case after which a call of it counts as endless: an error."""


def main() -> None:
    """Explore the reference, then each mistake."""
    workspace = find_workspace()
    mistakes = [
        (phase.number, wrong)
        for phase in workspace.course
        if phase.number in PHASES
        for wrong in load_wrong(workspace, phase)
    ]
    schedulers = [(number, wrong) for number, wrong in mistakes if wrong.module in STAGES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = []
        for (_, wrong), rule in zip(schedulers, pool.map(look_for, [wrong for _, wrong in schedulers]), strict=True):
            found.append(rule)
            print(f"{len(found)}/{len(schedulers)}", rule, wrong.module, wrong.story, flush=True)
    reasons = {story: each["words"] for each in tomllib.loads(MISSED.read_text()).values() for story in each["stories"]}
    rows = [
        {
            "phase": number,
            "task": wrong.caught_by,
            "in": f"{wrong.module}:{wrong.symbol}",
            "story": wrong.story,
            "rule": rule,
            "reason": None if rule else reasons.get(wrong.story, "not looked at"),
        }
        for (number, wrong), rule in zip(schedulers, found, strict=True)
    ]
    from benchmarks._record import record  # imports torch

    states = list(reference())
    missed = Counter(row["reason"] for row in rows if row["rule"] is None)
    record(
        "verifier",
        {
            "states": states,
            "num_states": sum(each["num_states"] for each in states),
            "num_wrong": len(mistakes),
            "num_of_schedulers": len(rows),
            "num_found": sum(row["rule"] is not None for row in rows),
            "missed": [{"reason": reason, "count": count} for reason, count in missed.most_common()],
            "elsewhere": Counter(wrong.module for _, wrong in mistakes if wrong.module not in STAGES),
            "wrong": rows,
        },
    )


def reference() -> Iterable[dict[str, Any]]:
    """Explore the reference's stages."""
    from minicache.verifier.cases import cases
    from minicache.verifier.rules import STAGE_PROPERTIES
    from minicache.verifier.together import explore_all

    for stage in REFERENCE:
        reports = [
            report
            for num_blocks in BLOCKS
            for report in explore_all(cases(stage, NUM_REQUESTS, num_blocks), STAGE_PROPERTIES)
        ]
        assert all(report.is_complete and report.violation is None for report in reports)
        seconds = sum(report.seconds for report in reports)
        count = sum(report.num_states for report in reports)
        yield {
            "stage": stage,
            "num_requests": NUM_REQUESTS,
            "num_blocks": ", ".join(map(str, BLOCKS)),
            "num_states": count,
            "num_actions": sum(report.num_actions for report in reports),
            "seconds": round(seconds),
            "per_second": round(count / seconds),
        }


def look_for(wrong: Wrong) -> str | None:
    """The rule that a mistake breaks; None if the verifier finds none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "wrong.py"
        file.write_text(wrong.source(), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.verifier", wrong.module, str(file)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    rule: str | None = json.loads(ran.stdout)
    return rule


def look(module: str, file: Path) -> str | None:
    """In this process, put a file in place of a module, and explore."""
    from minicache_course.finder import install

    install({module: file})
    from minicache.verifier.cases import cases
    from minicache.verifier.explore import explore
    from minicache.verifier.rules import STAGE_PROPERTIES

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    for stage in STAGES[module]:
        for case in (case for bounds in BOUNDS for case in cases(stage, *bounds)):
            signal.alarm(ENDLESS)
            report = explore(case, STAGE_PROPERTIES, limit=LIMIT)
            if (violation := report.violation) is not None:
                return violation.rule
    return None


if __name__ == "__main__":
    match sys.argv[1:]:
        case [module, file]:
            print(json.dumps(look(module, Path(file))))
        case _:
            main()
