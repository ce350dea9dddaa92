"""`minicache serve` where it cannot, or not well: one line says why."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any

import pytest
from typer.testing import CliRunner

from minicache.engine.options import ReplicaOptions
from minicache.errors import CheckpointError
from minicache.serving.replica.messages import CacheInfo, EngineInfo
from minicache_cli import app
from minicache_cli.advice import advice, capacity


@pytest.mark.slow
@pytest.mark.parametrize("module", ["fastapi", "prometheus_client"])
def test_without_its_extra_it_says_what_to_install(module: str) -> None:
    """In a process of its own: modules that were imported without it are no good to other tests."""
    code = f"import sys; sys.modules[{module!r}] = None; from minicache_cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "serve"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert module in result.stderr
    assert "minicache-course[serve]" in result.stderr


def test_a_model_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(app, ["serve", "--model", "/nowhere/at/all"])
    assert isinstance(result.exception, CheckpointError)
    assert "/nowhere/at/all" in str(result.exception)


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--port", str(port), "--model", "/nowhere/at/all"])
    assert result.exit_code == 2
    assert str(port) in result.output
    assert "--port" in result.output


@pytest.mark.parametrize(
    ("given", "threshold"),
    [
        ([], 512),
        (["--scheduler", "fair"], 0),
        (["--long-prefill-threshold", "0"], 0),
        (["--long-prefill-threshold", "64"], 64),
    ],
    ids=str,
)
def test_one_long_prompt_does_not_take_the_whole_step(
    given: list[str], threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ReplicaOptions] = []

    def make_llm(options: ReplicaOptions, tokenizer: Any) -> None:
        made.append(options)
        raise CheckpointError("that is enough")

    monkeypatch.setattr("minicache.serving.replica.llm.make_llm", make_llm)
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--in-process", *given])
    assert isinstance(result.exception, CheckpointError)
    assert made[0].long_prefill_threshold == threshold


NOWHERE = ("--port", "0", "--in-process", "--model", "/nowhere/at/all")


def test_why_it_does_not_serve_is_in_a_log_of_json_too() -> None:
    result = CliRunner().invoke(app, ["serve", *NOWHERE, "--log-format", "json"])
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    told = json.loads(line)
    assert told["level"] == "critical"
    assert "/nowhere/at/all" in told["message"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--api-keys", "none.toml"], "none.toml"),
        (["--api-keys", "none.toml", "--api-key", "key"], "leave out"),
        (["--api-key", ""], "empty"),
        (["--allow-origin", "https://lab.example/"], "origin"),
    ],
)
def test_bad_keys_and_origins_are_told_before_the_model_is_loaded(options: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["serve", *NOWHERE, *options])
    assert result.exit_code == 2
    assert told in result.output


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "::"], True),
        (["--host", "0.0.0.0", "--api-key", "key"], False),
        (["--host", "127.0.0.1"], False),
        (["--host", "localhost"], False),
        (["--host", "[::1]"], False),
    ],
)
def test_whoever_lets_other_machines_in_without_a_key_is_warned(options: list[str], is_warned: bool) -> None:
    result = CliRunner().invoke(app, ["serve", *NOWHERE, *options])
    assert isinstance(result.exception, CheckpointError), result.output
    assert ("set --api-key" in result.output) == is_warned


# What it writes, and where nothing can be written

NUM_REQUESTS = 600
"""Their lines in the log are more than a pipe holds."""


@pytest.mark.parametrize("redirected", [">/dev/full 2>&1", ">&- 2>&-", ""], ids=["full", "closed", "not read"])
def test_nothing_that_cannot_be_written_holds_it_up(redirected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-c", "from minicache_cli import main; main()", "serve", "--port", str(port)]
    command = f"exec {shlex.join([*words, '--in-process'])} {redirected}"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            while True:
                assert process.poll() is None, "it has ended"
                with suppress(OSError):
                    connection.request("GET", "/health")
                    if (answer := connection.getresponse()).read() and answer.status == 200:
                        break
                connection.close()
                time.sleep(0.1)
            for _ in range(NUM_REQUESTS):
                connection.request("GET", "/v1/models")
                answer = connection.getresponse()
                assert answer.read()
                assert answer.status == 200
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


# Options that will disappoint


def made(num_blocks: int = 1024, max_num_seqs: int = 256, max_model_len: int = 512, block_size: int = 16) -> EngineInfo:
    cache = CacheInfo(block_size, num_blocks, 0, True, max_model_len)
    return EngineInfo(max_model_len, 100, max_num_seqs, cache)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (made(), "16,384 tokens, 32 requests of 512 at once, or up to 256 shorter ones"),
        (made(max_model_len=8192), "16,384 tokens, 2 requests of 8,192 at once, or up to 256 shorter ones"),
        (made(num_blocks=64), "1,024 tokens, 2 requests of 512 at once, or up to 64 shorter ones"),
        (made(max_num_seqs=32), "up to 32 requests at once"),
        (made(num_blocks=1), "16 tokens, less than one request of 512"),
    ],
)
def test_what_the_cache_holds_is_said(info: EngineInfo, words: str) -> None:
    assert capacity(info) == words


@pytest.mark.parametrize(
    ("info", "options", "others", "words"),
    [
        (made(num_blocks=1), {}, {}, "holds 16 tokens (1 block of 16)"),
        (made(num_blocks=1), {}, {}, "--num-blocks 32 or more, or --max-model-len 16"),
        (made(num_blocks=31), {}, {}, "--num-blocks 32 or more"),
        (made(num_blocks=1, block_size=1), {}, {}, "--max-model-len 2"),
        (made(num_blocks=32), {}, {}, "--max-num-seqs 32 or less"),
        (made(num_blocks=255), {}, {}, "256 requests cannot run together in 255 blocks"),
        (made(block_size=1024), {}, {}, "--block-size 16"),
        (made(), {"max_num_batched_tokens": 255}, {}, "--max-num-batched-tokens 256 or more"),
        (made(), {"scheduler": "paged", "max_num_batched_tokens": 256}, {}, "refuses prompts of more than 256 tokens"),
        (made(), {"num_host_blocks": 8}, {}, "--preemption swap too"),
        (made(), {"scheduler": "static", "num_host_blocks": 8, "preemption": "swap"}, {}, "static never preempts"),
        (made(), {}, {"replicas": 5}, "5 engine processes of 1 thread each compete for 4 cores"),
        (made(), {"num_threads": 8}, {}, "1 engine process of 8 threads each"),
        (made(), {"enforce_eager": True}, {}, "--enforce-eager has no effect"),
        (made(), {}, {"drain_seconds": 0.0}, "--drain-seconds 0"),
    ],
)
def test_what_will_disappoint_is_told_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, info: EngineInfo, options: dict[str, Any], others: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    (sentence,) = advice(info, ReplicaOptions(**options), **{"replicas": 1, "drain_seconds": 30.0, **others})
    assert words in sentence


@pytest.mark.parametrize(
    ("info", "options"),
    [
        (made(), {}),
        (made(num_blocks=32, max_num_seqs=32), {"max_num_batched_tokens": 32}),
        (made(), {"scheduler": "paged", "max_num_batched_tokens": 511, "preemption": "swap", "num_host_blocks": 1}),
        (made(), {"enforce_eager": True, "device": "cuda", "num_threads": 64}),
    ],
)
def test_what_serves_well_is_not_talked_about(
    monkeypatch: pytest.MonkeyPatch, info: EngineInfo, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert advice(info, ReplicaOptions(**options), replicas=1, drain_seconds=1.0) == []
