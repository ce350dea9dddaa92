"""A class's policies for the arena: each is scored in a sandbox, and gets points by a curve that the teacher states."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from minicache_course.errors import CourseError
from minicache_teach.sandbox import isolated

Curve = list[tuple[float, float]]
"""(score in percent, points), rising in both."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a policy got.

    Attributes:
        student: its file's name.
        score: in percent; None if it was refused.
        points: by the curve; 0 if it was refused.
        note: why it was refused.
    """

    student: str
    score: float | None
    points: float
    note: str = ""


def read_curve(text: str) -> Curve:
    """The curve of "40:0,70:6,85:10".

    Raises:
        CourseError: it is none, or falls.
    """
    try:
        curve = [(float(score), float(points)) for score, points in (each.split(":") for each in text.split(","))]
    except ValueError:
        curve = []
    if not curve or any(first[0] >= second[0] or first[1] > second[1] for first, second in pairwise(curve)):
        raise CourseError(f"{text!r} is no curve: write scores and their points, rising, as in 40:0,70:6,85:10")
    return curve


def points(score: float, curve: Curve) -> float:
    """The points of a score: on the lines between those of the curve, and no more or fewer than its ends."""
    if score <= curve[0][0]:
        return curve[0][1]
    for (low, few), (high, many) in pairwise(curve):
        if score <= high:
            return few + (many - few) * (score - low) / (high - low)
    return curve[-1][1]


def mark(file: Path, curve: Curve, *, league: str, seed: int, timeout: float) -> Mark:
    """Score a policy in a sandbox.

    Args:
        file: the policy; its name is the student's.
        curve: the points of a score.
        league: "scheduler" or "fleet".
        seed: of the workloads.
        timeout: seconds after which it counts as an endless loop.
    """
    file = file.resolve()
    command = [sys.executable, "-P", "-m", "minicache_course.arena.scored", str(file), league, str(seed)]
    with subprocess.Popen(
        isolated(command, file), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Mark(file.stem, None, 0.0, f"not finished after {timeout:.0f} seconds")
    try:
        told = json.loads(printed)
    except ValueError:
        return Mark(file.stem, None, 0.0, f"the run ended with exit code {process.returncode}")
    if "refused" in told:
        return Mark(file.stem, None, 0.0, told["refused"])
    return Mark(file.stem, told["score"], round(points(told["score"], curve), 1))
