"""API keys with names and limits: what a file may say, who is admitted, what is refused and when to come back."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import logging
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.conftest import running

from minicache.serving.http.errors import ApiError
from minicache.serving.http.keys import ApiKey, ApiKeys, Usage, read_api_keys


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def of_ada(limits: str = "") -> str:
    return f'[keys.ada]\nkey = "ada-1"\n{limits}\n[keys.bob]\nkey = "bob-1"\n'


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def sample(server: Any, name: str, **labels: str) -> float:
    """One number of /metrics; 0 if it is not there."""
    text = server.ask("GET", "/metrics").body.decode()
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            if each.name == name and labels.items() <= each.labels.items():
                return each.value
    return 0


# The file


def test_a_file_names_keys_and_their_limits(tmp_path: Path) -> None:
    digest = sha256(b"eve-1").hexdigest()
    text = of_ada("max_concurrent = 4\ntokens_per_minute = 20_000") + f'[keys."Éve L."]\nkey_sha256 = "{digest}"\n'
    keys = read_api_keys(write(tmp_path / "keys.toml", text))
    assert keys == [
        ApiKey("ada", sha256(b"ada-1").digest(), 4, 20_000),
        ApiKey("bob", sha256(b"bob-1").digest()),
        ApiKey("Éve L.", bytes.fromhex(digest)),
    ]


BAD = {
    "no TOML": ("[keys.ada]\nkey = ada-1", "line 2"),
    "empty": ("", "must have a table"),
    "another table": ('[keys.a]\nkey = "a"\n[limits]\n', "nothing else"),
    "no key": ("[keys.ada]\n", "keys.ada must have either key or key_sha256"),
    "both": ('[keys.ada]\nkey = "a"\nkey_sha256 = "b"', "must have either key or key_sha256"),
    "no table": ('[keys]\nada = "hush-hush"', "keys.ada must be a table"),
    "no text": ("[keys.ada]\nkey = 12345", "keys.ada.key must be a string"),
    "an empty key": ('[keys.ada]\nkey = ""', "keys.ada.key must be a string"),
    "a space": ('[keys.ada]\nkey = "hush hush"', "without spaces"),
    "no digest": ('[keys.ada]\nkey_sha256 = "hush-hush"', "keys.ada.key_sha256 must be 64 hexadecimal digits"),
    "a text for a number": (of_ada('max_concurrent = "4"'), "keys.ada.max_concurrent must be a whole number"),
    "0": (of_ada("max_concurrent = 0"), "from 1 to"),
    "true": (of_ada("max_concurrent = true"), "got True"),
    "a fraction": (of_ada("tokens_per_minute = 1.5"), "keys.ada.tokens_per_minute must be"),
    "nan": (of_ada("tokens_per_minute = nan"), "keys.ada.tokens_per_minute must be"),
    "a misspelt field": (of_ada("max_concurent = 4"), "keys.ada.max_concurent is not a field of a key"),
    "the same key": ('[keys.a]\nkey = "x"\n[keys.b]\nkey = "x"', "keys.a and keys.b have the same key"),
    "the same name": ('[keys.a]\nkey = "x"\n[keys.a]\nkey = "y"', "line 3"),
    "a reserved name": ('[keys.unknown]\nkey = "x"', "is not 'unknown'"),
    "an empty name": ('[keys.""]\nkey = "x"', "1 … 64 printable"),
    "a name of two lines": ('[keys."a\\nb"]\nkey = "x"', "1 … 64 printable"),
    "too deep": ("x = " + "[" * 10_000, "not valid TOML"),
    "too many digits": (of_ada("max_concurrent = " + "9" * 5000), "not valid TOML"),
    "too many keys": ("".join(f'[keys.k{i}]\nkey = "{i}"\n' for i in range(1001)), "at most 1000 keys; got 1001"),
    "too long": ("#" * 2**21, "at most 1048576 bytes"),
}


@pytest.mark.parametrize(("text", "told"), BAD.values(), ids=BAD)
def test_a_bad_file_is_one_error_that_says_where(tmp_path: Path, text: str, told: str) -> None:
    path = write(tmp_path / "keys.toml", text)
    with pytest.raises(ValueError, match=r"keys\.toml") as error:
        read_api_keys(path)
    assert told in str(error.value)
    assert "hush" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_api_keys(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="directory"):
        read_api_keys(tmp_path)
    (tmp_path / "latin").write_bytes('[keys."é"]\nkey = "a"'.encode("latin-1"))
    with pytest.raises(ValueError, match="save it as UTF-8"):
        read_api_keys(tmp_path / "latin")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="must be a file"):
        read_api_keys(tmp_path / "pipe")


def test_a_file_that_windows_has_written(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_bytes(b"\xef\xbb\xbf" + of_ada().replace("\n", "\r\n").encode())
    assert [key.name for key in read_api_keys(tmp_path / "keys.toml")] == ["ada", "bob"]


# The limits, by a clock that the test moves


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_is_refilled_evenly_and_retry_after_is_true() -> None:
    clock = Clock()
    usage = Usage(ApiKey("ada", b"", tokens_per_minute=600), clock)
    usage.begin(1).reserve(600)
    clock.now += 10
    with pytest.raises(ApiError) as refused:
        usage.begin(1).reserve(205)
    assert (refused.value.status, refused.value.reason) == (429, "token_limit")
    seconds = int(refused.value.headers["Retry-After"])
    clock.now += seconds - 1
    with pytest.raises(ApiError):
        usage.begin(1).reserve(205)
    clock.now += 1
    usage.begin(1).reserve(205)


def test_a_bucket_never_holds_more_than_a_minute() -> None:
    clock = Clock()
    usage = Usage(ApiKey("ada", b"", tokens_per_minute=600), clock)
    admission = usage.begin(1)
    admission.reserve(600)
    clock.now += 3600
    admission.end(10)
    assert usage.num_tokens_left == 600


def test_what_was_not_used_is_given_back() -> None:
    clock = Clock()
    usage = Usage(ApiKey("ada", b"", tokens_per_minute=600), clock)
    admission = usage.begin(1)
    admission.reserve(500)
    assert usage.num_tokens_left == 100
    admission.end(120)
    assert usage.num_tokens_left == 480
    assert dict(usage.headers()) == {
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"480",
        b"x-ratelimit-reset-tokens": b"12.000s",
    }


def test_what_could_never_be_admitted_is_no_429() -> None:
    usage = Usage(ApiKey("ada", b"", 2, 600))
    with pytest.raises(ApiError) as refused:
        usage.begin(3)
    assert refused.value.status == 400
    with pytest.raises(ApiError) as refused:
        usage.begin(2).reserve(601)
    assert refused.value.status == 400
    assert usage.num_tokens_left == 600


def test_other_limits_for_the_same_key() -> None:
    clock = Clock()
    usage = Usage(ApiKey("ada", b"", tokens_per_minute=600), clock)
    usage.begin(1).reserve(500)
    usage.update(ApiKey("ada", b"", tokens_per_minute=1000))
    assert usage.num_tokens_left == 500
    usage.update(ApiKey("ada", b"", tokens_per_minute=100))
    assert usage.num_tokens_left == 0
    usage.update(ApiKey("ada", b""))
    usage.begin(1).reserve(10**9)


def test_reading_the_file_again(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", of_ada("max_concurrent = 2"))
    keys = ApiKeys.of_file(path)
    ada = keys.find(b"Bearer ada-1")
    assert ada is not None
    admission = ada.begin(2)
    write(path, "[keys.ada")
    with pytest.raises(ValueError, match="TOML"):
        keys.reload()
    assert keys.find(b"Bearer bob-1")
    write(path, '[keys.ada]\nkey = "ada-2"\nmax_concurrent = 2\n[keys.late]\nkey = "late-1"')
    keys.reload()
    assert keys.find(b"Bearer ada-1") is None
    assert keys.find(b"Bearer bob-1") is None
    assert keys.find(b"Bearer late-1")
    with pytest.raises(ApiError):
        keys.find(b"Bearer ada-2").begin(1)  # type: ignore[union-attr]
    admission.end(0)
    keys.find(b"Bearer ada-2").begin(2)  # type: ignore[union-attr]


# The server


@pytest.fixture
def served_to(serve: Any, tmp_path: Path) -> Any:
    """A function that starts a server with the keys ada and bob, ada with limits."""

    def start(limits: str = "", **options: Any) -> Any:
        return serve(api_keys=ApiKeys.of_file(write(tmp_path / "keys.toml", of_ada(limits))), **options)

    return start


def test_who_is_let_in(served_to: Any) -> None:
    server = served_to()
    for path in ("/v1/models", "/", "/static/live.js", "/live"):
        for headers in ({}, as_key("ada"), as_key(""), {"Authorization": "ada-1"}, {"Authorization": "Basic ??"}):
            assert server.ask("GET", path, headers=headers).status == 401, (path, headers)
        connection = server.open()
        with closing(connection):
            connection.request("GET", path, headers=basic("ada-1"))
            assert connection.getresponse().status == 200
    assert server.ask("GET", "/v1/models", headers=as_key("bob-1")).status == 200
    assert server.ask("GET", "/").headers["www-authenticate"].startswith("Basic ")
    for path in ("/health", "/metrics", "/openapi.json"):
        assert server.ask("GET", path).status == 200
    assert b"ada-1" not in server.ask("GET", "/metrics").body
    name = "minicache:key_requests_refused_total"
    assert sample(server, name, key="unknown", reason="invalid_api_key") == 21


def basic(key: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()}


def test_a_key_at_its_concurrency_leaves_the_others_alone(served_to: Any, gate: threading.Event, model: Any) -> None:
    server = served_to("max_concurrent = 2")
    model.before = lambda token_ids: gate.wait(60)
    wish = {"prompt": "I", "max_tokens": 2, "n": 2, "temperature": 0}
    with ThreadPoolExecutor() as pool:
        held = pool.submit(server.ask, "POST", "/v1/completions", wish, as_key("ada-1"))
        server.wait_until(lambda: server.engine.num_unfinished == 2)
        refused = server.ask("POST", "/v1/completions", wish | {"n": 1}, as_key("ada-1"))
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json["error"]["code"] == "concurrency_limit"
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert sample(server, "minicache:key_answers_running", key="ada") == 2
        other = pool.submit(server.ask, "POST", "/v1/completions", wish, as_key("bob-1"))
        server.wait_until(lambda: server.engine.num_unfinished == 4)
        gate.set()
        assert held.result().status == other.result().status == 200
    assert server.ask("POST", "/v1/completions", wish, as_key("ada-1")).status == 200
    assert server.ask("POST", "/v1/completions", wish | {"n": 3}, as_key("ada-1")).status == 400
    assert sample(server, "minicache:key_answers_running", key="ada") == 0
    assert sample(server, "minicache:key_requests_total", key="ada") == 2
    refusals = "minicache:key_requests_refused_total"
    assert sample(server, refusals, key="ada", reason="concurrency_limit") == 2
    assert sample(server, "minicache:requests_refused_total", reason="concurrency_limit") == 2


def test_tokens_are_charged_as_they_were_used(served_to: Any) -> None:
    server = served_to("tokens_per_minute = 100")
    wish = {"prompt": "Yesterday I", "max_tokens": 60, "temperature": 0, "stop_token_ids": list(range(2, 400))}
    for stream in (False, True):
        answer = server.ask("POST", "/v1/completions", wish | {"stream": stream}, as_key("ada-1"))
        assert answer.status == 200
        assert answer.headers["x-ratelimit-limit-tokens"] == "100"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 100
    (ada, _bob) = server.options["api_keys"]
    assert ada.num_answers == 0
    assert 92 <= ada.num_tokens_left < 95  # twice a prompt of two tokens, and an answer of one
    assert sample(server, "minicache:key_prompt_tokens_total", key="ada") == 4
    assert sample(server, "minicache:key_generation_tokens_total", key="ada") == 2
    refused = server.ask("POST", "/v1/completions", wish | {"n": 2, "max_tokens": 48}, as_key("ada-1"))
    assert (refused.status, refused.json["error"]["code"]) == (429, "token_limit")
    assert 1 <= int(refused.headers["retry-after"]) <= 4
    never = server.ask("POST", "/v1/completions", wish | {"n": 2, "max_tokens": 60}, as_key("ada-1"))
    assert (never.status, never.json["error"]["code"]) == (400, "token_limit")
    assert server.ask("POST", "/v1/completions", wish | {"n": 2}, as_key("bob-1")).status == 200


def test_whatever_ends_a_request_frees_its_key(served_to: Any, model: Any) -> None:
    server = served_to("max_concurrent = 1\ntokens_per_minute = 500")
    (ada, _bob) = server.options["api_keys"]
    for bad in (
        {"prompt": "no-such-word"},
        {"prompt": "I", "max_tokens": 0},
        {"prompt": [10**6]},
        {"prompt": [1] * 600},
    ):
        assert server.ask("POST", "/v1/completions", bad, as_key("ada-1")).status == 400

    def fail(token_ids: Any) -> None:
        raise RuntimeError("broken")

    model.before = fail
    wish = {"prompt": "I", "max_tokens": 100, "ignore_eos": True}
    assert server.ask("POST", "/v1/completions", wish, as_key("ada-1")).status == 500
    model.reset()
    for stream in (False, True):  # the client leaves
        connection: http.client.HTTPConnection = server.open()
        connection.request(
            "POST",
            "/v1/completions",
            body=json.dumps(wish | {"stream": stream, "max_tokens": 400}),
            headers={**as_key("ada-1"), "Content-Type": "application/json"},
        )
        server.wait_until(lambda: server.engine.num_unfinished)
        connection.close()
        server.wait_until_idle()
    server.wait_until(lambda: ada.num_answers == 0)
    assert server.ask("POST", "/v1/completions", {"prompt": "I", "max_tokens": 4}, as_key("ada-1")).status == 200


def test_openai_client_waits_as_it_is_told(served_to: Any, engine_kind: str) -> None:
    server = served_to("tokens_per_minute = 1000")
    (ada, _bob) = server.options["api_keys"]
    wish: Any = {"model": "minigpt", "prompt": "Yesterday I", "max_tokens": 6}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="ada-1", max_retries=0) as client:
        client.completions.create(**wish)
        ada.take(ada.num_tokens_left)
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(**wish)
        assert error.value.code == "token_limit"
        assert error.value.response.headers["retry-after"] == "1"
        assert client.with_options(max_retries=1).completions.create(**wish).choices


def test_one_key_or_a_file_of_them(tmp_path: Path, serve: Any) -> None:
    with pytest.raises(ValueError, match="not both"):
        serve(api_key="x", api_keys=ApiKeys.of_file(write(tmp_path / "keys.toml", of_ada())))


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_key_does_not_learn_what_another_has_sent(tmp_path: Path, serve: Any, is_shared: bool) -> None:
    """Neither by time nor by the metrics: the prefix cache has nothing of one key for another."""
    path = write(tmp_path / "keys.toml", of_ada())
    server = serve(api_keys=ApiKeys.of_file(path, share_prefix_cache=is_shared), prefix_caching=True)

    def num_hits(key: str, **fields: Any) -> float:
        before = sample(server, "vllm:prefix_cache_hits_total")
        wish = {"prompt": [2, 3] * 40, "max_tokens": 1, **fields}
        assert server.ask("POST", "/v1/completions", wish, as_key(key)).status == 200
        server.wait_until_idle()
        return sample(server, "vllm:prefix_cache_hits_total") - before

    assert num_hits("ada-1") == 0
    assert num_hits("ada-1") == 64
    assert num_hits("bob-1") == (64 if is_shared else 0)
    assert num_hits("bob-1") == 64
    salted = {"cache_salt": "s"}
    assert num_hits("ada-1", **salted) == 0
    assert num_hits("bob-1", **salted) == (64 if is_shared else 0)
    assert num_hits("ada-1", **salted) == 64


def test_metrics_behind_a_key(served_to: Any) -> None:
    server = served_to(metrics_key="for-prometheus")
    for headers in ({}, as_key("ada-1")):
        refused = server.ask("GET", "/metrics", headers=headers)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert server.ask("GET", "/metrics", headers=as_key("for-prometheus")).status == 200
    assert server.ask("GET", "/v1/models", headers=as_key("for-prometheus")).status == 401
    assert server.ask("GET", "/health").status == 200


def test_a_removed_keys_numbers_leave_with_it(tmp_path: Path, serve: Any, model: Any, gate: threading.Event) -> None:
    """And what it has in progress then brings none of them back."""
    path = write(tmp_path / "keys.toml", of_ada())
    keys = ApiKeys.of_file(path)
    server = serve(api_keys=keys)
    model.before = lambda token_ids: gate.wait(60)
    with ThreadPoolExecutor() as pool:
        held = pool.submit(server.ask, "POST", "/v1/completions", {"prompt": "I", "max_tokens": 1}, as_key("ada-1"))
        server.wait_until(lambda: server.engine.num_unfinished == 1)
        assert sample(server, "minicache:key_answers_running", key="ada") == 1
        write(path, '[keys.bob]\nkey = "bob-1"')
        keys.reload()
        server.served.metrics.set_keys([usage.key.name for usage in keys])
        gate.set()
        assert held.result().status == 200
    server.wait_until_idle()
    text = server.ask("GET", "/metrics").body.decode()
    assert 'key="ada"' not in text
    assert 'key="bob"' in text


def test_the_log_names_the_key(served_to: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = served_to()
    with caplog.at_level(logging.INFO, logger="minicache.access"):
        for key in ("ada-1", "eve-1"):
            server.ask("GET", "/v1/models", headers=as_key(key))
        server.wait_until(lambda: len(caplog.records) >= 2)
    assert [record.fields["key"] for record in caplog.records] == ["ada", None]  # type: ignore[attr-defined]


# Under load


@pytest.fixture
def many_files() -> Iterator[None]:
    """Both ends of 700 connections are in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(4096, before[1])), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def stream(port: int, key: str, max_tokens: int) -> tuple[int, bytes]:
    """The status and the rest of one streamed answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wish = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(wish).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        status, rest = await reader.readline(), await reader.read()
    finally:
        writer.close()
    return int(status.split()[1]), rest


@pytest.mark.slow
@pytest.mark.parametrize("engine_kind", ["process"], indirect=True)
def test_700_streams_of_many_keys(tmp_path: Path, tiny: Any, engine_kind: str, many_files: None) -> None:
    """One key asks for 550 streams at once, 75 others for two each: all of theirs are served, and 4 of its."""
    text = '[keys.greedy]\nkey = "greedy"\nmax_concurrent = 4\n'
    text += "".join(f'[keys.k{i}]\nkey = "k{i}"\nmax_concurrent = 2\ntokens_per_minute = 100\n' for i in range(75))
    path = write(tmp_path / "keys.toml", text)
    going = threading.Event()
    tiny.before = lambda token_ids: going.wait(60)
    with running(tiny, engine_kind, api_keys=ApiKeys.of_file(path), num_blocks=2048, max_num_seqs=64) as server:

        async def load() -> list[tuple[int, bytes]]:
            asked = [stream(server.port, "greedy", 40) for _ in range(550)]
            asked += [stream(server.port, f"k{i}", 40) for i in range(75) for _ in range(2)]
            tasks = [asyncio.ensure_future(each) for each in asked]
            while sum(each.done() for each in tasks) < 546:
                await asyncio.sleep(0.01)
            assert server.engine.num_unfinished <= 154
            going.set()
            return await asyncio.gather(*tasks)

        answers = asyncio.run(load())
        server.wait_until_idle()
        statuses = [status for status, _ in answers]
        assert statuses[:550].count(200) == 4
        assert statuses[:550].count(429) == 546
        assert set(statuses[550:]) == {200}
        assert all(rest.rstrip().endswith(b"data: [DONE]\n\n\r\n0") for status, rest in answers if status == 200)
        server.wait_until(lambda: not any(usage.num_answers for usage in server.options["api_keys"]))
        third = asyncio.run(stream(server.port, "k7", 40))
        assert third[0] == 429  # 2 × 43 of 100 tokens are gone
        assert b"token_limit" in third[1]
