"""What no one should send, and how no one should leave: the server refuses it, lives, and gives everything back."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minicache.engine.sampling import SamplingParams
from minicache.engine.stopping import TextStream
from minicache.grammar import Tokenizer

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
LAST_CHUNK = b"0\r\n\r\n"


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Iterator[Any]:
    """One server for all tests that leave it as it was."""
    with serve_for_module(max_body_nbytes=2**17) as running:
        yield running


def reset(connection: socket.socket) -> None:
    """Leave as rudely as one can: RST, and nothing else."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def read_until(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        piece = connection.recv(65536)
        assert piece, f"the connection ended without {end!r}: {received[-300:]!r}"
        received += piece
    return received


def post(body: bytes, *headers: bytes) -> bytes:
    """A request as bytes."""
    return HEAD + b"".join(header + b"\r\n" for header in headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def streaming(**fields: Any) -> bytes:
    fields = {"prompt": "Yesterday I", "stream": True, "ignore_eos": True, "max_tokens": 400, **fields}
    return post(json.dumps(fields).encode())


# Bodies


BODIES = {
    "nothing": b"",
    "half a JSON": b'{"prompt": "I',
    "null": b"null",
    "a list": b'["I"]',
    "a number": b"1",
    "half a letter": b'{"prompt": "\\ud800"}',
    "bytes that are no UTF-8": b'{"prompt": "\xff\xfe"}',
    "a zero byte": b'{"prompt": "\\u0000"}',
    "NaN": b'{"prompt": "I", "temperature": NaN}',
    "infinite": b'{"prompt": "I", "temperature": Infinity}',
    "a penalty of NaN": b'{"prompt": "I", "presence_penalty": NaN}',
    "1e999": b'{"prompt": "I", "top_p": 1e999}',
    "top_p 0": b'{"prompt": "I", "top_p": 0}',
    "400 digits": b'{"prompt": "I", "max_tokens": ' + b"9" * 400 + b"}",
    "5000 digits": b'{"prompt": "I", "max_tokens": ' + b"9" * 5000 + b"}",
    "a seed beyond 64 bits": b'{"prompt": "I", "seed": 18446744073709551616}',
    "max_tokens 0": b'{"prompt": "I", "max_tokens": 0}',
    "max_tokens true": b'{"prompt": "I", "max_tokens": true}',
    "max_tokens 1.5": b'{"prompt": "I", "max_tokens": 1.5}',
    "max_tokens as a text": b'{"prompt": "I", "max_tokens": "3"}',
    "deeply nested": b'{"prompt": ' + b"[" * 100_000,
    "deeply nested and ended": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deeply nested where no one looks": b'{"prompt": "I", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "no prompt": b"{}",
    "a prompt of nothing": b'{"prompt": ""}',
    "no tokens": b'{"prompt": []}',
    "no prompts": b'{"prompt": [[]]}',
    "a prompt of null": b'{"prompt": null}',
    "texts and ids mixed": b'{"prompt": ["I", [1]]}',
    "a token that there is not": b'{"prompt": [1, 2147483647]}',
    "a token beyond": b'{"prompt": [1, 99999999999999999999]}',
    "a negative token": b'{"prompt": [1, -1]}',
    "true as a token": b'{"prompt": [true]}',
    "too many arrays": b'{"prompt": "I", "x": [' + b"[]," * 2**14 + b"0]}",
    "top_k beyond": b'{"prompt": "I", "top_k": 99999999999999999999999999}',
    "too long": b'{"prompt": [' + b",".join([b"1"] * 512) + b"]}",
    "a word that no one knows": b'{"prompt": "Quetzalcoatl"}',
    "an empty stop": b'{"prompt": "I", "stop": ""}',
    "many stops": b'{"prompt": "I", "stop": ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", '
    b'"o", "p", "q"]}',
    "n 0": b'{"prompt": "I", "n": 0}',
    "n 1000": b'{"prompt": "I", "n": 1000}',
    "another model": b'{"prompt": "I", "model": "gpt-4o"}',
    "stream as a text": b'{"prompt": "I", "stream": "yes"}',
    "stream_options as a list": b'{"prompt": "I", "stream": true, "stream_options": []}',
    "logprobs 21": b'{"prompt": "I", "logprobs": 21}',
    "best_of": b'{"prompt": "I", "best_of": 3}',
    "echo": b'{"prompt": "I", "echo": true}',
    "logit_bias": b'{"prompt": "I", "logit_bias": {"5": 1}}',
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_cannot_be_served_is_refused_in_openais_shape(server: Any, name: str) -> None:
    answer = server.ask("POST", "/v1/completions", BODIES[name])
    assert answer.status in ((404,) if name == "another model" else (400,))
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["message"]
    assert len(answer.body) < 1000


CHATS = {
    "no messages": b'{"messages": []}',
    "a message without a role": b'{"messages": [{"content": "I"}]}',
    "a role that there is not": b'{"messages": [{"role": "king", "content": "I"}]}',
    "nothing said": b'{"messages": [{"role": "user"}]}',
    "a picture": b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
    "a tool": b'{"messages": [{"role": "user", "content": "I"}], "tools": [{"type": "function"}]}',
    "no schema": b'{"messages": [{"role": "user", "content": "I"}], "response_format": {"type": "json_schema"}}',
    "top_logprobs alone": b'{"messages": [{"role": "user", "content": "I"}], "top_logprobs": 2}',
    "half a letter": b'{"messages": [{"role": "user", "content": "\\udc00"}]}',
}


@pytest.mark.parametrize("name", CHATS)
def test_a_conversation_that_cannot_be_served_is_refused(server: Any, name: str) -> None:
    answer = server.ask("POST", "/v1/chat/completions", CHATS[name])
    assert answer.status == 400
    assert answer.json["error"]["message"]


MANY_MISTAKES = {
    "tokens": b'{"prompt": [' + b",".join([b"-1"] * 40_000) + b"]}",
    "prompts": b'{"prompt": [' + b",".join([b"[]"] * 40_000) + b"]}",
    "stops": b'{"prompt": "I", "stop": [' + b",".join([b"1"] * 60_000) + b"]}",
    "stop tokens": b'{"prompt": "I", "stop_token_ids": [' + b",".join([b"-1"] * 40_000) + b"]}",
}


@pytest.mark.parametrize("name", MANY_MISTAKES)
def test_of_ten_thousands_of_mistakes_one_is_told(name: str) -> None:
    """Pydantic reports all that it finds. Of a body of megabytes that were minutes, in the event loop."""
    from pydantic import ValidationError

    from minicache.serving.http.protocol import CompletionRequest

    with pytest.raises(ValidationError) as error:
        CompletionRequest.model_validate(json.loads(MANY_MISTAKES[name]))
    assert error.value.error_count() <= 8


def test_a_mistake_in_a_list_is_told_with_its_place(server: Any) -> None:
    error = server.ask("POST", "/v1/completions", b'{"prompt": [1, 2, -7]}').json["error"]
    assert error["param"] == "prompt"
    assert error["message"] == "prompt.2: Input should be greater than or equal to 0"
    error = server.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": 1}]}]}).json
    assert error["error"]["message"].startswith("messages.0.content.0.type: ")
    error = server.ask("POST", "/v1/completions", {"prompt": "I", "stop": ["a"] * 17}).json
    assert error["error"]["message"].startswith("stop: at most 16")


def test_a_long_word_is_not_sent_back(server: Any) -> None:
    answer = server.ask("POST", "/v1/completions", {"prompt": "a" * 50_000})
    assert answer.status == 400
    assert len(answer.body) < 2_000


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_of_another_type_is_refused(server: Any, kind: str) -> None:
    """A web page can have a browser send these to 127.0.0.1 without asking; it cannot send application/json."""
    answer = server.ask("POST", "/v1/completions", b'{"prompt": "I", "max_tokens": 1}', {"Content-Type": kind})
    assert answer.status == 415
    assert answer.json["error"]["code"] == "unsupported_media_type"
    message = answer.json["error"]["message"]
    assert message.startswith(
        "the body must be JSON in UTF-8, sent with the header Content-Type: application/json; it is"
    )


@pytest.mark.parametrize("charset", ["latin-1", "utf-16", '"x'])
def test_a_body_in_another_charset_is_refused(server: Any, charset: str) -> None:
    kind = f"application/json; charset={charset}"
    answer = server.ask("POST", "/v1/completions", b'{"prompt": "I", "max_tokens": 1}', {"Content-Type": kind})
    assert (answer.status, answer.json["error"]["code"]) == (415, "unsupported_media_type")
    assert kind.replace('"', "") in answer.json["error"]["message"].replace('"', "")


@pytest.mark.parametrize("kind", ["application/json; charset=UTF-8", 'Application/JSON;charset="utf-8"'])
def test_json_is_read_however_it_is_written(server: Any, kind: str) -> None:
    answer = server.ask("POST", "/v1/completions", b'{"prompt": "I", "max_tokens": 1}', {"Content-Type": kind})
    assert answer.status == 200


def test_a_body_without_a_type_is_refused_in_one_sentence(server: Any) -> None:
    body = b'{"prompt": "I", "max_tokens": 1}'
    with server.connect() as connection:
        head = HEAD.replace(b"Content-Type: application/json\r\n", b"Connection: close\r\n")
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 415 ")
    assert b"Content-Type: application/json; it is missing" in answer


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/models/minigpt", "/static/live.js"])
def test_head_is_get_without_a_body(server: Any, path: str) -> None:
    with server.connect() as connection:
        connection.sendall(b"HEAD %b HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n" % path.encode())
        head = b"".join(iter(lambda: connection.recv(65536), b""))
    assert head.startswith(b"HTTP/1.1 200 ")
    assert head.endswith(b"\r\n\r\n")
    assert b"content-type: " + server.ask("GET", path).headers["content-type"].encode() in head


@pytest.mark.parametrize(("method", "path", "status"), [("PUT", "/v1/models", 405), ("GET", "/v1/completions", 405)])
def test_a_method_or_path_that_is_none(server: Any, method: str, path: str, status: int) -> None:
    answer = server.ask(method, path)
    assert answer.status == status
    assert answer.headers["allow"]
    assert answer.json["error"].keys() == {"message", "type", "param", "code"}


# Sizes


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(server: Any) -> None:
    with server.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 99999999999\r\n\r\n")
        head = read_until(connection, b"body_too_large")
    assert head.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_say_so_is_refused_when_it_has_become_too_large(server: Any) -> None:
    with server.connect() as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"8000\r\n" + b" " * 2**15 + b"\r\n"
        for _ in range(5):
            connection.sendall(chunk)
        head = read_until(connection, b"body_too_large")
    assert head.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("length", [b"-1", b"abc", b"1e3", b"9" * 5000, b"1\r\nContent-Length: 2"])
def test_a_length_that_is_none_is_refused(server: Any, length: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: " + length + b"\r\nConnection: close\r\n\r\n{}")
        assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\nx: y\r\n"])
def test_a_head_without_an_end_is_refused(server: Any, start: bytes) -> None:
    """httptools keeps what it gets: 63 MiB of headers took 600 MiB."""
    line = b"a" * 1000 if start[-1:] in b"/ " else b"a: " + b"b" * 995 + b"\r\n"
    with server.connect() as connection:
        connection.sendall(start)
        with pytest.raises(ConnectionError):
            connection.sendall(line * 2**16)
    assert server.ask("GET", "/health").status == 200


def test_half_a_body_does_not_hold_up_the_end(serve: Any) -> None:
    server = serve(drain_seconds=50.0)
    with server.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        server.wait_until(lambda: server.served.reading)
        server.stop()
        assert b"503 Service Unavailable" in read_all(connection)


def test_a_body_that_does_not_come_is_not_waited_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicache.serving.http.bodies.BODY_SECONDS", 0.1)
    server = serve()
    with server.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert b"408 Request Timeout" in read_until(connection, b"within")


@pytest.mark.parametrize(
    "start",
    [b"", HEAD[:30], HEAD, b"\r\n", b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n" + HEAD[:30]],
    ids=["nothing", "half a line", "no empty line", "an empty line", "half a head behind a request"],
)
def test_a_head_that_does_not_come_is_not_waited_for(serve: Any, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr("minicache.serving.http.connections.HEAD_SECONDS", 0.1)
    server = serve()
    with server.connect() as connection:
        connection.sendall(start)
        assert b" 40" not in read_all(connection)
    server.wait_until(lambda: not server.server.server_state.connections)


def test_empty_lines_between_requests_do_not_keep_a_connection(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicache.serving.http.connections.HEAD_SECONDS", 0.1)
    server = serve()
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
        read_until(connection, b"ok")
        connection.sendall(b"\r\n")
        read_all(connection)


def test_half_a_head_behind_a_stream_does_not_end_the_stream(
    serve: Any, model: Any, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minicache.serving.http.connections.HEAD_SECONDS", 0.05)
    server = serve()
    model.before = lambda token_ids: gate.wait(60)
    with server.connect() as connection:
        connection.sendall(streaming(max_tokens=5) + HEAD[:30])
        server.wait_until(lambda: server.engine.num_unfinished == 1)
        threading.Timer(0.3, gate.set).start()
        assert read_all(connection).count(b"[DONE]") == 1


def test_after_a_refusal_the_connection_is_used_again(server: Any) -> None:
    connection = server.open()
    for body, status in ((b"{", 400), (b" " * 2**18, 413), (b'{"prompt": "Quetzalcoatl"}', 400), (b"{}", 400)) * 2:
        answer = server.exchange(connection, "POST", "/v1/completions", body)
        assert answer.status == status
    connection.close()
    connection.connect()
    for body in (b"{", b'{"prompt": "Quetzalcoatl"}', b"{}"):
        assert server.exchange(connection, "POST", "/v1/completions", body).status == 400
        good = server.exchange(connection, "POST", "/v1/completions", {"prompt": "I", "max_tokens": 1})
        assert good.status == 200
    connection.close()


# Large prompts


class Watched:
    """MiniGPT's tokenizer; notes which threads have it encode, and waits in it for an event."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer()
        self.threads: list[threading.Thread] = []
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        assert self.gate.wait(60)
        return self._tokenizer.encode(text)


class WithTemplate(Watched):
    """The same with a chat template, which is what encodes."""

    def apply_chat_template(self, messages: Any) -> list[int]:
        return self.encode(" ".join(each["content"] for each in messages))


CHAT = "/v1/chat/completions"


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts], "temperature": 0, **fields}


@pytest.mark.parametrize("new_tokenizer", [Watched, WithTemplate], ids=["without a template", "with a template"])
def test_texts_are_tokenized_neither_in_the_event_loop_nor_in_the_engine(serve: Any, new_tokenizer: Any) -> None:
    tokenizer = new_tokenizer()
    server = serve(tokenizer=tokenizer)
    assert server.complete("Yesterday I", max_tokens=1).status == 200
    assert server.ask("POST", CHAT, chat("Yesterday I", max_tokens=1)).status == 200
    assert len(tokenizer.threads) == 2
    assert server.thread not in tokenizer.threads
    assert not {"minicache-engine", "engine under test"} & {each.name for each in tokenizer.threads}


def test_while_a_text_is_tokenized_the_server_answers_and_steps_go_on(serve: Any) -> None:
    tokenizer = Watched()
    server = serve(tokenizer=tokenizer)
    tokenizer.gate.clear()
    try:
        with server.connect() as connection:
            connection.sendall(streaming(prompt="She", max_tokens=2))
            server.wait_until(lambda: tokenizer.threads)
            assert server.ask("GET", "/health").status == 200
            assert server.engine.num_unfinished == 0  # it takes no admission slot before it has its tokens
            tokenizer.gate.set()
            read_until(connection, b"[DONE]")
    finally:
        tokenizer.gate.set()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "I " * 2**19}, "prompt"),
        ("/v1/completions", {"prompt": ["I", "I " * 2**19]}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 2**19}, "prompt"),
        (CHAT, chat(*["I " * 2**19] * 3), "messages"),
        (CHAT, chat(*["I have not seen it."] * 4000), "messages"),
    ],
    ids=["a text", "one of two texts", "token ids", "a chat", "a chat of many messages"],
)
@pytest.mark.parametrize("new_tokenizer", [Watched, WithTemplate])
def test_what_can_never_fit_is_refused_before_it_is_tokenized(
    serve: Any, path: str, body: Any, param: str, new_tokenizer: Any
) -> None:
    server = serve(tokenizer=new_tokenizer(), max_body_nbytes=2**22)
    answer = server.ask("POST", path, body)
    assert answer.status == 400
    assert answer.json["error"]["code"] == "context_length_exceeded"
    assert answer.json["error"]["param"] == param
    assert not server.tokenizer.threads


def test_a_chat_that_is_too_long_by_its_tokens_names_its_messages(serve: Any) -> None:
    error = serve().ask("POST", CHAT, chat("I " * 600)).json["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "600 tokens" in error["message"]


def test_a_request_that_finds_no_slot_is_not_tokenized(serve: Any, model: Any, gate: threading.Event) -> None:
    tokenizer = Watched()
    server = serve(max_num_seqs=1, max_waiting=0, tokenizer=tokenizer)
    model.before = lambda token_ids: gate.wait(60)
    with server.connect() as connection:
        connection.sendall(streaming(prompt=[5, 6], max_tokens=1))
        server.wait_until(lambda: server.engine.num_unfinished)
        assert server.complete("Yesterday I").status == 429
        assert not tokenizer.threads
        gate.set()
        read_until(connection, b"[DONE]")


# Methods and paths


def test_other_methods_are_refused_and_harm_nothing(server: Any) -> None:
    for path, method in (("/v1/completions", "GET"), ("/health", "POST"), ("/v1/models", "DELETE"), ("/", "PUT")):
        answer = server.ask(method, path)
        assert answer.status == 405
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert answer.headers["allow"]
    for method in ("HEAD", "OPTIONS", "TRACE", "PATCH"):
        assert server.ask(method, "/v1/completions").status == 405
    assert server.ask("GET", "/nothing/here").status == 404
    assert server.ask("GET", "/v1/models/%ff%00").status == 404


def test_requests_that_are_no_http_are_refused(server: Any) -> None:
    for nonsense in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 3 + b"x\x00y\r\n\r\n"):
        with server.connect() as connection:
            connection.sendall(nonsense)
            assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    assert server.ask("GET", "/health").status == 200


def test_several_requests_sent_at_once_are_answered_in_their_order(server: Any) -> None:
    bodies = [json.dumps({"prompt": "I", "max_tokens": count}).encode() for count in (3, 1, 2)]
    with server.connect() as connection:
        connection.sendall(b"".join(map(post, bodies[:2])) + post(bodies[2], b"Connection: close"))
        received = read_all(connection)
    assert re.findall(rb'"completion_tokens": (\d+)', received) == [b"3", b"1", b"2"]


# Who leaves


def test_who_leaves_at_any_moment_takes_nothing_along(server: Any) -> None:
    """Before the body is there, after it, after the head, in the middle of an event: each with a RST and with a FIN."""
    request = streaming(n=2)
    whole = post(json.dumps({"prompt": ["I", "She"], "n": 2, "ignore_eos": True, "max_tokens": 400}).encode())
    for leave in (reset, socket.socket.close):
        for sent, wait_for in (
            (HEAD, b""),
            (request[:-5], b""),
            (request, b""),
            (request, b"200 OK"),
            (request, b"data: "),
            (whole, b""),
        ):
            connection = server.connect()
            connection.sendall(sent)
            if wait_for:
                read_until(connection, wait_for)
            leave(connection)
    server.wait_until_idle()
    server.assert_all_is_given_back()
    assert server.complete(max_tokens=2).status == 200


def test_who_leaves_with_a_second_request_behind_its_stream_is_aborted(serve: Any, model: Any) -> None:
    """uvicorn tells the connection's last request that the client is gone, and here that is not the one that runs."""
    server = serve()
    with server.connect() as other:
        other.sendall(streaming(max_tokens=500))
        connection = server.connect()
        connection.sendall(streaming(max_tokens=500) + streaming(max_tokens=500))
        read_until(connection, b"data: ")
        assert server.engine.num_unfinished == 2
        reset(connection)
        server.wait_until(lambda: server.engine.num_unfinished < 2)
        assert server.engine.num_unfinished == 1, "it was the other that has ended"
    server.wait_until_idle()


def test_who_stays_gets_the_tokens_that_it_would_get_alone(server: Any, alone: Any) -> None:
    """Fifteen streams, greedy and seeded; a third of the clients leave at a random byte."""
    rng = random.Random(0)
    prompts = ("Yesterday I", "The cat", "She", "My brother and I", "Tomorrow the children")
    wishes: list[dict[str, Any]] = [
        {
            "prompt": rng.choice(prompts),
            "max_tokens": rng.randint(1, 20),
            "temperature": rng.choice((0, 1)),
            "seed": rng.randrange(5),
            "n": rng.choice((1, 1, 2)),
        }
        for _ in range(15)
    ]
    leavers = set(rng.sample(range(len(wishes)), len(wishes) // 3))
    moments = {number: rng.randint(0, 2500) for number in leavers}
    texts: dict[int, list[str]] = {}
    problems: list[BaseException] = []

    def client(number: int) -> None:
        try:
            with server.connect() as connection:
                connection.sendall(streaming(**wishes[number], ignore_eos=False))
                if number in leavers:
                    received = b""
                    while len(received) < moments[number] and not received.endswith(LAST_CHUNK):
                        received += connection.recv(500) or pytest.fail("the server has closed the connection")
                    reset(connection)
                else:
                    texts[number] = collect_texts(connection, wishes[number]["n"], random.Random(number))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(len(wishes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    server.wait_until_idle()
    server.assert_all_is_given_back()
    for number, got in texts.items():
        assert got == alone(**wishes[number]), wishes[number]


def collect_texts(connection: socket.socket, n: int, rng: random.Random) -> list[str]:
    """Read an event stream in pieces of any size; events end with LF LF, and nothing else is looked at."""
    pending, texts, ended = b"", [""] * n, [False] * n
    read_until_head(connection)
    for piece in unchunked(connection, rng):
        pending += piece
        while b"\n\n" in pending:
            event, pending = pending.split(b"\n\n", 1)
            assert event.startswith(b"data: ")
            if event == b"data: [DONE]":
                assert all(ended)
                return texts
            choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
            assert not ended[choice["index"]]
            texts[choice["index"]] += choice["text"]
            ended[choice["index"]] = choice["finish_reason"] is not None
    raise AssertionError("the stream ended without [DONE]")


def read_until_head(connection: socket.socket) -> None:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding: chunked" in head


def unchunked(connection: socket.socket, rng: random.Random) -> Iterator[bytes]:
    file = connection.makefile("rb")
    while size := int(file.readline(), 16):
        while size:
            piece = file.read(min(size, rng.randint(1, 50)))
            assert piece
            size -= len(piece)
            yield piece
        assert file.readline() == b"\r\n"


@pytest.fixture(scope="module")
def alone(minigpt: Any) -> Any:
    """The texts that a request gets alone, from the `LLM` itself."""
    from minicache.engine.llm import LLM
    from minicache.grammar import Tokenizer

    llm = LLM(minigpt, num_blocks=64, tokenizer=Tokenizer())
    known: dict[str, list[str]] = {}

    def texts(*, prompt: str, **fields: Any) -> list[str]:
        key = json.dumps([prompt, fields])
        if key not in known:
            known[key] = [each.text for each in llm.generate([prompt], SamplingParams(**fields))]
        return known[key]

    return texts


# Who does not read


def test_who_does_not_read_slows_nobody_and_is_let_go(serve: Any) -> None:
    """Its answer waits in the server, its place and its blocks are free, and others are served."""
    server = serve()
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(("127.0.0.1", server.port))

    def make_its_buffer_small() -> bool:
        connections = list(server.server.server_state.connections)
        for each in connections:
            each.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bool(connections)

    server.wait_until(make_its_buffer_small)
    deaf.sendall(streaming(n=2, max_tokens=100, logprobs=20))
    assert server.complete(max_tokens=5).status == 200
    server.wait_until_idle()
    server.assert_all_is_given_back()
    tasks = server.server.server_state.tasks
    assert len(tasks) == 1, "the answer fits into the socket's buffers: the test needs a longer one"
    reset(deaf)
    server.wait_until(lambda: not tasks)


# What fails


def poison(token_id: int) -> Any:
    def raise_if_there(token_ids: torch.Tensor) -> None:
        if (token_ids == token_id).any():
            raise RuntimeError("poisoned")

    return raise_if_there


def test_a_poisoned_request_fails_alone(serve: Any, model: Any) -> None:
    """A request that is under way goes on as if nothing had been, and so do those that come later."""
    server = serve()
    wish = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    expected = server.ask("POST", "/v1/completions", wish).json["choices"]
    told = {5, 6, *server.tokenizer.encode(expected[0]["text"])}
    bad = next(token_id for token_id in range(1, 600) if token_id not in told)
    connection = server.open()
    model.before = poison(bad)
    connection.request("POST", "/v1/completions", json.dumps(wish), {"Content-Type": "application/json"})

    def num_tokens() -> int:
        return sum(len(each.request.output_token_ids) for each in list(server.llm.answers.values()))

    server.wait_until(lambda: num_tokens() > 0)
    whole = server.complete(prompt=[5, bad], max_tokens=5)
    before = num_tokens()
    server.wait_until(lambda: num_tokens() > before)  # two failures in a row would be blamed on all
    streamed = server.complete(prompt=[5, bad], max_tokens=5, stream=True, n=2)
    assert whole.status == 500
    assert whole.json["error"]["type"] == "server_error"
    assert whole.json["error"]["code"] == "step_failed"
    assert streamed.status == 200
    error, done = streamed.events
    assert error["error"]["code"] == "step_failed"
    assert done == "[DONE]"
    response = connection.getresponse()
    assert response.status == 200
    assert json.loads(response.read())["choices"] == expected
    connection.close()
    assert server.complete(prompt=[5, 6], max_tokens=3).status == 200


def test_a_model_that_always_fails_fails_everybody_and_the_server_lives(serve: Any, model: Any) -> None:
    server = serve()

    def fail(token_ids: torch.Tensor) -> None:
        raise MemoryError("no more")

    model.before = fail
    for number in range(3):
        assert server.complete(max_tokens=3, n=2, stream=bool(number % 2)).status in (200, 500)
    assert server.ask("GET", "/health").status == 200
    model.reset()
    assert server.complete(max_tokens=3).status == 200
    metrics = server.ask("GET", "/metrics").body.decode()
    assert 'minicache:requests_failed_total{engine="0",model_name="minigpt"} 3.0' in metrics


def test_what_a_failed_step_did_not_compute_is_not_found_in_the_prefix_cache(serve: Any, model: Any) -> None:
    server = serve(max_num_batched_tokens=64)
    prompt = list(range(20, 20 + 100))
    expected = server.complete(prompt=prompt, max_tokens=8, cache_salt="another").json["choices"]
    calls: list[int] = []

    def fail_second(token_ids: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("once")

    model.before = fail_second
    assert server.complete(prompt=prompt, max_tokens=8).status == 500
    for _ in range(2):
        assert server.complete(prompt=prompt, max_tokens=8).json["choices"] == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_the_request(serve: Any, model: Any, value: float) -> None:
    server = serve()
    model.after = lambda token_ids, logits: logits.fill_(value)
    for fields in ({}, {"temperature": 1}, {"logprobs": 3}):
        answer = server.complete(max_tokens=3, **fields)
        assert answer.status == 500
        assert answer.json["error"]["code"] == "step_failed"


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 2}, {"temperature": 1}], ids=str)
def test_a_request_without_logits_fails_alone(serve: Any, model: Any, fields: dict[str, Any]) -> None:
    """A stream that is under way next to it goes on, and nothing of it is suspected."""
    server = serve(num_blocks=512)
    wish = {"prompt": [5, 6], "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    expected = server.ask("POST", "/v1/completions", wish).json["choices"]
    told = {5, 6, *server.tokenizer.encode(expected[0]["text"])}
    bad = next(token_id for token_id in range(1, 346) if token_id not in told)

    def spoil(module: Any, arguments: Any, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.masked_fill((arguments[0] == bad)[..., None], torch.nan)

    handle = model.model.embed_tokens.register_forward_hook(spoil)
    try:
        connection = server.open()
        connection.request("POST", "/v1/completions", json.dumps(wish), {"Content-Type": "application/json"})
        server.wait_until(lambda: server.engine.num_unfinished)
        whole = server.complete(prompt=[7, bad], max_tokens=5, **fields)
        streamed = server.complete(prompt=[7, bad], max_tokens=5, stream=True, **fields)
        response = connection.getresponse()
        assert json.loads(response.read())["choices"] == expected
    finally:
        handle.remove()
    assert (whole.status, whole.json["error"]["code"]) == (500, "step_failed")
    assert streamed.events[-2]["error"]["code"] == "step_failed"
    assert streamed.events[-1] == "[DONE]"
    metrics = server.ask("GET", "/metrics").body.decode()
    assert re.search(r'request_success_total\{[^}]*finished_reason="error"[^}]*\} [2-9]', metrics)
    server.wait_until_idle()


def test_a_log_probability_of_nothing_is_still_json(serve: Any, model: Any) -> None:
    """−∞ has no JSON; a model that rules tokens out has it. vLLM says −9999."""
    server = serve()

    def rule_out(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits[:, 5:] = -torch.inf
        return logits

    model.after = rule_out
    answer = server.complete(max_tokens=2, logprobs=20, ignore_eos=True)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    told = json.loads(answer.body, parse_constant=refuse)["choices"][0]["logprobs"]
    assert min(told["top_logprobs"][0].values()) == -9999.0
    streamed = server.complete(max_tokens=2, logprobs=20, ignore_eos=True, stream=True)
    assert b"Infinity" not in streamed.body


def test_a_tokenizer_that_raises_fails_its_step_and_no_more(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    tokenizer = server.tokenizer
    decode = tokenizer.decode

    def raise_for_many(ids: Any) -> str:
        ids = list(ids)
        if 17 in ids:
            raise RuntimeError("cannot be written")
        return str(decode(ids))

    monkeypatch.setattr(tokenizer, "decode", raise_for_many)
    answer = server.complete(prompt=[5, 17], max_tokens=3)  # when the text is begun
    assert answer.status == 500 or answer.status == 400
    assert server.complete(prompt=[5, 6], max_tokens=1).status == 200
    calls: list[int] = []

    def raise_fourth(ids: Any) -> str:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("cannot be written")
        return str(decode(ids))

    monkeypatch.setattr(tokenizer, "decode", raise_fourth)
    assert server.complete(max_tokens=30).status == 500
    assert server.complete(max_tokens=3).status == 200


def test_a_tokenizer_that_raises_for_log_probabilities_ends_the_stream_with_an_error(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()

    def raises(self: TextStream, token_id: int) -> str:
        raise RuntimeError("cannot be written")

    monkeypatch.setattr(TextStream, "would_add", raises)
    assert server.complete(max_tokens=3, logprobs=1).status == 500
    events = server.complete(max_tokens=3, logprobs=1, stream=True).events
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["type"] == "server_error"
    server.wait_until_idle()
    assert server.complete(max_tokens=3).status == 200


# A full house


def test_at_the_bound_the_next_is_told_when_to_come_back_and_places_are_given_back(
    serve: Any, model: Any, gate: threading.Event
) -> None:
    server = serve(max_num_seqs=2, max_waiting=1)
    model.before = lambda token_ids: gate.wait(60)
    with server.connect() as one, server.connect() as three:
        one.sendall(streaming(n=2))
        server.wait_until(lambda: server.engine.num_unfinished == 2)
        refused = server.complete(n=2)
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json["error"]["type"] == "rate_limit_error"
        three.sendall(streaming())
        server.wait_until(lambda: server.engine.num_unfinished == 3)
        assert server.complete().status == 429
        assert server.complete(n=4).status == 400  # for whom there never is room is not told to come back
        assert server.complete(prompt=["I", "I", "I", "I"]).status == 400
        assert server.ask("GET", "/health").status == 200
    gate.set()
    server.wait_until_idle()
    assert server.complete(n=3, max_tokens=2).status == 200
    metrics = server.ask("GET", "/metrics").body.decode()
    assert re.search(r'requests_refused_total\{[^}]*reason="queue_full"\} 2\.0', metrics)


def test_many_prompts_do_not_wait_one_step_each(serve: Any, model: Any) -> None:
    """Sixteen prompts of one request are admitted between the same two steps, not one by one."""
    server = serve()
    with server.connect() as other:
        other.sendall(streaming(max_tokens=450))
        read_until(other, b"data: ")
        sizes: list[int] = []
        model.before = lambda token_ids: sizes.append(token_ids.shape[1])
        answer = server.complete(prompt=[[5, 6, 7]] * 16, max_tokens=1)
        assert answer.status == 200
        assert answer.json["usage"] == {"prompt_tokens": 48, "completion_tokens": 16, "total_tokens": 64}
        assert max(sizes) >= 16 * 1  # prompts may be found in the cache, but one token each is computed
    server.wait_until_idle()


def test_if_one_of_many_prompts_is_refused_the_others_are_aborted(serve: Any, model: Any) -> None:
    server = serve()
    answer = server.complete(prompt=["I", "She", "Quetzalcoatl", "He"], max_tokens=100)
    assert answer.status == 400
    assert "Quetzalcoatl" in answer.json["error"]["message"]
    server.wait_until_idle()


# Who may come in


PATHS = (
    "/v1/models",
    "/v1/models/minigpt",
    "/v1/models/",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1//models",
    "/%761/models",
    "/v1%2Fmodels",
    "/v1/../v1/models",
    "/./v1/models",
    "//v1/models",
    "/V1/models",
    "/v1",
    "/v1/models?x=1",
    "http://test/v1/models",
)


def test_nothing_of_the_model_is_told_without_the_key(serve: Any) -> None:
    server = serve(api_key="sésame 1", served_model_name="the-secret-model")
    key = "sésame 1".encode().decode("latin-1")
    for path in PATHS:
        for method in ("GET", "HEAD", "POST", "OPTIONS"):
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": f"Basic {key}"},
                {"x-api-key": key},
            ):
                answer = server.ask(method, path, headers=headers)
                assert answer.status in (401, 404), (method, path)
                assert b"secret" not in answer.body
    refused = server.ask("GET", "/v1/models")
    assert refused.status == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json["error"]["code"] == "invalid_api_key"
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert server.ask("GET", "/v1/models", headers={"Authorization": f"{scheme} {key}"}).status == 200
    assert server.ask("GET", "/health").status == 200


def test_an_empty_key_is_none(serve: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        serve(api_key="")
