"""The load client against a server whose every byte and pause is known."""

from __future__ import annotations

import asyncio
import socket
import time
from statistics import median

import pytest

from minicache.errors import LoadClientError
from minicache.serving.load import Endpoint, LoadRun, fetch_model, fixed_arrivals, make_requests, reach
from minicache.simulator.workload import Arrival

FIRST, GAP, LAST = 0.08, 0.03, 0.15


def send(server, arrivals, **options):
    """Send these, and wait for the end."""
    run = LoadRun(Endpoint.parse(server.url), make_requests(arrivals, model="fake"), **options)
    asyncio.run(run.run())
    return run


def together(count, num_output=3):
    return fixed_arrivals(count, float("inf"), 4, num_output)


def test_known_waits_give_the_known_latencies(fake):
    async def answer(call):
        await asyncio.sleep(FIRST)
        yield fake.head
        for _ in range(5):
            yield fake.chunk(fake.event())
            await asyncio.sleep(GAP)
        await asyncio.sleep(LAST)
        yield fake.chunk(fake.usage(4, 5) + fake.done) + b"0\r\n\r\n"

    with fake.run(answer) as server:
        before = time.perf_counter()
        run = send(server, together(4, num_output=5))
        # The run's clock began between these two, on the clock by which the server noted what it wrote.
        slack = time.perf_counter() - before - run.seconds
    assert [outcome.status for outcome in run.outcomes] == ["ok"] * 4
    late = []
    for outcome in run.outcomes:
        assert (outcome.num_prompt_tokens, outcome.num_output_tokens, len(outcome.token_times)) == (4, 5, 5)
        assert outcome.ttft >= FIRST
        assert outcome.tpot == pytest.approx((outcome.token_times[-1] - outcome.token_times[0]) / 4)
        assert outcome.latency == pytest.approx(outcome.ttft + 4 * outcome.tpot)
        assert sum(outcome.gaps) == pytest.approx(outcome.latency - outcome.ttft)
        assert outcome.ended >= outcome.token_times[-1] + LAST / 2  # it ends with the stream, not with a token
    for number in range(5):
        read = sorted(outcome.token_times[number] for outcome in run.outcomes)
        written = sorted(call.written[1 + number] for call in server.calls)
        late += [there - (here - before) for there, here in zip(read, written, strict=True)]
    assert -slack - 0.005 <= median(late) < 0.02  # the server notes it after the write


def test_what_is_sent(fake):
    with fake.run() as server:
        endpoint = Endpoint.parse(server.url + "/v1/", api_key="secret")
        asyncio.run(LoadRun(endpoint, make_requests(together(1), model="a model")).run())
    call = server.calls[0]
    assert call.headers["authorization"] == "Bearer secret"
    assert call.headers["host"] == f"127.0.0.1:{server.port}"
    assert call.headers["content-type"] == "application/json"
    prompt = call.body.pop("prompt")
    assert len(prompt.split()) == 4
    assert call.body == {
        "model": "a model",
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_requests_go_out_when_they_are_due_whatever_came_of_the_earlier_ones(fake):
    async def answer(call):
        await asyncio.sleep(0.4)
        yield fake.head + fake.chunk(fake.event() + fake.done) + b"0\r\n\r\n"

    arrivals = [Arrival(number, 0.05 * number, 4, 1) for number in range(6)]
    with fake.run(answer) as server:
        run = send(server, arrivals)
    assert [outcome.arrival for outcome in run.outcomes] == arrivals
    assert all(outcome.lag >= 0 for outcome in run.outcomes)
    assert max(outcome.sent for outcome in run.outcomes) < min(outcome.ended for outcome in run.outcomes)
    assert median(outcome.lag for outcome in run.outcomes) < 0.04


def test_with_a_limit_requests_wait_and_the_lag_says_so(fake):
    async def answer(call):
        await asyncio.sleep(0.05)
        yield fake.head + fake.chunk(fake.event() + fake.done) + b"0\r\n\r\n"

    with fake.run(answer) as server:
        run = send(server, together(3, 1), max_in_flight=1)
    first, second, third = run.outcomes
    assert second.sent >= first.ended
    assert third.sent >= second.ended
    assert third.lag >= 0.1
    assert third.ttft == pytest.approx(third.token_times[0] - third.sent)  # the wait before is none of it


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_events_may_be_cut_anywhere_and_have_comments_between(fake, end):
    async def answer(call):
        yield fake.head
        body = f": hello{end}{end}".encode() + 3 * (fake.event(" né", end) + f": ping{end}{end}".encode()) + fake.done
        for at in range(0, len(body), 7):
            piece = fake.chunk(body[at : at + 7])
            yield piece[:3]
            await asyncio.sleep(0)
            yield piece[3:]
        yield b"0\r\n\r\n"

    with fake.run(answer) as server:
        run = send(server, together(2))
    assert [(outcome.status, len(outcome.token_times)) for outcome in run.outcomes] == [("ok", 3)] * 2


def test_tokens_are_counted_by_the_server_and_by_events_if_it_does_not_say(fake):
    async def answer(call):
        yield fake.head + fake.chunk(fake.event() * 3)
        if call.number == 0:
            yield fake.chunk(fake.usage(9, 7))
        yield fake.chunk(fake.done) + b"0\r\n\r\n"

    with fake.run(answer) as server:
        run = send(server, together(2), max_in_flight=1)
    assert [outcome.num_tokens for outcome in run.outcomes] == [7, 3]
    assert [outcome.num_prompt_tokens for outcome in run.outcomes] == [9, None]


def test_every_third_is_refused(fake):
    async def answer(call):
        if call.number % 3 == 2:
            body = b'{"error": {"message": "8 of 8 places are taken"}}'
            yield fake.plain("429 Too Many Requests", body, "Retry-After: 7")
        else:
            yield fake.head + fake.chunk(fake.event() + fake.done) + b"0\r\n\r\n"

    with fake.run(answer) as server:
        run = send(server, together(6, 1), max_in_flight=1)
    assert [outcome.status for outcome in run.outcomes] == ["ok", "ok", "refused"] * 2
    refused = run.outcomes[2]
    assert (refused.http_status, refused.retry_after) == (429, 7.0)
    assert refused.detail == "HTTP 429: 8 of 8 places are taken"


def broken(fake):
    """Answer, what it is called, and how many tokens came before it broke."""
    head, chunk, event, done, plain = fake.head, fake.chunk, fake.event, fake.done, fake.plain
    return [
        (head + chunk(event()) + chunk(event())[:-9], "closed in the middle", 1),
        (head + chunk(event()), "closed in the middle", 1),
        (b"", "closed before a response", 0),
        (b"220 mail.example.org ESMTP\r\n\r\n", "not an HTTP/1.1 response", 0),
        (head + chunk(event() + b"data: {oops\n\n" + event() + done) + b"0\r\n\r\n", "not valid JSON: '{oops'", 1),
        (head + chunk(b"data: [1]\n\n" + done) + b"0\r\n\r\n", "not a completion", 0),
        (head + chunk(event() + b'data: {"error": {"message": "a bug"}}\n\n'), "an error in the stream: a bug", 1),
        (head + chunk(event()) + b"0\r\n\r\n", r"without \[DONE\]", 1),
        (head + chunk(done) + b"0\r\n\r\n", "without a token", 0),
        (plain("200 OK", b"{}", "Content-Type: application/json"), "expected an event stream, got application/json", 0),
        (plain("400 Bad Request", b'{"error": {"message": "no"}}'), "HTTP 400: no$", 0),
        (plain("400 Bad Request", b'{"error": "no"}'), "HTTP 400: no$", 0),
        (plain("422 Unprocessable", b'{"detail": 1}'), 'HTTP 422: {"detail": 1}', 0),
        (
            plain("503 Service Unavailable", b"later", "Retry-After: Fri, 31 Dec 1999 23:59:59 GMT"),
            "HTTP 503: later",
            0,
        ),
    ]


def test_what_is_no_whole_answer_has_failed_and_the_others_go_on(fake):
    cases = broken(fake)

    async def answer(call):
        if call.number < len(cases):
            yield cases[call.number][0]
        else:
            yield fake.head + fake.chunk(fake.event() + fake.done) + b"0\r\n\r\n"

    with fake.run(answer) as server:
        run = send(server, together(len(cases) + 1, 1), max_in_flight=1)
    assert run.outcomes[-1].status == "ok"
    for outcome, (_, saying, num_tokens) in zip(run.outcomes, cases, strict=False):
        assert outcome.status == "failed"
        with pytest.raises(ValueError, match=saying):
            raise ValueError(outcome.detail)
        assert len(outcome.token_times) == num_tokens
        assert outcome.retry_after is None


def test_an_answer_that_takes_too_long_is_given_up(fake):
    async def answer(call):
        yield fake.head + fake.chunk(fake.event())
        await asyncio.sleep(30)

    with fake.run(answer) as server:
        run = send(server, together(2), timeout=0.15)
    assert [outcome.status for outcome in run.outcomes] == ["timed out"] * 2
    assert run.outcomes[0].detail == "no end after 0.15 s"
    assert run.seconds < 5


def test_a_run_that_is_stopped_keeps_what_came(fake):
    async def answer(call):
        yield fake.head + fake.chunk(fake.event())
        if call.number:
            await asyncio.sleep(30)
        yield fake.chunk(fake.done) + b"0\r\n\r\n"

    async def stop_early(run):
        task = asyncio.create_task(run.run())
        while sum(len(outcome.token_times) for outcome in run.outcomes) < 2 or run.num_in_flight > 1:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    arrivals = [Arrival(0, 0.0, 4, 1), Arrival(1, 0.05, 4, 1), Arrival(2, 60.0, 4, 1)]
    with fake.run(answer) as server:
        run = LoadRun(Endpoint.parse(server.url), make_requests(arrivals, model="fake"))
        asyncio.run(stop_early(run))
    assert [outcome.status for outcome in run.outcomes] == ["ok", "unfinished"]
    assert run.num_in_flight == 0
    assert 0 < run.seconds < 30


def test_nobody_there():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound, and does not listen
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        with pytest.raises(LoadClientError, match="no server at 127"):
            asyncio.run(reach(endpoint))
        run = LoadRun(endpoint, make_requests(together(2), model="fake"))
        asyncio.run(run.run())
    assert [outcome.status for outcome in run.outcomes] == ["failed"] * 2


def test_the_server_is_asked_for_its_model(fake):
    with fake.run() as server:
        endpoint = asyncio.run(reach(Endpoint.parse(server.url.replace("127.0.0.1", "localhost"))))
        assert endpoint.host == "localhost"
        assert endpoint.address == "127.0.0.1"
        assert asyncio.run(fetch_model(endpoint)) == ("fake", 512, "", {})
        server.models = b'{"data": [{"id": "gpt"}]}'
        assert asyncio.run(fetch_model(endpoint)) == ("gpt", None, "", {})
        server.models = b'{"data": [{"id": "gpt", "version": "0.3", "lab_files": {"minicache.cache.paged": "ab"}}]}'
        assert asyncio.run(fetch_model(endpoint)) == ("gpt", None, "0.3", {"minicache.cache.paged": "ab"})
        for models, saying in (
            (b'{"data": []}', "lists no model"),
            (b"[]", "lists no model"),
            (b"<html>", "/v1/models"),
        ):
            server.models = models
            with pytest.raises(LoadClientError, match=saying):
                asyncio.run(fetch_model(endpoint))


def test_urls():
    assert Endpoint.parse("http://a:80/x/v1") == Endpoint("a", 80, "/x/v1")
    assert Endpoint.parse("http://a/") == Endpoint("a", 80, "/v1")
    assert Endpoint.parse("https://a") == Endpoint("a", 443, "/v1", is_tls=True)
    assert b"Host: [::1]:8000\r\n" in Endpoint.parse("http://[::1]:8000").request("GET", "/models")
    for url in ("127.0.0.1:8000", "ftp://a", "http://", "http://a:b"):
        with pytest.raises(ValueError, match=r"not a server URL|[Pp]ort"):
            Endpoint.parse(url)
    with pytest.raises(ValueError, match="API key"):
        Endpoint.parse("http://a", api_key="a\r\nb: c")


def test_numbers_out_of_bounds(fake):
    endpoint = Endpoint("a", 1)
    with pytest.raises(ValueError, match="timeout"):
        LoadRun(endpoint, [], timeout=0)
    with pytest.raises(ValueError, match="max_in_flight"):
        LoadRun(endpoint, [], max_in_flight=0)
