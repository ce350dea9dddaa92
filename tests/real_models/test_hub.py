"""Hub names: what is downloaded, and what happens where there is no network. The hub here is a server of our own."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.errors import CheckpointError, HubError, MissingExtraError
from minicache.model.hub import download, is_hub_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as a download of `org/model` needs."""

    protocol_version = "HTTP/1.1"
    folder: Path
    asked: list[str]

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        files = sorted(file.name for file in self.folder.iterdir())
        if path in ("/api/models/org/model", "/api/models/org/model/revision/main"):
            siblings = [{"rfilename": file} for file in files]
            self.answer(json.dumps({"id": "org/model", "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"/api/models/org/model/tree/{COMMIT}":
            self.answer(json.dumps([{"type": "file", "path": file, **self.about(file)} for file in files]).encode())
        elif path.startswith("/org/model/resolve/") and name in files:
            headers = {"ETag": f'"{self.about(name)["oid"]}"', "X-Repo-Commit": COMMIT}
            self.answer((self.folder / name).read_bytes(), headers)
        else:
            self.answer(b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, 404)

    def about(self, name):
        content = (self.folder / name).read_bytes()
        return {"size": len(content), "oid": sha256(content).hexdigest()[:40]}

    def answer(self, content, headers=None, status=200):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def point_at(monkeypatch, tmp_path):
    """Have the library take this address for the hub, and an empty folder for its cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def point(address):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return point


@pytest.fixture
def nowhere() -> str:
    """An address of this machine at which no one listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def hub(save, add_tokenizer, point_at) -> Iterator[type[Hub]]:
    folder = save("llama", vocab_size=300, max_shard_size="100KB", fresh=True).folder
    add_tokenizer(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "consolidated.safetensors").write_bytes(b"the weights again")

    class OurHub(Hub):
        pass

    OurHub.folder, OurHub.asked = folder, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), OurHub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    point_at(f"http://127.0.0.1:{server.server_port}")
    yield OurHub
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_name_is_downloaded_once_and_then_works_without_the_hub(hub, point_at, nowhere):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = LLM(hub.folder, num_blocks=10).generate(["the cat"], params)
    assert LLM("org/model", num_blocks=10).generate(["the cat"], params) == expected
    downloaded = {path.name for path in download("org/model").iterdir()}
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"} <= downloaded
    assert not {"pytorch_model.bin", "consolidated.safetensors"} & downloaded
    hub.asked.clear()
    download("org/model")
    assert not any("resolve" in path for path in hub.asked), "files that are here were asked for again"
    point_at(nowhere)
    assert LLM("org/model", num_blocks=10).generate(["the cat"], params) == expected


def test_a_model_that_the_hub_lacks(hub):
    with pytest.raises(HubError, match="no folder 'org/other' here, and the hub does not give it"):
        LLM("org/other")


def test_without_a_hub_it_says_so_and_soon(point_at, nowhere):
    point_at(nowhere)
    start = time.monotonic()
    with pytest.raises(HubError, match=r"no folder 'org/model' here, the hub cannot be reached .* downloaded before"):
        LLM("org/model")
    assert time.monotonic() - start < 10


def test_a_hub_that_does_not_answer_is_waited_for_once(point_at, monkeypatch):
    monkeypatch.setattr("minicache.model.hub.TIMEOUT", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        point_at(f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(HubError, match="cannot be reached"):
            LLM("org/model")
        assert time.monotonic() - start < 10


def test_offline_by_request(point_at, nowhere, monkeypatch):
    point_at(nowhere)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="org/model"):
        LLM("org/model")


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"downloading org/model needs huggingface_hub: pip install"):
        LLM("org/model")


def test_a_folder_of_that_name_goes_before_the_hub(save, monkeypatch, tmp_path):
    (tmp_path / "org").mkdir()
    (tmp_path / "org/model").symlink_to(save("llama").folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert LLM("org/model", num_blocks=10).model.config.vocab_size == 97
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        LLM(Path("org/other"))  # a Path is never a hub name


@pytest.mark.parametrize("name", ["org/model", "meta-llama/Llama-3.2-1B", "a_b/c.d"])
def test_hub_names(name):
    assert is_hub_name(name)


@pytest.mark.parametrize("name", ["minigpt", "a/b/c", "./a", "../a", "/a", "a/", "org/weights.safetensors", ""])
def test_no_hub_names(name):
    assert not is_hub_name(name)
