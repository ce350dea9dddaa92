"""A phase's files are found however a class hands them in, and nothing else is taken for one."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from tests.toys import Toys

from minicache_course.errors import CourseError
from minicache_course.table import Course, Phase
from minicache_course.workspace import open_workspace
from minicache_teach.submissions import MAX_FILE_NBYTES, Submission, find_submissions, one_submission

COURSE = open_workspace(Path(__file__).parents[2]).course
PAGED = COURSE.phase("paged-cache")
DENSE = COURSE.phase("dense-cache")
LAB = "labs/phase-03-paged-cache"


def write(folder: Path, *files: str, **contents: str | bytes) -> None:
    """Write files whose content is their path, and those whose content is given."""
    for place in files:
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(place)


def zipped(file: Path, *members: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in members:
            archive.writestr(member, f"zipped {member}")


def taken(folder: Path, phase: Phase = PAGED, course: Course = COURSE) -> dict[str, dict[str, str]]:
    """Student → lab file → the path that was taken for it."""
    found, _ = find_submissions(folder, course, phase)
    return {
        each.student: {str(phase.files[module]): str(file.path) for module, file in each.files.items()}
        for each in found
    }


def only(folder: Path, phase: Phase = PAGED) -> Submission:
    found, _ = find_submissions(folder, COURSE, phase)
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    "place",
    [
        f"{LAB}/kernels/plain.py",
        "phase-03-paged-cache/kernels/plain.py",
        "kernels/plain.py",
        "plain.py",
        f"attention-lab-ada/{LAB}/kernels/plain.py",
        f"minicache/{LAB}/kernels/plain.py",
        "my solution/plain.py",
        "Week 3/final/kernels/plain.py",
    ],
)
def test_a_lab_file_is_found_by_the_end_of_its_path(tmp_path: Path, place: str) -> None:
    write(tmp_path / "ada", place)
    assert taken(tmp_path) == {"ada": {"kernels/plain.py": place}}
    zipped(tmp_path / "bob" / "handed in.zip", place)
    assert taken(tmp_path)["bob"] == {"kernels/plain.py": f"handed in.zip/{place}"}
    (file,) = find_submissions(tmp_path, COURSE, PAGED)[0][1].files.values()
    assert file.read().decode() == f"zipped {place}"


@pytest.mark.parametrize(
    "place",
    [
        "src/minicache/kernels/plain.py",  # the reference, in a clone whose lab file is gone
        "labs/phase-04-triton-kernels/kernels/plain.py",
        "phase-09-chunked-prefill/plain.py",
        "cache/plain.py",
        "my-plain.py",
        "plain.py.txt",
        ".minicache/backups/kernels/plain.py",
        "__MACOSX/kernels/plain.py",
        "venv/lib/python3.11/site-packages/kernels/plain.py",
    ],
)
def test_what_is_another_file_is_not_taken(tmp_path: Path, place: str) -> None:
    write(tmp_path / "ada", place)
    assert taken(tmp_path) == {"ada": {}}
    zipped(tmp_path / "ada" / "all.zip", place)
    assert taken(tmp_path) == {"ada": {}}


def test_a_clone_without_its_lab_file_is_told(tmp_path: Path) -> None:
    write(tmp_path / "ada", "src/minicache/kernels/plain.py")
    (note,) = only(tmp_path).notes
    assert note == "src/minicache/kernels/plain.py is the engine's file, and not used as the lab's"


@pytest.mark.parametrize(
    ("best", "other", "reason"),
    [
        (f"{LAB}/kernels/plain.py", "plain.py", "its path matches the course"),
        ("kernels/plain.py", "old/plain.py", "its path matches the course"),
        ("plain-2.py", "plain.py", "it was submitted later"),
        ("plain.py", "old/plain.py", "it is in fewer folders"),
        ("plain.py", "handed in.zip/plain.py", "it is in fewer folders"),
        ("a/plain.py", "b/plain.py", "its name sorts first"),
    ],
)
def test_of_two_files_the_note_says_which_was_taken_and_why(tmp_path: Path, best: str, other: str, reason: str) -> None:
    write(tmp_path / "ada", best)
    if other.startswith("handed in.zip/"):
        zipped(tmp_path / "ada" / "handed in.zip", other.partition("/")[2])
    else:
        write(tmp_path / "ada", other)
    submission = only(tmp_path)
    assert [str(file.path) for file in submission.files.values()] == [best]
    assert submission.notes == (f"{best} was used, not {other}: {reason}",)


def test_two_files_with_the_same_content_are_no_choice(tmp_path: Path) -> None:
    write(tmp_path / "ada", "plain.py")
    (tmp_path / "ada" / "copy").mkdir()
    (tmp_path / "ada" / "copy" / "plain.py").write_text("plain.py")
    assert only(tmp_path).notes == ()


def test_a_download_from_canvas(tmp_path: Path) -> None:
    write(
        tmp_path,
        "lovelaceada_LATE_1234_5678_attention-2.py",
        "lovelaceada_LATE_1234_5679_dense.py",
        "hoppergrace_12_99_decoding.py",
        "lee_hoon_13_100_dense.py",
        "ñandú_14_101_attention.py",
        "hoppergrace_15_102_dense.py",
        "anon_3fGh7_103_dense.py",
        "LATE_anon_9xYz1_104_dense.py",
        "ochoaeva_17_text.html",
        "syllabus.pdf",
    )
    zipped(tmp_path / "kimjo_16_105_labs.zip", "labs/phase-01-dense-cache/cache/dense.py")
    found, strays = find_submissions(tmp_path, COURSE, DENSE)
    assert {each.student: (each.id, sorted(str(file.path) for file in each.files.values())) for each in found} == {
        "lovelaceada": ("1234", ["attention-2.py", "dense.py"]),
        "hoppergrace (12)": ("12", ["decoding.py"]),
        "hoppergrace (15)": ("15", ["dense.py"]),
        "lee_hoon": ("13", ["dense.py"]),
        "ñandú": ("14", ["attention.py"]),
        "anon_3fGh7": ("anon_3fGh7", ["dense.py"]),
        "anon_9xYz1": ("anon_9xYz1", ["dense.py"]),
        "ochoaeva": ("17", []),
        "kimjo": ("16", ["labs.zip/labs/phase-01-dense-cache/cache/dense.py"]),
    }
    late = {each.student for each in found if "Canvas: handed in late" in each.notes}
    assert late == {"lovelaceada", "anon_9xYz1"}
    assert strays == ["syllabus.pdf"]


def test_a_download_from_moodle(tmp_path: Path) -> None:
    write(
        tmp_path,
        "Ada Lovelace_12345_assignsubmission_file_/attention.py",
        "Ada Lovelace_12345_assignsubmission_onlinetext_/onlinetext.html",
        "Grace_Hopper_12346_assignsubmission_file/cache/dense.py",
        "Participant_12347_assignsubmission_file_/dense.py",
        "Participant_12348_assignsubmission_file_/dense.py",
        "Li Wei_12349_assignsubmission_file_dense.py",
    )
    found, strays = find_submissions(tmp_path, COURSE, DENSE)
    assert {each.student: (each.id, [str(file.path) for file in each.files.values()]) for each in found} == {
        "Ada Lovelace": ("12345", ["attention.py"]),
        "Grace_Hopper": ("12346", ["cache/dense.py"]),
        "Participant (12347)": ("12347", ["dense.py"]),
        "Participant (12348)": ("12348", ["dense.py"]),
        "Li Wei": ("12349", ["dense.py"]),
    }
    assert strays == []


def test_a_zip_for_each_student(tmp_path: Path) -> None:
    zipped(tmp_path / "ada.zip", "repo/labs/phase-03-paged-cache/kernels/plain.py", "__MACOSX/._plain.py")
    assert taken(tmp_path) == {
        "ada": {"kernels/plain.py": "ada.zip/repo/labs/phase-03-paged-cache/kernels/plain.py"},
    }


def test_one_folder_is_one_submission(tmp_path: Path) -> None:
    write(tmp_path, "plain.py", "notes.txt")
    submission = one_submission(tmp_path, COURSE, PAGED)
    assert [file.path for file in submission.files.values()] == [PurePosixPath("plain.py")]
    assert submission.others == ("notes.txt",)


def test_links_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", "plain.py", "kernels/plain.py")
    folder = tmp_path / "class"
    write(folder / "ada", "notes.txt")
    (folder / "ada" / "plain.py").symlink_to(tmp_path / "elsewhere" / "plain.py")
    (folder / "ada" / "kernels").symlink_to(tmp_path / "elsewhere" / "kernels")
    os.mkfifo(folder / "ada" / "paged.py")
    with zipfile.ZipFile(folder / "ada" / "all.zip", "w") as archive:
        link = zipfile.ZipInfo("plain.py")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    assert taken(folder) == {"ada": {}}


def test_folders_in_folders_in_folders_end_somewhere(tmp_path: Path) -> None:
    folder = tmp_path / "ada"
    write(folder, "plain.py")
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1200):  # deeper than Python calls
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert taken(tmp_path) == {"ada": {"kernels/plain.py": "plain.py"}}
    subprocess.run(["rm", "-rf", folder], check=True)  # pytest's own cleaning calls itself for each level


def test_a_zip_cannot_reach_out_of_its_folder(tmp_path: Path) -> None:
    zipped(tmp_path / "ada" / "all.zip", "../../kernels/plain.py", "/kernels/plain.py", "a/../kernels/plain.py")
    assert taken(tmp_path) == {"ada": {}}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ada", "all.zip"]


def test_a_zip_that_unpacks_to_gigabytes_is_read_in_part(tmp_path: Path) -> None:
    (tmp_path / "ada").mkdir()
    with zipfile.ZipFile(tmp_path / "ada" / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("plain.py", b"#" * (MAX_FILE_NBYTES + 1))
    (file,) = only(tmp_path).files.values()
    with pytest.raises(CourseError, match="larger than 1 MiB"):
        file.read()


def test_a_zip_with_too_many_names_is_not_opened(tmp_path: Path) -> None:
    zipped(tmp_path / "ada" / "many.zip", *(f"{number:05d}" + "x" * 1000 for number in range(5000)), "plain.py")
    submission = only(tmp_path)
    assert submission.files == {}
    assert submission.notes == ("many.zip cannot be opened: it has too many files",)


def test_a_zip_cannot_hide_how_many_names_it_has(tmp_path: Path) -> None:
    """What begins its last record is in the middle of that again, and the size would then be 0."""
    file = tmp_path / "ada" / "many.zip"
    zipped(file, *(f"{number:05d}" + "x" * 1000 for number in range(5000)))
    content = bytearray(file.read_bytes())
    content[-18:-14], content[-6:-2] = b"PK\5\6", bytes(4)
    file.write_bytes(content)
    assert only(tmp_path).notes == ("many.zip cannot be opened: it has too many files",)


def test_what_cannot_be_opened_is_told(tmp_path: Path) -> None:
    write(tmp_path / "ada", "broken.zip", "all.rar")
    zipped(tmp_path / "ada" / "outer.zip", "inner.zip")
    with zipfile.ZipFile(tmp_path / "ada" / "dense.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("plain.py", "")
    zipped(tmp_path / "ada" / "cut.zip", "plain.py")
    cut = tmp_path / "ada" / "cut.zip"
    cut.write_bytes(cut.read_bytes()[:-40])
    notes = " ".join(only(tmp_path).notes)
    assert "broken.zip cannot be opened: it is not a zip file" in notes
    assert "cut.zip cannot be opened" in notes
    assert "outer.zip/inner.zip was not opened" in notes
    assert "dense.zip cannot be opened: its compression method is not supported" in notes
    assert "all.rar was not opened: ask for a zip of the files" in notes


def test_the_fingerprint_changes_with_a_lab_file_only(tmp_path: Path) -> None:
    write(tmp_path / "ada", "plain.py", "notes.txt")
    before = only(tmp_path).digest()
    (tmp_path / "ada" / "notes.txt").write_text("other")
    assert only(tmp_path).digest() == before
    (tmp_path / "ada" / "plain.py").write_text("other")
    assert only(tmp_path).digest() != before


def test_a_name_that_is_no_utf8_can_be_written(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/Jos\xe9"
    os.mkdir(folder)
    assert only(tmp_path).student == "Jos�"


def test_an_empty_folder_is_refused(toys: Toys, tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="no submissions"):
        find_submissions(toys.tests, toys.workspace.course, toys.phase)
