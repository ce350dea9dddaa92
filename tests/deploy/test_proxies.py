"""nginx and Caddy, configured by deploy/, in front of `minicache serve`."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

pytestmark = pytest.mark.slow

ASK = {"model": "minigpt", "prompt": "Yesterday I", "max_tokens": 4}


def test_the_routes_are_below_the_prefix(proxy, server) -> None:
    assert proxy.ask("GET", "/health")[0] == 200
    status, _, body = proxy.ask("HEAD", "/health")
    assert (status, body) == (200, b"")
    assert b"<html" in proxy.ask("GET", "/")[2]
    assert json.loads(proxy.ask("GET", "/v1/models")[2])["data"][0]["id"] == "minigpt"
    status, headers, _ = proxy.ask("GET", "")
    assert status == 301
    assert headers["Location"].endswith("/minicache/")


def test_metrics_are_not_for_everybody(proxy, server) -> None:
    assert proxy.ask("GET", "/metrics")[0] == 404
    assert server.ask("GET", "/metrics")[0] == 200


def test_a_request_keeps_its_id_in_all_logs(proxy, server, wait_until) -> None:
    for given in ("from-the-client", None):
        headers = {"X_Request_Id": given} if given else {}
        status, answered, _ = proxy.ask("POST", "/v1/completions", ASK, **headers)
        assert status == 200
        request_id = answered["X-Request-Id"]
        assert given in (None, request_id)
        for log in (server.log, proxy.log):  # which are written after the response
            wait_until(lambda log=log, wanted=request_id: wanted in log.read_text(), f"{log.name} has {request_id}")


def test_what_the_server_refuses_passes_as_it_is(proxy, server) -> None:
    status, _, body = proxy.ask("POST", "/v1/completions", ASK, Authorization="Bearer wrong")
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    status, _, body = proxy.ask("POST", "/v1/completions", {**ASK, "prompt": "a " * (5 * 2**20 // 2 - 100)})
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


def test_a_quick_answer_is_not_lost(proxy, server) -> None:
    def ask(_: int) -> str:
        return str(
            json.loads(proxy.ask("POST", "/v1/completions", ASK, Authorization="Bearer wrong")[2])["error"]["code"]
        )

    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(ask, range(600))) == {"invalid_api_key"}


def test_every_token_passes_at_once(proxy, server) -> None:
    before = server.metric("vllm:generation_tokens_total")
    with proxy.stream(400) as stream:
        stream.read(1)
        with server.frozen_engine():
            num_generated = server.metric("vllm:generation_tokens_total") - before
            assert 1 <= num_generated < 400, "the engine was not stopped in the middle of the answer"
            stream.read(int(num_generated) - stream.num_tokens)  # a proxy that keeps some back makes this wait forever
            assert not stream.is_done
        stream.read()
    assert stream.num_tokens == 400


def test_a_full_server_says_when_to_come_back(proxy, server) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(proxy.stream(400)) for _ in range(4)]
        for stream in streams:
            stream.read(1)
        with server.frozen_engine():
            status, headers, body = proxy.ask("POST", "/v1/completions", ASK)
            assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
            assert int(headers["Retry-After"]) >= 1
        for stream in streams:
            stream.read()


def test_a_client_that_leaves_ends_its_request(proxy, server, wait_until) -> None:
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    before = server.metric(aborted)
    with proxy.stream(400) as stream:
        stream.read(1)
        with server.frozen_engine():  # or it might be complete before its client has left
            stream.leave()
    wait_until(lambda: server.metric(aborted) == before + 1, "the request is aborted")


def test_sigterm_drains_through_proxies_which_then_say_when_to_come_back(server_to_stop, proxies) -> None:
    started = proxies(server_to_stop.port)
    with ExitStack() as stack:
        streams = [stack.enter_context(proxy.stream(400)) for proxy in started]
        for stream in streams:
            stream.read(1)
        server_to_stop.process.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.read()
            assert stream.num_tokens == 400
    assert server_to_stop.process.wait(60) == 0
    for proxy in started:
        status, headers, body = proxy.ask("POST", "/v1/completions", ASK)
        assert (status, headers["Retry-After"]) == (503, "5")
        assert json.loads(body)["error"]["code"] == "not_ready"
        assert headers["Content-Type"] == "application/json"
        assert headers["X-Request-Id"]
