"""The server's log: a line for each request when it is over, in text or JSON; an engine's; and what no line may say."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from minicache.serving.http.logs import JSONLines, TextLines, logging_to_stderr
from minicache.serving.http.output import MAX_CHARACTERS, Output
from minicache.serving.replica.logs import EngineLog

SECONDS = 60


class Lines:
    """What was logged of requests, by their ids: the fields of each line."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def all(self) -> list[dict[str, Any]]:
        records = [each for each in self._caplog.records if each.name == "minicache.access"]
        return [{"level": each.levelname, **each.fields} for each in records]  # type: ignore[attr-defined]

    def of(self, server: Any, request_id: str) -> dict[str, Any]:
        """The line of a request; waited for, since a response is there before its line."""
        server.wait_until(lambda: any(line["request_id"] == request_id for line in self.all()))
        (line,) = (line for line in self.all() if line["request_id"] == request_id)
        return line


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.DEBUG, "minicache.access")
    return Lines(caplog)


def ask(server: Any, request_id: str, **fields: Any) -> Any:
    body = {"prompt": "Yesterday I", "temperature": 0, **fields}
    return server.ask("POST", "/v1/completions", body, {"X-Request-Id": request_id})


def begin(server: Any, request_id: str, **fields: Any) -> socket.socket:
    """A request on a connection of its own, whose response no one has read."""
    connection = server.connect()
    body = json.dumps({"prompt": "Yesterday I", "ignore_eos": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nX-Request-Id: {request_id}"
    connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


# Lines of requests


def test_a_line_tells_what_the_client_got(serve: Any, lines: Lines) -> None:
    server = serve()
    answer = ask(server, "whole", max_tokens=7, n=2, ignore_eos=True)
    assert answer.headers["x-request-id"] == "whole"
    line = lines.of(server, "whole")
    assert 0 < line.pop("ttft_seconds") <= line.pop("seconds") < SECONDS
    assert line == {
        "level": "INFO",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "reason": "length",
        "prompt_tokens": answer.json["usage"]["prompt_tokens"],
        "generated_tokens": 14,
        "key": None,
        "request_id": "whole",
    }


def test_a_stream_has_its_line_at_its_end_with_all_its_tokens(
    serve: Any, lines: Lines, model: Any, gate: threading.Event
) -> None:
    server, num_steps = serve(), 0

    def wait_at_the_third_step(token_ids: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        assert num_steps < 3 or gate.wait(SECONDS)

    model.before = wait_at_the_third_step
    with begin(server, "stream", max_tokens=20, stream=True) as connection:
        received = b""
        while b"data: " not in received:
            received += connection.recv(4096)
        assert lines.all() == []
        gate.set()
        line = lines.of(server, "stream")
    assert line["status"] == 200
    assert line["reason"] == "length"
    assert line["generated_tokens"] == 20
    assert line["ttft_seconds"] < line["seconds"]


def test_a_request_without_answers_has_a_line_without_tokens(serve: Any, lines: Lines) -> None:
    server = serve(api_key="secret")
    for request_id, path, status, reason in (
        ("models", "/v1/models", 401, "invalid_api_key"),
        ("nowhere", "/nowhere%0Aelse?key=secret", 404, "invalid_request_error"),
        ("page", "/", 401, "invalid_api_key"),
        ("schema", "/openapi.json", 200, None),
    ):
        server.ask("GET", path, None, {"X-Request-Id": request_id})
        line = lines.of(server, request_id)
        assert (line["status"], line["reason"], line["path"]) == (status, reason, path.partition("?")[0])
        assert line["prompt_tokens"] is line["generated_tokens"] is line["ttft_seconds"] is None


def test_probes_are_for_those_who_look_closely(serve: Any, lines: Lines) -> None:
    server = serve(root_path="/minicache")
    for request_id, path in (("one", "/health"), ("two", "/metrics")):
        assert server.ask("GET", path, None, {"X-Request-Id": request_id}).status == 200
        assert lines.of(server, request_id)["level"] == "DEBUG"


def test_a_clients_id_is_kept_if_it_is_sane(serve: Any) -> None:
    server = serve()
    sane = ["7", "a" * 128, "0a1b-2c:3/d.e_f+g=h@i"]
    insane = ["", "a" * 129, "two words", 'a"b', "é"]
    got = [server.ask("GET", "/health", None, {"X-Request-Id": each}).headers["x-request-id"] for each in sane + insane]
    assert got[: len(sane)] == sane
    made = got[len(sane) :]
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)
    assert len(set(made)) == len(insane)


def test_what_goes_wrong_is_the_reason(serve: Any, lines: Lines, model: Any, gate: threading.Event) -> None:
    server = serve(max_num_seqs=1, max_waiting=0)
    assert ask(server, "word", prompt="zzz").status == 400
    assert lines.of(server, "word")["reason"] == "invalid_request_error"
    assert ask(server, "model", model="other").status == 404
    assert lines.of(server, "model")["reason"] == "model_not_found"

    model.before = lambda token_ids: gate.wait(SECONDS)
    with begin(server, "left", max_tokens=400, stream=True):
        server.wait_until(lambda: server.engine.num_unfinished)
        assert ask(server, "full").status == 429
        assert lines.of(server, "full")["reason"] == "queue_full"
    line = lines.of(server, "left")
    assert (line["status"], line["reason"]) == (200, "client_left")
    server.wait_until(lambda: not server.engine.num_unfinished)
    begin(server, "whole", max_tokens=400).close()
    server.wait_until(lambda: server.engine.num_unfinished or lines.all()[-1]["request_id"] == "whole")
    gate.set()
    line = lines.of(server, "whole")
    assert (line["status"], line["reason"]) == (499, "client_left")
    server.wait_until_idle()

    def fail(token_ids: Any) -> None:
        raise RuntimeError("broken")

    model.before = fail
    assert ask(server, "broken").status == 500
    assert lines.of(server, "broken")["reason"] == "step_failed"


def test_an_error_in_a_stream_is_its_reason(serve: Any, lines: Lines, model: Any) -> None:
    server = serve()
    num_steps = 0

    def fail_later(token_ids: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 3:
            raise RuntimeError("broken")

    model.before = fail_later
    assert ask(server, "stream", max_tokens=20, stream=True, ignore_eos=True).status == 200
    line = lines.of(server, "stream")
    assert (line["status"], line["reason"], line["generated_tokens"]) == (200, "step_failed", 3)


def test_tokens_that_a_full_connection_has_no_room_for_are_counted_once(
    serve: Any, lines: Lines, model: Any, gate: threading.Event
) -> None:
    server = serve()
    model.before = lambda token_ids: gate.wait(SECONDS)
    fields = {"n": 2, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 50}
    with begin(server, "slow", **fields) as connection:
        server.wait_until(lambda: server.engine.num_unfinished)
        (protocol,) = server.server.server_state.connections
        server.wait_until(lambda: protocol.pause_writing() or True)
        gate.set()
        server.wait_until(lambda: not server.engine.num_unfinished)
        server.wait_until(lambda: protocol.resume_writing() or True)
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(65536)
    (usage,) = re.findall(rb'data: (.*"usage": {"prompt_tokens".*)\n', received)
    assert json.loads(usage)["usage"]["completion_tokens"] == 100
    assert lines.of(server, "slow")["generated_tokens"] == 100


# What they look like, and where they go


def record(message: str, level: int = logging.INFO, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("minicache.access", level, "", 0, message, (), None)
    made.fields = fields
    return made


def test_text_has_fields_that_cannot_be_taken_for_others() -> None:
    line = TextLines(colored=False).format(record("request", status=200, key=None, path='/a b"\n', client="::1"))
    assert re.fullmatch(r"\S+T\S+[+-]\d\d:\d\d INFO     minicache\.access: request .*", line)
    assert line.endswith(r' request status=200 path="/a b\"\n" client=::1')


def test_json_is_one_object_a_line_with_a_traceback_in_it() -> None:
    broken = record("two\nlines é", logging.ERROR, status=500)
    try:
        raise ValueError("broken")
    except ValueError:
        broken.exc_info = sys.exc_info()
    line = JSONLines().format(broken)
    assert "\n" not in line
    assert line.isascii()
    told = json.loads(line)
    assert list(told) == ["time", "level", "logger", "message", "status", "exception"]
    assert (told["level"], told["message"], told["status"]) == ("error", "two\nlines é", 500)
    assert "Traceback" in told["exception"]
    assert told["exception"].endswith("ValueError: broken")


def settings() -> list[tuple[int, list[logging.Handler]]]:
    loggers = map(logging.getLogger, ("", "minicache", "uvicorn.error", "uvicorn.asgi", "py.warnings"))
    return [(logger.level, logger.handlers[:]) for logger in loggers]


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("critical", []),
        ("warning", ["minicache warning", "uvicorn.error warning", "other warning"]),
        ("info", ["minicache warning", "minicache info", "uvicorn.error warning", "other warning"]),
        (
            "debug",
            [
                *("minicache warning", "minicache info", "minicache debug"),
                *("uvicorn.error warning", "uvicorn.error info", "uvicorn.error debug", "other warning"),
            ],
        ),
    ],
)
def test_the_level_is_ours_uvicorns_a_bit_less_and_of_others_only_warnings(
    level: Any, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = settings()
    with logging_to_stderr(level, "json"):
        for name in ("minicache", "uvicorn.error", "other"):
            for each in ("warning", "info", "debug"):
                getattr(logging.getLogger(name), each)(f"{name} {each}")
    logging.getLogger("minicache").warning("after")
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == shown
    assert settings() == before


def test_that_bytes_were_written_to_clients_that_had_left_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """asyncio says it once for each piece; 665 times in a storm of clients."""
    with logging_to_stderr("info", "json"):
        logging.getLogger("asyncio").warning("socket.send() raised exception.")
        logging.getLogger("asyncio").warning("another")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "another"


def test_no_level_tells_prompts_answers_or_keys(
    serve: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to_stderr("trace", "json"):
        server = serve(api_key="open-sesame")
        body = {"prompt": "Yesterday I", "max_tokens": 20, "temperature": 0}
        headers = {"Authorization": "Bearer open-sesame"}
        texts = []
        for stream in (False, True):
            answer = server.ask("POST", "/v1/completions", {**body, "stream": stream}, headers)
            assert answer.status == 200
            if not stream:
                texts.append(answer.json["choices"][0]["text"])
        server.stop()
    told = capsys.readouterr().err
    assert "/v1/completions" in told
    assert all(json.loads(line)["time"] for line in told.splitlines())
    for secret in ("Yesterday", "open-sesame", *texts):
        assert secret
        assert secret not in told


# Where nothing can be written


def test_what_a_pipe_has_no_room_for_is_counted() -> None:
    here, there = os.pipe()
    lost: list[int] = []
    line, number = "x" * 1023 + "\n", MAX_CHARACTERS // 1024 + 1000
    with os.fdopen(here, "rb", buffering=0) as reader, os.fdopen(there, "w") as writer:
        output = Output(writer, lost.append)
        for _ in range(number):
            output.write(line)
        assert not lost
        num_read = 0
        while num_read < (number - sum(lost)) * len(line):
            num_read += len(reader.read(2**16))
        assert len(lost) == 1
        assert 0 < lost[0] <= 1000
        output.close()


def test_what_a_full_disk_has_no_room_for_is_counted() -> None:
    class Disk(io.StringIO):
        num_refused = 3

        def write(self, text: str) -> int:
            if self.num_refused:
                self.num_refused -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    disk, lost = Disk(), list[int]()
    output = Output(disk, lost.append)
    for text in ("a\n", "b\n", "c\n", "d\n", "e\n"):
        output.write(text)
    output.close()
    assert (disk.getvalue(), lost) == ("d\ne\n", [3])


def test_the_log_says_how_much_of_it_was_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr("info", "json"):
        stream = sys.stderr
        assert isinstance(stream, Output)
        stream.write("x" * (MAX_CHARACTERS + 1))
        logging.getLogger("minicache").info("and goes on")
    told = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert told == ["and goes on", "lines of the log that were lost, since nothing read them or the disk was full: 1"]


# An engine's process

ENGINE = """
import logging, os, warnings
from minicache.serving.replica.logs import logging_to_server
logging_to_server()
logger = logging.getLogger("minicache")
logger.debug("too low")
logger.info("loaded %d", 7)
logging.getLogger("other").info("too low")
try:
    1 / 0
except ZeroDivisionError as error:
    logger.error("a step failed", exc_info=error)
warnings.warn("odd", stacklevel=1)
os.write(2, b"from C\\n 10%\\r 50%\\r100%\\n\\n")
os.write(2, b"x" * 3_000_000 + b"\\n")
os.write(2, b"no end of line ")
raise LookupError("last words")
"""


def test_all_that_an_engines_process_writes_is_logged_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "minicache")

    async def run() -> None:
        here, there = os.pipe()
        log = EngineLog(3, here)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", ENGINE, stderr=there)
        os.close(there)
        assert await process.wait() == 1
        log.close()
        log.close()

    asyncio.run(run())
    assert {each.name for each in caplog.records} == {"minicache.engine.3"}
    told = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert told[:2] == [("INFO", "loaded 7"), ("ERROR", "a step failed")]
    assert "ZeroDivisionError: division by zero" in (caplog.records[1].exc_text or "")
    assert told[2][0] == "WARNING"
    assert "UserWarning: odd" in told[2][1]
    assert told[3:5] == [("WARNING", "from C"), ("WARNING", "100%")]
    letters = [text for _, text in told[5:] if set(text) == {"x"}]
    assert sum(map(len, letters)) == 3_000_000
    # What Python says last begins in the middle of a line, so it is no record, and told as it is.
    assert told[-1][0] == "WARNING"
    assert told[-1][1].startswith("no end of line ")
    assert "LookupError: last words" in told[-1][1]


def test_a_pipe_that_another_process_keeps_open_holds_up_nothing() -> None:
    async def run() -> None:
        here, there = os.pipe()
        with subprocess.Popen(["sleep", "60"], stderr=there) as other:
            log = EngineLog(0, here)
            os.close(there)
            log.close()
            other.kill()

    asyncio.run(asyncio.wait_for(run(), SECONDS))
