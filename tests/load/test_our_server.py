"""The two ends of phase 10 together: `minicache bench serve` against the server with MiniGPT."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
import torch
from typer.testing import CliRunner

import minicache_cli as cli
from minicache import __version__
from minicache.engine.async_engine import AsyncEngine
from minicache.engine.llm import LLM
from minicache.serving.http.app import create_app
from minicache.serving.http.running import Server
from minicache.serving.load import Endpoint, LoadRun, fixed_arrivals, make_requests


@pytest.fixture(scope="module")
def url():
    """A server with two batch slots and four places in the line."""
    torch.set_num_threads(1)
    ports, is_up = [], threading.Event()
    engine = AsyncEngine(LLM(max_num_seqs=2), max_waiting=4)
    app = create_app(engine, served_model_name="minigpt", lab_files={"minicache.cache.paged": "ab"})
    server = Server(app, port=0, on_listening=lambda port: (ports.append(port), is_up.set()))
    thread = threading.Thread(target=server.run)
    thread.start()
    assert is_up.wait(60)
    yield f"http://127.0.0.1:{ports[0]}"
    server.stop()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("prompts", [(), ("--vocab-size", "346", "--num-shared-tokens", "16")], ids=["text", "tokens"])
def test_what_the_command_asks_for_by_default_is_answered(url, prompts):
    arguments = ("--num-requests", "5", "--num-output-tokens", "7", "--max-in-flight", "2", "--json", *prompts)
    result = CliRunner().invoke(cli.app, ["bench", "serve", "--url", url, *arguments])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["settings"]["server"] == {"version": __version__, "lab_files": {"minicache.cache.paged": "ab"}}
    assert found["settings"]["client"].keys() == {"version", "machine", "cores"}
    report = found["report"]
    assert report["num_ok"] == 5
    assert (report["num_output_tokens"], report["num_events"]) == (35, 35)
    # Every length is as it was planned. (Client and server share a process here: the client may call itself busy.)
    assert not [note for note in report["notes"] if not note.startswith("The client")]


def test_whoever_finds_no_place_is_refused_and_told_when_to_come_again(url):
    requests = make_requests(fixed_arrivals(30, float("inf"), 24, 40), model="minigpt")
    run = LoadRun(Endpoint.parse(url), requests)
    asyncio.run(run.run())
    refused = [outcome for outcome in run.outcomes if outcome.status == "refused"]
    assert {outcome.status for outcome in run.outcomes} == {"ok", "refused"}
    assert len(run.outcomes) - len(refused) >= 6
    assert all(outcome.retry_after >= 1 for outcome in refused)
