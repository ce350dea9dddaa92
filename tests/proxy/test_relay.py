"""The proxy between clients and workers: what passes, who is asked, what happens when a worker dies in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from tests.proxy.conftest import (
    Answer,
    Asked,
    FakeWorker,
    begin_events,
    contents,
    events_for,
    generated,
    ids_of,
    proxied,
    respond,
    stream,
    text_in,
    text_of,
    write,
)

from minicache.fleet import create_router
from minicache.serving.proxy.metrics import Metrics
from minicache.serving.proxy.workers import Workers

PROMPT = "once"
BODY = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "temperature": 0, "stream": True}
WANTED = text_of(generated(ids_of(PROMPT), 6))


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20))

    return run


def refuse(status: int, *headers: str) -> Answer:
    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await respond(writer, status, b'{"error": {}}', "Content-Type: application/json", *headers)

    return answer


# What passes


@pytest.mark.parametrize("size", [3, 10**6])
@in_a_loop
async def test_a_stream_passes_byte_for_byte(size: int) -> None:
    """However the worker's bytes are cut into pieces."""
    worker = FakeWorker(stream(size=size))
    async with proxied(worker) as proxy:
        response = await proxy.post(BODY)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream"
    assert response.content == worker.sent
    assert text_in(contents(response.content)) == WANTED


@in_a_loop
async def test_an_event_passes_when_it_comes() -> None:
    """The second is not sent before the client has the first."""
    has_first = asyncio.Event()

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await begin_events(writer)
        first, *rest = events_for(asked)
        await write(worker, writer, first)
        await has_first.wait()
        await write(worker, writer, b"".join(rest))
        writer.write(b"0\r\n\r\n")

    async with proxied(FakeWorker(answer)) as proxy:
        opened = proxy.open(BODY)
        first = await opened.read()
        assert first.count(b"data:") == 1
        has_first.set()
        assert text_in(contents(first + await opened.read_all())) == WANTED


@in_a_loop
async def test_comments_and_line_ends_pass() -> None:
    sent = b': ping\r\n\r\ndata: {"choices": [{"text": "a"}]}\r\n\r\ndata: [DONE]\r\n\r\n'

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await begin_events(writer)
        await write(worker, writer, sent, 3)
        writer.write(b"0\r\n\r\n")

    async with proxied(FakeWorker(answer)) as proxy:
        assert (await proxy.post(BODY)).content == sent


@in_a_loop
async def test_headers_pass_but_for_those_of_one_connection() -> None:
    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await respond(writer, 200, b"{}", "Content-Type: application/json", "X-Of-Worker: 1", "Keep-Alive: timeout=5")

    worker = FakeWorker(answer)
    async with proxied(worker) as proxy:
        sent = {
            "Authorization": "Bearer k",
            "X-Request-Id": "me-1",
            "X-Mine": "2",
            "Connection": "x-secret, keep-alive",
        }
        response = await proxy.post({"prompt": "a"}, headers={**sent, "X-Secret": "3", "TE": "trailers"})
    got = worker.asked[0].headers
    assert (got["authorization"], got["x-request-id"], got["x-mine"]) == ("Bearer k", "me-1", "2")
    assert got["x-forwarded-for"] == "127.0.0.1"
    assert got["host"] == worker.url.removeprefix("http://")
    assert not {"x-secret", "te"} & set(got)
    assert response.headers.get_list("x-request-id") == ["me-1"]
    assert response.headers["x-of-worker"] == "1"
    assert "keep-alive" not in response.headers


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("X-Mine", " a\t ", 200),  # legal: the spaces are none of the value
        ("X-Mine", "a\x00b", 400),
        ("X(Mine", "a", 400),
        ("Cookie", "a" * 60_000, 431),
    ],
)
@in_a_loop
async def test_no_worker_is_to_blame_for_a_clients_headers(name: str, value: str, status: int) -> None:
    workers = FakeWorker(refuse(200)), FakeWorker(refuse(200))
    async with proxied(*workers) as proxy:
        responses = [await proxy.post({"prompt": "a"}, headers={name: value}) for _ in range(4)]
        assert [each["num_failed"] for each in json.loads(await proxy.proxy.picture())["workers"]] == [0, 0]
    assert [response.status_code for response in responses] == [status] * 4
    asked = [each.headers[name.lower()] for worker in workers for each in worker.asked]
    assert asked == (["a"] * 4 if status == 200 else [])


@in_a_loop
async def test_a_path_that_cannot_be_passed_on() -> None:
    worker = FakeWorker(refuse(200))
    async with proxied(worker) as proxy:
        opened = proxy.open(None, "/v1/models/" + "a" * 70_000)
        assert "cannot be passed on" in json.loads(await opened.read_all())["error"]["message"]
    assert not worker.asked


@in_a_loop
async def test_what_a_worker_refuses_about_the_request_is_its_word() -> None:
    """A 400 is an answer: no one else is asked."""
    workers = FakeWorker(refuse(400)), FakeWorker(refuse(400))
    async with proxied(*workers) as proxy:
        response = await proxy.post(BODY)
    assert (response.status_code, response.content) == (400, b'{"error": {}}')
    assert sum(len(each.asked) for each in workers) == 1


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"prompt": "a"}', "text/plain", 415),
    ],
)
@in_a_loop
async def test_what_is_no_request_is_refused_here(content: bytes, kind: str | None, status: int) -> None:
    worker = FakeWorker()
    async with proxied(worker) as proxy:
        headers = {"Content-Type": kind} if kind else {}
        response = await proxy.client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert not worker.asked


@in_a_loop
async def test_what_a_worker_has_besides_the_api_is_not_reached() -> None:
    worker = FakeWorker(refuse(200))
    async with proxied(worker) as proxy:
        for path in ("/v1/embeddings", "/v1/models/../../metrics", "/docs"):
            opened = proxy.open(None, path)
            assert json.loads(await opened.read_all())["error"]["message"] == "Not Found"
    assert not worker.asked


@in_a_loop
async def test_models_are_a_workers() -> None:
    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await respond(writer, 200, json.dumps({"path": asked.path}).encode(), "Content-Type: application/json")

    async with proxied(FakeWorker(answer)) as proxy:
        assert (await proxy.client.get("/v1/models")).json() == {"path": "/v1/models"}
        assert (await proxy.client.get("/v1/models/org/name?a=b")).json() == {"path": "/v1/models/org/name?a=b"}


# Death in the middle of a stream


@pytest.mark.parametrize("body", [BODY, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("dies_after", [0, 1, 2.5, 5, 6, 7])
@in_a_loop
async def test_a_stream_goes_on_elsewhere(body: dict[str, Any], dies_after: float) -> None:
    """The client's answer is the one that it would have got, in events of one answer, each token once."""
    body = body | {"stream_options": {"include_usage": True}, "return_token_ids": True}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    workers = FakeWorker(stream(dies_after=dies_after, name="first")), FakeWorker(stream(name="second"))
    async with proxied(*workers) as proxy:
        response = await proxy.post(body, path)
    events = contents(response.content)
    assert text_in(events) == WANTED
    assert len({(each["id"], each["object"]) for each in events}) == 1
    choices = [each["choices"][0] for each in events if each["choices"]]
    assert [token for each in choices for token in each.get("token_ids") or ()] == ids_of(WANTED)
    assert [each["finish_reason"] for each in choices if each.get("finish_reason")] == ["length"]
    assert sum("role" in each.get("delta", {}) for each in choices) == ("messages" in body)
    assert [each["usage"] for each in events if each.get("usage")] == [
        {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    ]


@in_a_loop
async def test_the_next_worker_continues_prompt_and_tokens() -> None:
    workers = FakeWorker(stream(dies_after=2)), FakeWorker()
    async with proxied(*workers) as proxy:
        response = await proxy.post(BODY | {"seed": 40, "temperature": 1.0, "logprobs": 0})
        metrics = (await proxy.client.get("/metrics")).text
    (asked,) = workers[1].asked
    assert asked.body["prompt"] == ids_of(PROMPT + WANTED[:2])
    assert (asked.body["max_tokens"], asked.body["seed"]) == (4, 42)
    offsets = [each["choices"][0]["logprobs"]["text_offset"] for each in contents(response.content)]
    assert offsets == [[number] for number in range(6)]
    assert "minicache:route_streams_continued_total 1.0" in metrics
    assert "minicache:route_requests_lost_total 0.0" in metrics


@in_a_loop
async def test_only_the_end_was_lost() -> None:
    """All tokens came: no one is asked again."""
    workers = FakeWorker(stream(dies_after=6)), FakeWorker()
    async with proxied(*workers) as proxy:
        assert text_in(contents((await proxy.post(BODY)).content)) == WANTED
    assert not workers[1].asked


@in_a_loop
async def test_a_stop_token_came_and_its_event_said_no_end() -> None:
    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await begin_events(writer)
        await write(worker, writer, b"".join(events_for(asked)[:3]))
        await asyncio.sleep(0.005)
        writer.transport.abort()

    workers = FakeWorker(answer), FakeWorker()
    async with proxied(*workers) as proxy:
        response = await proxy.post(BODY | {"stop_token_ids": [ord(WANTED[2])]})
    last = contents(response.content)[-1]["choices"][0]
    assert (last["text"], last["finish_reason"]) == ("", "stop")
    assert not workers[1].asked


@in_a_loop
async def test_several_deaths_and_then_an_error() -> None:
    """Three workers die of it: the client gets an error, the fourth lives on."""
    workers = [FakeWorker(stream(dies_after=1)) for _ in range(3)] + [FakeWorker()]
    async with proxied(*workers) as proxy:
        response = await proxy.post(BODY)
        assert (await proxy.client.get("/metrics")).text.count("minicache:route_requests_lost_total 1.0") == 1
    *events, error = contents(response.content)
    assert text_in(events) == WANTED[:3]
    assert error["error"]["code"] == "worker_died"
    assert not workers[3].asked


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"presence_penalty": 1.0}, {"response_format": {"type": "json_object"}}], ids=str
)
@in_a_loop
async def test_what_depends_on_more_than_its_tokens_is_not_continued(more: dict[str, Any]) -> None:
    """It ends with an error event, and not in silence."""
    workers = FakeWorker(stream(dies_after=2)), FakeWorker()
    async with proxied(*workers) as proxy:
        *_, error = contents((await proxy.post(BODY | more)).content)
    assert error["error"]["code"] == "worker_died"
    assert not workers[1].asked


@in_a_loop
async def test_without_token_ids_it_is_an_error_after_the_first_token_and_none_before() -> None:
    """Any OpenAI-compatible server: `return_token_ids` is not asked of it, and its deaths can only be reported."""
    for dies_after, is_lost in ((2, True), (0, False)):
        first = FakeWorker(stream(dies_after=dies_after, tells_ids=False), metrics="")
        second = FakeWorker(stream(tells_ids=False), metrics="")
        async with proxied(first, second) as proxy:
            *_, last = contents((await proxy.post(BODY)).content)
        assert ("error" in last) == is_lost
        assert first.asked[0].body == BODY


@pytest.mark.parametrize(
    "junk",
    [b"data: {\n\n", b"data: [1]\n\n", b'data: {"choices": {"a": 1}}\n\n', b'data: {"choices": [3]}\n\n', b"x\n\n"],
)
@in_a_loop
async def test_what_is_no_event_of_the_api_passes(junk: bytes) -> None:
    """It is between worker and client, and does not keep the stream from going on elsewhere."""

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await begin_events(writer)
        await write(worker, writer, junk + events_for(asked)[0])
        await asyncio.sleep(0.005)
        writer.transport.abort()

    async with proxied(FakeWorker(answer), FakeWorker()) as proxy:
        content = (await proxy.post(BODY)).content
    assert content.startswith(junk)
    assert text_in(contents(content.removeprefix(junk))) == WANTED


@in_a_loop
async def test_text_that_is_held_back_comes_once() -> None:
    """The worker has shown half of a token's text: the event is held here, and comes anew from the next worker."""

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        first, second, *_ = events_for(asked)
        await begin_events(writer)
        held = json.loads(second[6:])
        held["choices"][0]["token_ids"] = []
        await write(worker, writer, first + b"data: " + json.dumps(held).encode() + b"\n\n")
        await asyncio.sleep(0.005)
        writer.transport.abort()

    async with proxied(FakeWorker(answer), FakeWorker()) as proxy:
        response = await proxy.post(BODY | {"stop": ["zzz"]})
    assert text_in(contents(response.content)) == WANTED


@in_a_loop
async def test_half_a_letter_of_vllm_comes_once() -> None:
    """vLLM tells a token's id at once, and its text when it is a letter. Until then the event is held here."""

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        first, second, *_ = events_for(asked)
        await begin_events(writer)
        held = json.loads(second[6:])
        held["choices"][0]["text"] = ""
        await write(worker, writer, first + b"data: " + json.dumps(held).encode() + b"\n\n")
        await asyncio.sleep(0.005)
        writer.transport.abort()

    vllm = "vllm:num_requests_running 0\n"
    async with proxied(FakeWorker(answer, metrics=vllm), FakeWorker(metrics=vllm)) as proxy:
        events = contents((await proxy.post(BODY)).content)
        assert text_in(events) == WANTED
        assert [each["choices"][0]["token_ids"] for each in events] == [[token] for token in ids_of(WANTED)]
    async with proxied(FakeWorker(answer, metrics=vllm), FakeWorker(metrics=vllm)) as proxy:
        *_, last = contents((await proxy.post(BODY | {"stop": ["zzz"]})).content)
        assert last["error"]["code"] == "worker_died"  # how much of the text it holds back is not known


@in_a_loop
async def test_a_worker_whose_engine_has_died_says_so() -> None:
    """An error event is a failure of the attempt; if no one can go on, it is the client's."""

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await begin_events(writer)
        error = b'data: {"error": {"message": "gone", "code": "engine_died"}}\n\ndata: [DONE]\n\n'
        await write(worker, writer, b"".join(events_for(asked)[:2]) + error)
        writer.write(b"0\r\n\r\n")

    async with proxied(FakeWorker(answer), FakeWorker()) as proxy:
        assert text_in(contents((await proxy.post(BODY)).content)) == WANTED
    async with proxied(FakeWorker(answer), FakeWorker()) as proxy:
        assert contents((await proxy.post(BODY | {"n": 2})).content)[-1]["error"]["code"] == "engine_died"


@in_a_loop
async def test_a_stream_that_just_ends_has_not_ended() -> None:
    """Its last chunk came, and no [DONE]."""

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await begin_events(writer)
        await write(worker, writer, b"".join(events_for(asked)[:3]))
        writer.write(b"0\r\n\r\n")

    async with proxied(FakeWorker(answer), FakeWorker()) as proxy:
        assert text_in(contents((await proxy.post(BODY)).content)) == WANTED


@in_a_loop
async def test_an_answer_in_one_body_is_asked_again() -> None:
    workers = FakeWorker(stream(dies_after=1)), FakeWorker()
    async with proxied(*workers) as proxy:
        response = await proxy.post(BODY | {"stream": False})
    assert response.json()["choices"][0]["text"] == WANTED
    assert workers[1].asked[0].body == BODY | {"stream": False}


@in_a_loop
async def test_a_request_that_kills_its_engine_is_sent_three_times_at_most() -> None:
    """In one body too, where it is a 503: but one that has begun."""

    async def die(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        body = {"error": {"message": "it was killed", "code": "engine_died"}}
        await respond(writer, 503, json.dumps(body).encode(), "Content-Type: application/json")

    workers = [FakeWorker(die) for _ in range(5)]
    async with proxied(*workers) as proxy:
        response = await proxy.post(BODY | {"stream": False})
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_died")
    assert sum(len(each.asked) for each in workers) == 3


# Who is asked


@pytest.mark.parametrize("status", [429, 503])
@in_a_loop
async def test_a_worker_that_is_full_or_stopping_is_passed_over(status: int) -> None:
    async with proxied(FakeWorker(refuse(status)), FakeWorker()) as proxy:
        assert text_in(contents((await proxy.post(BODY)).content)) == WANTED


@in_a_loop
async def test_all_are_full() -> None:
    workers = [FakeWorker(refuse(429, "Retry-After: 7")) for _ in range(2)]
    async with proxied(*workers) as proxy:
        response = await proxy.post(BODY)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert response.json()["error"]["code"] == "queue_full"
    assert [len(each.asked) for each in workers] == [1, 1]


@in_a_loop
async def test_a_worker_gets_so_many_at_a_time() -> None:
    """The limit is the router's own: a 429 without asking; and the slot is free when the answer has ended."""
    goes_on = asyncio.Event()
    plain = stream()

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await goes_on.wait()
        await plain(worker, asked, writer)

    worker = FakeWorker(answer)
    async with proxied(worker, max_unfinished=1) as proxy:
        first = asyncio.create_task(proxy.post(BODY))
        await proxy.until(lambda: worker.asked, "the first is asked")
        refused = await proxy.post(BODY)
        goes_on.set()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert text_in(contents((await first).content)) == WANTED
        assert (await proxy.post(BODY)).status_code == 200


@in_a_loop
async def test_a_clients_crowd_does_not_go_before_anothers_request() -> None:
    worker = FakeWorker()
    async with proxied(worker) as proxy:
        wishes = [proxy.post(BODY, headers={"Authorization": f"Bearer {key}"}) for key in ["many"] * 40 + ["one"]]
        answers = await asyncio.gather(*wishes)
        assert {each.status_code for each in answers} == {200}
        keys = [each.headers["authorization"] for each in worker.asked]
        assert keys.index("Bearer one") < 20


@in_a_loop
async def test_a_worker_that_is_not_there() -> None:
    """It is found out by the first request, and gets none until it is back; the others serve."""
    gone, there = FakeWorker(), FakeWorker()
    async with proxied(gone, there) as proxy:
        await gone.stop()
        for _ in range(4):
            assert text_in(contents((await proxy.post(BODY)).content)) == WANTED
        await proxy.until(lambda: len(proxy.workers.membership.views()) == 1, "one is out")
        await gone.start(int(gone.url.rpartition(":")[2]))
        await proxy.until(lambda: len(proxy.workers.membership.views()) == 2, "it is back")
        num_before = len(gone.asked)
        await proxy.post(BODY)
        await proxy.post(BODY)
        assert len(gone.asked) == num_before + 1


@in_a_loop
async def test_a_router_that_chooses_what_it_was_not_shown_is_not_asked_for_ever() -> None:
    """A learner's: it always names the first worker, also when that one has refused."""
    full, free = FakeWorker(refuse(429)), FakeWorker()
    async with proxied(full, free) as proxy:
        proxy.workers.router.choose = lambda request, replicas: full.url  # type: ignore[method-assign]
        response = await proxy.post(BODY)
    assert (response.status_code, len(full.asked), len(free.asked)) == (429, 1, 0)


@in_a_loop
async def test_a_membership_that_finds_everybody_healthy_holds_nothing_up() -> None:
    """A learner's: a worker that is gone stays among the choices, and the other one serves."""
    gone, there = FakeWorker(), FakeWorker()
    async with proxied(gone, there) as proxy:
        proxy.workers.membership.on_failed = lambda probe: None  # type: ignore[method-assign]
        await gone.stop()
        for _ in range(3):
            assert text_in(contents((await proxy.post(BODY)).content)) == WANTED


@in_a_loop
async def test_nobody_is_there() -> None:
    worker = FakeWorker()
    async with proxied(worker) as proxy:
        assert (await proxy.client.get("/health")).status_code == 200
        await worker.stop()
        assert (await proxy.post(BODY)).status_code == 503
        response = await proxy.post(BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
        assert (await proxy.client.get("/health")).status_code == 503


@in_a_loop
async def test_a_machine_that_says_nothing_any_more() -> None:
    """Its connections are open and dead. Probes time out, and its streams go on elsewhere, begun or not."""
    hangs = asyncio.Event()

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if len(worker.asked) == 1:
            await begin_events(writer)
            await write(worker, writer, events_for(asked)[0])
        worker.is_silent = len(worker.asked) == 2
        await hangs.wait()

    workers = FakeWorker(answer), FakeWorker()
    async with proxied(*workers, check_timeout=0.4) as proxy:
        responses = await asyncio.gather(proxy.post(BODY), proxy.post(BODY), proxy.post(BODY))
    assert [text_in(contents(each.content)) for each in responses] == [WANTED] * 3
    assert len(workers[0].asked) == 2


@in_a_loop
async def test_a_worker_that_drains_keeps_its_streams() -> None:
    """Its /health says 503: nothing new is sent to it, and what it has is left to it."""
    goes_on = asyncio.Event()

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        events = events_for(asked)
        await begin_events(writer)
        await write(worker, writer, events[0])
        await goes_on.wait()
        await write(worker, writer, b"".join(events[1:]))
        writer.write(b"0\r\n\r\n")

    draining, other = FakeWorker(answer), FakeWorker()
    async with proxied(draining, other) as proxy:
        first = asyncio.create_task(proxy.post(BODY))
        await proxy.until(lambda: draining.asked, "it has begun")
        draining.health = 503
        await proxy.until(lambda: len(proxy.workers.membership.views()) == 1, "it is out")
        await proxy.post(BODY)
        await proxy.post(BODY)
        goes_on.set()
        assert (await first).content == draining.sent
    assert (len(draining.asked), len(other.asked)) == (1, 2)


@in_a_loop
async def test_a_prompt_goes_where_it_has_been() -> None:
    """By its beginning, as text, as token ids, and as a chat; with another salt it is another."""
    texts = [letter * 64 for letter in "abcd"]
    for make in (
        lambda text: {"prompt": text + " own"},
        lambda text: {"prompt": [*map(ord, text), 1, 2]},
        lambda text: {"messages": [{"role": "user", "content": text}]},
        lambda text: {"prompt": "same" * 16, "cache_salt": text},
    ):
        workers = FakeWorker(), FakeWorker()
        path = "/v1/chat/completions" if "messages" in make("a") else "/v1/completions"
        async with proxied(*workers, policy="prefix_affinity") as proxy:
            for _ in range(3):
                for text in texts:
                    await proxy.post(make(text) | {"stream": True, "max_tokens": 1}, path)
        seen = [{json.dumps(each.body, sort_keys=True) for each in worker.asked} for worker in workers]
        assert not seen[0] & seen[1]
        assert [len(worker.asked) for worker in workers] == [6, 6]


# Clients that leave or do not read, and the end


@pytest.mark.parametrize("has_begun", [True, False])
@in_a_loop
async def test_a_client_leaves_and_its_worker_is_told(has_begun: bool) -> None:
    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if has_begun:
            await begin_events(writer)
            await write(worker, writer, events_for(asked)[0])
        await asked.has_left.wait()

    worker = FakeWorker(answer)
    async with proxied(worker, FakeWorker()) as proxy:
        opened = proxy.open(BODY)
        await proxy.until(lambda: worker.asked, "it is asked")
        if has_begun:
            await opened.read()
        await opened.leave()
        await asyncio.wait_for(worker.asked[0].has_left.wait(), 2)
        (member, other) = proxy.workers.membership.members.values()
        await proxy.until(lambda: not member.attempts and not other.attempts, "nothing counts as unfinished")


@in_a_loop
async def test_a_client_that_does_not_read_stops_its_worker() -> None:
    """The proxy does not read on for it: 64 MiB do not gather here."""
    piece = b"data: " + b"x" * 2**16 + b"\n\n"
    num_written = 0

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal num_written
        await begin_events(writer)
        for _ in range(1024):
            await write(worker, writer, piece)
            num_written += 1

    async with proxied(FakeWorker(answer)) as proxy:
        opened = proxy.open(BODY)
        await opened.read()
        before = -1
        while num_written != before:
            before = num_written
            await asyncio.sleep(0.05)
        assert num_written < 512
        await opened.leave()


@in_a_loop
async def test_it_stops_while_a_worker_is_to_be_probed_before_its_time() -> None:
    worker = FakeWorker()
    await worker.start()
    workers = Workers([worker.url], create_router("round_robin"), Metrics([worker.url]), max_unfinished=1)
    await workers.start()
    await workers.ready()
    await asyncio.sleep(0.01)
    workers.has_failed(workers.workers[worker.url])
    await asyncio.sleep(0)
    try:
        await asyncio.wait_for(workers.stop(), 5)
    finally:
        await worker.stop()


@in_a_loop
async def test_it_drains() -> None:
    """SIGTERM: what is under way ends as it should, and the server with it."""
    goes_on = asyncio.Event()
    plain = stream()

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await goes_on.wait()
        await plain(worker, asked, writer)

    worker = FakeWorker(answer)
    async with proxied(worker) as proxy:
        asking = asyncio.create_task(proxy.post(BODY))
        await proxy.until(lambda: worker.asked, "it is asked")
        proxy.proxy.stop()
        refused = await proxy.post(BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        assert (await proxy.client.get("/health")).status_code == 503
        assert not await proxy.proxy.drain(0.01)
        draining = asyncio.create_task(proxy.proxy.drain(5))
        goes_on.set()
        assert (await asking).content == worker.sent
        assert await draining


# What it says of itself


@in_a_loop
async def test_a_worker_whose_number_is_none_is_watched_nevertheless() -> None:
    """A gauge may be NaN: that is no count of requests, and no reason to stop probing the worker."""
    worker = FakeWorker(metrics="vllm:num_requests_running NaN\nvllm:num_requests_waiting 2\n")
    async with proxied(worker) as proxy:
        assert text_in(contents((await proxy.post(BODY)).content)) == WANTED
        live = proxy.open(None, "/live")
        picture = json.loads((await live.read()).removeprefix(b"data: "))
        await live.leave()
        (shown,) = picture["workers"]
        assert (shown["is_healthy"], shown["num_unfinished"]) == (True, 0)


@in_a_loop
async def test_metrics_of_a_worker_that_asks_for_a_key() -> None:
    """Without the key it serves as well, but nothing is known of it."""
    worker = FakeWorker()
    worker.metrics_key = "k"
    for key, kind in ((None, "other"), ("k", "minicache")):
        async with proxied(worker, metrics_key=key) as proxy:
            (shown,) = json.loads(await proxy.proxy.picture())["workers"]
            assert (shown["is_healthy"], shown["kind"]) == (True, kind)
        worker.url = ""


@in_a_loop
async def test_metrics_and_the_page() -> None:
    numbers = 'minicache:a 1\nvllm:num_requests_running{engine="0"} 1\nvllm:num_requests_waiting{engine="0"} 2\n'
    numbers += 'vllm:prefix_cache_queries_total{engine="0"} 8\nvllm:prefix_cache_hits_total{engine="0"} 6\n'
    worker = FakeWorker(metrics=numbers)
    async with proxied(worker) as proxy:
        await proxy.post(BODY)
        metrics = (await proxy.client.get("/metrics")).text
        assert f'minicache:route_responses_total{{status="200",worker="{worker.url}"}} 1.0' in metrics
        assert f'minicache:route_worker_prefix_cache_hit_rate{{worker="{worker.url}"}} 0.75' in metrics
        live = proxy.open(None, "/live")
        picture = json.loads((await live.read()).removeprefix(b"data: "))
        await live.leave()
        (shown,) = picture["workers"]
        assert (shown["kind"], shown["hit_rate"], shown["num_answered"]) == ("minicache", 0.75, 1)
        assert shown["num_unfinished"] == 3  # of other clients
        for path in ("/", "/static/route.js", "/static/route.css", "/static/live.css"):
            response = await proxy.client.get(path)
            assert (response.status_code, "default-src 'none'" in response.headers["content-security-policy"]) == (
                200,
                True,
            )
