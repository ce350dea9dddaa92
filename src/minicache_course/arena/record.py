"""The score file: what a policy has scored, to be recomputed by anybody. Pure standard library."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minicache_course.arena.score import Score
from minicache_course.errors import CourseError
from minicache_course.language import said

FORMAT = "minicache arena 1"
"""What a score file begins with."""

_FIELDS = {"version", "author", "league", "policy", "seed", "score", "cells"}


def as_record(score: Score, version: str, author: str, league: str = "scheduler") -> dict[str, Any]:
    """A score as JSON has it. The same policy, version and seed give the same, to the last bit.

    Args:
        score: what was found.
        version: of minicache.
        author: for people.
        league: "scheduler" or "fleet".
    """
    return {
        "format": FORMAT,
        "version": version,
        "author": author,
        "league": league,
        "policy": score.policy,
        "seed": score.seed,
        "score": score.percent,
        "cells": [asdict(cell) | {"goodput": cell.goodput, "share": cell.share} for cell in score.cells],
    }


def read(file: Path) -> dict[str, Any]:
    """A score file.

    Raises:
        CourseError: it cannot be read, or is none.
    """
    try:
        record: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CourseError(said("{file} is no score file: {error}", file=str(file), error=str(error))) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT or not record.keys() >= _FIELDS:
        raise CourseError(said("{file} is no score file of `minicache arena run`", file=str(file)))
    return record


def differences(claimed: dict[str, Any], score: Score, version: str) -> list[str]:
    """What a score file claims that was not found, a line each; [] if all of it was.

    Args:
        claimed: by the file.
        score: recomputed from the policy, with the file's seed.
        version: of minicache, with which it was.
    """
    found = json.loads(json.dumps(as_record(score, version, claimed["author"], claimed["league"])))
    told = [_differs(name, claimed.get(name), found[name]) for name in ("version", "policy", "score")]
    if len(claimed["cells"]) != len(found["cells"]):
        told.append(_differs("cells", len(claimed["cells"]), len(found["cells"])))
    for its, ours in zip(claimed["cells"], found["cells"], strict=False):
        where = f"{ours['workload']} {ours['rate']}"
        told += [_differs(f"{where} {name}", its.get(name), value) for name, value in ours.items()]
    return [line for line in told if line]


def _differs(name: str, claimed: object, found: object) -> str:
    if claimed == found:
        return ""
    return said("{name}: {claimed} in the file, {found} recomputed", name=name, claimed=str(claimed), found=str(found))
