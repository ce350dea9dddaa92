"""How alike submissions are: for each pair the share of code that is in both, and the two side by side.

`copydetect` (MIT licence) compares, as MOSS does: names and strings become one letter each, comments and layout go, and
what counts is which runs of 25 characters two files share. Runs that the starter has are left out. A high number is a
reason to read the two, and no proof: a task of five lines has few right solutions.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

from minicache_course.errors import CourseError
from minicache_course.starters import starter
from minicache_course.table import Phase
from minicache_teach import gradebook
from minicache_teach.submissions import Submission

_RUN = 25  # characters that two files have to share, as copydetect counts them
_MAX_SHOWN = 100  # pairs that a page has side by side

_STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem; }
table { border-collapse: collapse; }
td, th { padding: 0.2rem 0.8rem; text-align: left; border-bottom: 1px solid #ccc; }
td.number { text-align: right; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
pre { overflow-x: auto; background: #f6f6f6; padding: 0.5rem; font-size: 0.8rem; }
mark { background: #ffd54f; }
summary { cursor: pointer; padding: 0.3rem 0; }
"""

Prints = dict[str, dict[str, Any]]
"""Student → module → copydetect's fingerprint of the file."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two submissions.

    Attributes:
        students: the two names.
        shares: of each one's code, without the starter's, the part that the other has too, from 0 to 1.
        num_shared: characters that are in both, names and strings counted as one each.
    """

    students: tuple[str, str]
    shares: tuple[float, float]
    num_shared: int


def fingerprints(phase: Phase, submissions: Iterable[Submission]) -> tuple[Prints, list[str]]:
    """Read what was handed in.

    Returns:
        The fingerprints, and notes on files that are left out.

    Raises:
        CourseError: copydetect is not installed.
    """
    library = _copydetect()
    notes: list[str] = []
    prints: Prints = {}
    templates = {module: _fingerprint(library, starter(phase, module), set()).hashes for module in phase.files}
    for submission in submissions:
        mine = prints[submission.student] = {}
        for module, file in submission.files.items():
            try:
                text = file.read().decode("utf-8-sig")
            except (CourseError, UnicodeDecodeError) as error:
                notes.append(f"{submission.student}: {file.path.name} is omitted: {error}")
                continue
            mine[module] = _fingerprint(library, text, templates[module])
    return prints, notes


def compare(prints: Prints) -> list[Pair]:
    """Every two submissions, the most alike first: the larger share counts, as a copy with much added is one too."""
    pairs = [_pair(prints, *students) for students in combinations(prints, 2)]
    return sorted(pairs, key=lambda pair: (-max(pair.shares), -pair.num_shared, pair.students))


def write_csv(pairs: Iterable[Pair], file: Path) -> None:
    """Write a line a pair: the students, the percentage of each, the characters that they share."""
    with file.open("w", newline="", encoding="utf-8-sig") as stream:  # as spreadsheets know UTF-8
        writer = csv.writer(stream)
        writer.writerow(["student_a", "student_b", "percent_a", "percent_b", "shared"])
        for pair in pairs:
            names = map(gradebook.escape, pair.students)
            writer.writerow([*names, *(f"{100 * share:.0f}" for share in pair.shares), pair.num_shared])


def write_html(phase: Phase, prints: Prints, pairs: list[Pair], file: Path) -> None:
    """Write one page without links: the most alike pairs in a table, and below it each pair side by side."""
    shown = [pair for pair in pairs if pair.num_shared][:_MAX_SHOWN]
    with file.open("w", encoding="utf-8") as stream:
        title = f"Phase {phase.number}, {escape(phase.title)}: similarity of submissions"
        stream.write(
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
            f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n"
            f"<p>{len(prints)} submissions. A percentage is the part of a student's code, without the starter's, that "
            "the other has too: names, comments and layout aside. It is a reason to read the two, and no proof.</p>\n"
            "<table><tr><th>student</th><th>%</th><th>student</th><th>%</th><th>shared</th></tr>\n"
        )
        for number, pair in enumerate(shown):
            cells = "".join(
                f'<td><a href="#pair-{number}">{escape(student)}</a></td><td class="number">{100 * share:.0f}</td>'
                for student, share in zip(pair.students, pair.shares, strict=True)
            )
            stream.write(f'<tr>{cells}<td class="number">{pair.num_shared}</td></tr>\n')
        stream.write("</table>\n")
        for number, pair in enumerate(shown):
            title = " and ".join(
                f"{escape(student)} ({100 * share:.0f} %)"
                for student, share in zip(pair.students, pair.shares, strict=True)
            )
            stream.write(f'<details id="pair-{number}"><summary>{title}</summary>\n')
            for module, marked in _side_by_side(prints, pair):
                stream.write(f"<h3>{escape(str(phase.files[module]))}</h3>\n")
                stream.write('<div class="two">{}</div>\n'.format("".join(f"<pre>{text}</pre>" for text in marked)))
            stream.write("</details>\n")
        stream.write("</body></html>\n")


def _copydetect() -> Any:
    try:
        import copydetect
        import copydetect.utils
    except ImportError as error:
        raise CourseError("the similarity report needs copydetect: pip install 'minicache-course[teach]'") from error
    return copydetect


def _fingerprint(library: Any, text: str, without: set[int]) -> Any:
    """A file's fingerprint: all of its runs, so it is the same in every process, less those in `without`."""
    text = "\n".join(text.splitlines()).strip("\n") + "\n"  # as the lexer takes it, which positions count on
    found = library.CodeFingerprint("lab.py", _RUN, 1, language="python", fp=StringIO(text))
    # copydetect's own way of leaving runs out expects that no run is in a file twice.
    found.hash_idx = {run: places for run, places in found.hash_idx.items() if run not in without}
    found.hashes = set(found.hash_idx)
    found.token_coverage = library.utils.get_token_coverage(found.hash_idx, _RUN, len(found.filtered_code))
    return found


def _pair(prints: Prints, one: str, other: str) -> Pair:
    library = _copydetect()
    shared, whole = [0.0, 0.0], [0.0, 0.0]
    for side, student in enumerate((one, other)):
        whole[side] = sum(each.token_coverage for each in prints[student].values())
    for module in prints[one].keys() & prints[other].keys():
        a, b = prints[one][module], prints[other][module]
        _, shares, _ = library.compare_files(a, b)
        shared[0] += shares[0] * a.token_coverage
        shared[1] += shares[1] * b.token_coverage
    first, second = (part / all_of_it if all_of_it else 0.0 for part, all_of_it in zip(shared, whole, strict=True))
    return Pair((one, other), (min(first, 1.0), min(second, 1.0)), round(min(shared)))


def _side_by_side(prints: Prints, pair: Pair) -> Iterator[tuple[str, list[str]]]:
    """Each module that both handed in, and the two texts as HTML, with what is in both marked."""
    library = _copydetect()
    one, other = (prints[student] for student in pair.students)
    for module in one:
        if module in other:
            _, _, slices = library.compare_files(one[module], other[module])
            marked = []
            for each, places in zip((one[module], other[module]), slices, strict=True):
                if places.size:
                    text, _ = library.utils.highlight_overlap(
                        each.raw_code, places.astype(int), "<mark>", "</mark>", escape_html=True
                    )
                else:
                    text = escape(each.raw_code)
                marked.append(text)
            yield module, marked
