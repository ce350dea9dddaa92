"""Score a file and print what came of it as JSON: `python -m minicache_course.arena.scored FILE LEAGUE SEED`.

For `minicache arena grade`, which runs it in a sandbox.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from minicache_course.arena import fleet, score
from minicache_course.arena.loop import PolicyRefusedError


def main() -> None:
    """Print {"score": percent} or {"refused": why}."""
    file, league, seed = sys.argv[1:]
    run = fleet.score if league == "fleet" else score.score
    try:
        told: dict[str, object] = {"score": run(Path(file).read_text(encoding="utf-8"), seed=int(seed)).percent}
    except PolicyRefusedError as error:
        told = {"refused": str(error)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
