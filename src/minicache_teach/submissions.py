"""What a class handed in: whose each file is, and which files are a phase's lab files.

One rule serves every layout, so an unpacked repository, single files, a zip and what Canvas or Moodle makes of them
are found alike. All files that a student handed in are a list of paths, those inside a zip too. A lab file is the path
whose end is most like the file's place in the course, `labs/phase-03-paged-cache/kernels/plain.py`.

Nothing is unpacked and no link is followed: what is read from a zip is its list of names, and then the lab files.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from minicache_course.errors import CourseError
from minicache_course.table import Course, Phase
from minicache_course.workspace import PACKAGES, reference_file
from minicache_teach.misnamed import meant_for
from minicache_teach.scan import scan

MAX_FILE_NBYTES = 2**20
"""The largest lab file that is read. The course's own are under 50 kB."""

_MAX_FILES = 20_000  # of one student; a whole clone has fewer than 3,000
_MAX_DIRECTORY_NBYTES = 2**22  # of the list of names in a zip, which is held in memory
_MAX_OTHERS = 100
_MAX_DEPTH = 30  # of folders in folders
_SKIPPED_FOLDERS = {"__MACOSX", "__pycache__", "node_modules", "site-packages"}
_ARCHIVES = {".zip", ".rar", ".7z", ".tar", ".gz", ".tgz", ".bz2", ".xz"}
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError, struct.error)

# Canvas: lovelaceada_LATE_1234_5678_attention-2.py, that is student, user id, attachment id, file name; where names are
# hidden, anon_3fGh7_5678_attention.py. A text or a link in place of files: lovelaceada_1234_text.html
# (instructure/canvas-lms, lib/content_zipper.rb).
_CANVAS = re.compile(
    r"(?:(?P<name>\w+?)_)??(?P<late>LATE_)?(?P<id>\d+|anon_[A-Za-z0-9]+)_(?:\d+_(?P<file>.+)|(?:text|link)\.html)"
)
# Moodle: `Ada Lovelace_12345_assignsubmission_file_`, a folder, or with the file's name behind it a file; the number is
# the one in the grading worksheet's "Participant 12345".
_MOODLE = re.compile(r"(?P<name>.+)_(?P<id>\d+)_assignsubmission_[a-z]+(?:_(?P<file>.*))?", re.DOTALL)
_AGAIN = re.compile(r"(?P<stem>[^-]+)-(?P<attempt>\d{1,4})\.py")  # Canvas: a file handed in again under its name


@dataclass(frozen=True, slots=True, order=True)
class HandedIn:
    """One file that was handed in.

    Attributes:
        path: where it lies in the submission; below a zip's name if it lies in a zip.
        file: where it is on this machine: the file, or the zip.
        member: its name in the zip; "" if it is in none.
    """

    path: PurePosixPath
    file: Path
    member: str = ""

    @property
    def attempt(self) -> int:
        """Canvas's number for a file handed in again, from 1; 0 for the first."""
        again = _AGAIN.fullmatch(self.path.name)
        return int(again["attempt"]) if again else 0

    @property
    def place(self) -> PurePosixPath:
        """`path` without Canvas's number: `attention-2.py` is `attention.py`. No module's name has a hyphen."""
        again = _AGAIN.fullmatch(self.path.name)
        return self.path.with_name(f"{again['stem']}.py") if again else self.path

    def read(self) -> bytes:
        """The content.

        Raises:
            CourseError: it is too large, or cannot be read.
        """
        try:
            if self.member:
                with zipfile.ZipFile(self.file) as archive, archive.open(self.member) as stream:
                    content = stream.read(MAX_FILE_NBYTES + 1)
            else:
                with self.file.open("rb") as plain:
                    content = plain.read(MAX_FILE_NBYTES + 1)
        except _ZIP_ERRORS as error:
            raise CourseError(f"{self.path} cannot be read: {error}") from error
        if len(content) > MAX_FILE_NBYTES:
            raise CourseError(f"{self.path} is larger than {MAX_FILE_NBYTES >> 20} MiB, so it cannot be a lab file")
        return content


@dataclass(frozen=True, slots=True)
class Submission:
    """What one student handed in.

    Attributes:
        student: the name to list it under, unique in the class: that of the folder, or the one that a platform put
            into it.
        files: module → the file that was found for it; a file that was not handed in is absent.
        id: the platform's number for the student; "" if the names have none.
        notes: what a teacher should know of how the files were found.
        others: the paths of files that are no lab file of the phase, at most 100.
    """

    student: str
    files: dict[str, HandedIn]
    id: str = ""
    notes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def absent(self, phase: Phase) -> list[str]:
        """Notes on the files that were not handed in, and on what was handed in under another name perhaps."""
        absent = [name for module, name in phase.files.items() if module not in self.files]
        if not absent:
            return []
        meant = [note for name in absent if (note := meant_for(name, self.others))]
        if not meant and not self.files and (notebooks := [each for each in self.others if each.endswith(".ipynb")]):
            meant = [f"{notebooks[0]} is a notebook: its code must be in files with the course's names"]
        return [f"not handed in: {', '.join(map(str, absent))}", *meant]

    def remarks(self, phase: Phase) -> list[str]:
        """What a teacher should know of the files: how they were found, what is absent, what is unusual in them."""
        remarks = [*self.notes, *self.absent(phase)]
        for module, file in self.files.items():
            try:
                unusual = scan(file.read(), reference_file(module).read_bytes())
            except CourseError as error:
                unusual = [str(error)]
            remarks += [f"{phase.files[module].name}: {', '.join(unusual)}"] if unusual else []
        return remarks

    def digest(self) -> str:
        """A fingerprint of the lab files, which changes when one of them does."""
        whole = hashlib.sha256()
        for module, file in sorted(self.files.items()):
            try:
                content = hashlib.sha256(file.read()).hexdigest()
            except CourseError as error:
                content = str(error)
            whole.update(f"{module} {content}\n".encode())
        return whole.hexdigest()[:16]


@dataclass(slots=True)
class _Student:
    """A student, and where the files lie."""

    name: str
    id: str
    sources: list[tuple[PurePosixPath, Path]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_submissions(folder: Path, course: Course, phase: Phase) -> tuple[list[Submission], list[str]]:
    """What each student in `folder` handed in of `phase`.

    A sub-folder is a student, and so is a zip. Files that Canvas or Moodle named after a student are that student's.

    Returns:
        The submissions, by name, and the names of files in `folder` without a student.

    Raises:
        CourseError: there is no submission.
    """
    students: dict[tuple[str, str], _Student] = {}
    strays = []
    for each in sorted(folder.iterdir()):
        if each.name.startswith(".") or each.name in _SKIPPED_FOLDERS:
            continue
        if owned := _owner(each):
            name, id, path, note = owned
            student = students.setdefault((name, id), _Student(name, id))
            student.sources.append((path, each))
            student.notes += [note] if note and note not in student.notes else []
        else:
            strays.append(_text(each.name))
    if not students:
        raise CourseError(
            f"{folder} has no submissions: a sub-folder or a zip for each student is expected, or the files of a "
            "download from Canvas or Moodle, unpacked"
        )
    names = [student.name for student in students.values()]
    found = []
    for student in students.values():
        if names.count(student.name) > 1:
            student.name = f"{student.name} ({student.id or 'no id'})"
        found.append(_submission(student, course, phase))
    return sorted(found, key=lambda each: each.student), strays


def one_submission(folder: Path, course: Course, phase: Phase) -> Submission:
    """All of `folder` as what one student handed in."""
    student = _Student(_text(folder.resolve().name), "", [(PurePosixPath(), folder)])
    return _submission(student, course, phase)


def _owner(entry: Path) -> tuple[str, str, PurePosixPath, str] | None:
    """Whose an entry of the class's folder is: name, id, its path in the submission, a note. None: no student's."""
    name = _text(entry.name)
    if entry.is_dir():
        if moodle := _MOODLE.fullmatch(name):
            return moodle["name"], moodle["id"], PurePosixPath(), ""
        return name, "", PurePosixPath(), ""
    if entry.is_symlink() or not entry.is_file():
        return None
    if moodle := _MOODLE.fullmatch(name):
        return moodle["name"], moodle["id"], PurePosixPath(moodle["file"] or "file"), ""
    if canvas := _CANVAS.fullmatch(name):
        note = "Canvas: handed in late" if canvas["late"] else ""
        return canvas["name"] or canvas["id"], canvas["id"], PurePosixPath(canvas["file"] or name), note
    if entry.suffix.lower() == ".zip":
        return _text(entry.stem), "", PurePosixPath(name), ""
    return None


def _submission(student: _Student, course: Course, phase: Phase) -> Submission:
    """Find the lab files among all that a student handed in."""
    notes = list(student.notes)
    handed_in: list[HandedIn] = []
    for file in _everything(student, notes):
        if len(handed_in) == _MAX_FILES:
            notes.append(f"more than {_MAX_FILES:,} files: the rest was skipped")
            break
        handed_in.append(file)
    taken: dict[str, HandedIn] = {}
    package = {part for each in course for name in each.files.values() for part in name.parent.parts}
    for module, name in phase.files.items():
        # What is compared, from the first to the last: one for each of _REASONS.
        ranked = sorted(
            ((-closeness, -each.attempt, len(each.path.parts), str(each.path)), each)
            for each in handed_in
            if (closeness := _closeness(each.place, phase, name, package))
        )
        if not ranked:
            notes += _engines_own(handed_in, name)
            continue
        taken[module] = ranked[0][1]
        if len(ranked) > 1 and (note := _choice(*ranked[:2])):
            notes.append(note)
    if not taken:
        archives = [each.path for each in handed_in if each.path.suffix.lower() in _ARCHIVES]  # a zip in a zip
        notes += [f"{path} was not opened: ask for a zip of the files" for path in archives[:3]]
    chosen = set(taken.values())
    others = tuple(str(each.path) for each in handed_in if each not in chosen)[:_MAX_OTHERS]
    return Submission(student.name, taken, student.id, tuple(notes), others)


# --- which of the files is a lab file --------------------------------------------------------------------------------


def _closeness(path: PurePosixPath, phase: Phase, name: PurePosixPath, package: set[str]) -> int:
    """How many parts of `labs/phase-03-paged-cache/kernels/plain.py` the path ends with; 0: it is another file.

    Another phase's file and the engine's own, `minicache/kernels/plain.py`, have the same end and are not meant. Nor is
    a `plain.py` in `cache/`: another folder of the package.
    """
    wanted = ("labs", phase.folder, *name.parts)
    same = 0
    while same < min(len(wanted), len(path.parts)) and path.parts[-1 - same] == wanted[-1 - same]:
        same += 1
    above = path.parts[: len(path.parts) - same]
    if any(re.fullmatch(r"phase-\d\d-.+", part) and part != phase.folder for part in above):
        return 0
    if same == len(name.parts) and len(name.parts) > 1 and above and above[-1] in PACKAGES:
        return 0
    if 0 < same < len(name.parts) and above and above[-1] in package:
        return 0
    return same


_Rank = tuple[int, int, int, str]
_REASONS = (
    "its path matches the course",
    "it was submitted later",
    "it is in fewer folders",
    "its name sorts first",
)


def _choice(best: tuple[_Rank, HandedIn], next_best: tuple[_Rank, HandedIn]) -> str:
    """Which of two files was taken and why; "" if they have the same content."""
    try:
        if best[1].read() == next_best[1].read():
            return ""
    except CourseError:
        pass  # the chosen file's problem is reported when it is graded
    reasons = (why for why, a, b in zip(_REASONS, best[0], next_best[0], strict=True) if a != b)
    reason = next(reasons, "both have the same name")
    return f"{best[1].path} was used, not {next_best[1].path}: {reason}"


def _engines_own(handed_in: list[HandedIn], name: PurePosixPath) -> list[str]:
    """A note if all that there is of a file is the engine's, as in a clone whose labs/ has lost it."""
    ends = [(package, *name.parts) for package in PACKAGES]
    theirs = [each.path for each in handed_in if each.path.parts[-len(name.parts) - 1 :] in ends]
    return [f"{theirs[0]} is the engine's file, and not used as the lab's"] if theirs else []


# --- everything that was handed in -----------------------------------------------------------------------------------


def _everything(student: _Student, notes: list[str]) -> Iterator[HandedIn]:
    """All files of a student, those inside zips too. What cannot be opened is noted."""
    for path, source in student.sources:
        for file in _walk(path, source) if source.is_dir() else [HandedIn(path, source)]:
            if file.path.suffix.lower() == ".zip":
                try:
                    yield from _members(file)
                except _ZIP_ERRORS as error:
                    notes.append(f"{file.path} cannot be opened: {error}")
            else:
                yield file


def _walk(path: PurePosixPath, folder: Path) -> Iterator[HandedIn]:
    """The plain files below a folder. A link could point to anything on the grader's machine: none is followed."""
    for root, folders, files in os.walk(folder):
        is_deep = len(Path(root).relative_to(folder).parts) >= _MAX_DEPTH  # os.walk calls itself for each level
        folders[:] = [] if is_deep else sorted(each for each in folders if not _is_skipped(each))
        for name in sorted(files):
            file = Path(root, name)
            if not _is_skipped(name) and not file.is_symlink() and file.is_file():
                yield HandedIn(path / PurePosixPath(_text(file.relative_to(folder).as_posix())), file)


def _members(zipped: HandedIn) -> Iterator[HandedIn]:
    """The files in a zip.

    Raises:
        OSError, ValueError, zipfile.BadZipFile: it is damaged, encrypted, or its list of names is too long.
    """
    _check_directory(zipped.file)
    with zipfile.ZipFile(zipped.file) as archive:
        members = archive.infolist()
    for member in members:
        inside = PurePosixPath(member.filename.replace("\\", "/"))
        if member.is_dir() or inside.is_absolute() or ".." in inside.parts or any(map(_is_skipped, inside.parts)):
            continue
        if stat.S_ISLNK(member.external_attr >> 16):
            continue
        if member.flag_bits & 1:
            raise ValueError("it is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # Others are not read in small parts: a few bytes of one may unpack to gigabytes.
            raise ValueError("its compression method is not supported everywhere")
        path = zipped.path / PurePosixPath(_text(str(inside)))
        yield HandedIn(path, zipped.file, member.filename)


def _check_directory(file: Path) -> None:
    """Refuse a zip whose list of names would fill the memory."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 2**16 - 22))
        end = stream.read()
    # As zipfile finds it: without a comment it is the last 22 bytes, whatever they have in them.
    has_no_comment = end[-22:-18] == b"PK\5\6" and end[-2:] == b"\0\0"
    at = len(end) - 22 if has_no_comment else end.rfind(b"PK\5\6")
    if at < 0:
        raise ValueError("it is not a zip file")
    (directory_nbytes,) = struct.unpack_from("<I", end, at + 12)
    if directory_nbytes > _MAX_DIRECTORY_NBYTES or b"PK\6\7" in end[max(0, at - 20) : at]:
        raise ValueError("it has too many files")


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED_FOLDERS


def _text(name: str) -> str:
    """A file's name as text that can be written: bytes that are no UTF-8 become �."""
    return os.fsencode(name).decode("utf-8", errors="replace")
