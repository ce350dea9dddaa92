"""What a grader reads in the report.json of `minicache bench serve`: who was served, how fast, and by whose files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from minicache_course.errors import CourseError
from minicache_course.workspace import Workspace, fingerprint


class Served(NamedTuple):
    """The part of a report that is graded.

    Attributes:
        num_ok, num_requests: answered to the end, and planned.
        ttft, tpot: the 99th percentiles of time to first token and time per output token, in seconds.
        lab_files: module → SHA-256 of the learner's files that the server had loaded.
    """

    num_ok: int
    num_requests: int
    ttft: float
    tpot: float
    lab_files: dict[str, str]

    def misses(self, workspace: Workspace, ttft: float, tpot: float) -> list[str]:
        """In what it falls short, in words: nothing, if all were answered in time, and by the workspace's files.

        Args:
            workspace: with the learner's labs.
            ttft: the most seconds to the first token.
            tpot: the most seconds per output token.
        """
        files = {module: file for phase in workspace.course for module, file in workspace.lab_files(phase).items()}
        found = []
        if self.num_ok < self.num_requests:
            found.append(f"{self.num_requests - self.num_ok} of {self.num_requests} requests were not answered")
        for name, value, most in (("TTFT", self.ttft, ttft), ("TPOT", self.tpot, tpot)):
            if not value <= most:
                found.append(f"the 99th percentile of {name} is {value:.3g} s, more than {most:g} s")
        if not self.lab_files:
            found.append("the server ran none of the learner's files: start it with --mine")
        for module, digest in sorted(self.lab_files.items()):
            if module not in files or fingerprint(files[module]) != digest:
                found.append(f"another file than the one in labs/ was {module}")
        return found


def read_report(file: Path) -> Served:
    """Read a report.json.

    Raises:
        CourseError: it cannot be read, or is none.
    """
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        report = found["report"]
        ttft, tpot = (float(report[name]["p99"]) for name in ("ttft", "tpot"))
        files = {str(module): str(digest) for module, digest in found["settings"]["server"]["lab_files"].items()}
        return Served(int(report["num_ok"]), int(report["num_requests"]), ttft, tpot, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CourseError(f"{file} is no report.json of `minicache bench serve --out`") from error
