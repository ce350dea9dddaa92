"""A conversation with a folder's model: over HTTP with OpenAI's own client, and in the terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.chatting import SAID, write_folder
from tests.server.conftest import running
from typer.testing import CliRunner

from minicache.model import load_folder
from minicache.model.tokenizer import folder_tokenizer
from minicache_cli import app, main

MESSAGES: list[Any] = [
    {"role": "system", "content": "sé breve"},
    {"role": "user", "content": "你好 🙂?"},
    {"role": "assistant", "content": SAID},
    {"role": "user", "content": "¿y?"},
]
PROMPT = f"<|system|>sé breve<|end|><|user|>你好 🙂?<|end|><|assistant|>{SAID}<|end|><|user|>¿y?<|end|><|assistant|>"
NUM_SAID = len(SAID.encode()) + 1
"""Tokens of an answer: a byte each, and the end of the turn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("chatting"))


# Over HTTP


@pytest.fixture(scope="module", params=["thread", "process"])
def client(folder: Path, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    tokenizer, model = folder_tokenizer(folder), load_folder(folder)
    with running(model, request.param, tokenizer=tokenizer, served_model_name="parrot") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:
            yield client


def test_the_models_card_says_that_it_chats(client: openai.OpenAI) -> None:
    assert client.models.retrieve("parrot").model_extra["has_chat_template"] is True


def test_an_answer_ends_with_the_turn(client: openai.OpenAI, folder: Path) -> None:
    answer = client.chat.completions.create(model="parrot", messages=MESSAGES, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    num_prompt = len(folder_tokenizer(folder).encode(PROMPT))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, NUM_SAID)


def test_a_stream_has_whole_letters(client: openai.OpenAI) -> None:
    events = list(client.chat.completions.create(model="parrot", messages=MESSAGES, temperature=0, stream=True))
    pieces = [event.choices[0].delta.content for event in events]
    assert [piece for piece in pieces if piece] == [*SAID]
    assert events[0].choices[0].delta.role == "assistant"
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]


def test_an_answer_that_is_cut_inside_a_letter(client: openai.OpenAI) -> None:
    """Two of the three bytes of 日: a letter that can no longer be completed."""
    wish: Any = {"model": "parrot", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 2}
    (choice,) = client.chat.completions.create(**wish).choices
    assert (choice.message.content, choice.finish_reason) == ("\N{REPLACEMENT CHARACTER}", "length")
    events = list(client.chat.completions.create(**wish, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == choice.message.content


def test_a_stop_string_of_several_tokens(client: openai.OpenAI) -> None:
    wish: Any = {"model": "parrot", "messages": MESSAGES, "temperature": 0, "stop": ["🙂é"]}
    (choice,) = client.chat.completions.create(**wish).choices
    assert (choice.message.content, choice.finish_reason) == ("日", "stop")
    events = list(client.chat.completions.create(**wish, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == "日"


def test_a_model_without_a_chat_template_takes_prompts_only(tmp_path: Path) -> None:
    write_folder(tmp_path, template=None)
    with running(load_folder(tmp_path), "thread", tokenizer=folder_tokenizer(tmp_path)) as server:
        refused = server.ask("POST", "/v1/chat/completions", {"messages": MESSAGES})
        assert refused.status == 400
        assert server.ask("GET", "/v1/models").json["data"][0]["has_chat_template"] is False
        assert refused.json["error"]["message"] == "this model has no chat template: give a prompt"
        assert server.complete("<|assistant|>").json["choices"][0]["text"] == SAID


def test_a_template_that_loops_holds_up_neither_other_requests_nor_the_end(tmp_path: Path) -> None:
    write_folder(tmp_path, template="{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with running(load_folder(tmp_path), "thread", tokenizer=folder_tokenizer(tmp_path)) as server:
        refused = server.ask("POST", "/v1/chat/completions", {"messages": MESSAGES})
        assert refused.status == 400
        assert refused.json["error"]["message"].endswith("it takes more than 1 s of computing")
        assert refused.json["error"]["param"] == "messages"
        assert server.complete("<|assistant|>").status == 200


# In the terminal


FIGURES = re.compile(
    r"(\d+) tokens, (?:\d+ tokens/s, )?first after [\d.]+ s, (\d+) of (\d+) blocks"
    r"(?:, prompt: (\d+) of (\d+) cached)?(?:, (cut off|stopped))?"
)


def chat(folder: Path, *lines: str, options: tuple[str, ...] = ()) -> list[str]:
    """What it prints when these lines are typed, line by line."""
    given = ("--num-blocks", "64", "--block-size", "4", "--temperature", "0", *options)
    threads = torch.get_num_threads()
    result = CliRunner().invoke(app, ["chat", str(folder), *given], input="\n".join(lines), env={"COLUMNS": "200"})
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def figures(line: str) -> tuple[Any, ...]:
    """The tokens, blocks in use, all blocks, cached and all tokens of the prompt, and how the answer has ended."""
    found = FIGURES.fullmatch(line)
    assert found, line
    return tuple(int(each) if each and each.isdigit() else each for each in found.groups())


def num_tokens(folder: Path, text: str) -> int:
    return len(folder_tokenizer(folder).encode(text))


def test_a_conversation_finds_its_history_in_the_prefix_cache(folder: Path) -> None:
    first, under_first, second, under_second, *others = chat(folder, "hello", "", "and now?")
    assert (first, second, others) == (SAID, SAID, [])
    opening = f"<|user|>hello<|end|><|assistant|>{SAID}<|end|>"
    num_first = num_tokens(folder, "<|user|>hello<|end|><|assistant|>")
    num_second = num_tokens(folder, f"{opening}<|user|>and now?<|end|><|assistant|>")
    num_all = num_second + NUM_SAID - 1  # the last token is not computed
    assert figures(under_first) == (NUM_SAID, -(-(num_first + NUM_SAID - 1) // 4), 64, 0, num_first, None)
    cached = num_tokens(folder, opening.removesuffix("<|end|>")) // 4 * 4
    assert figures(under_second) == (NUM_SAID, -(-num_all // 4), 64, cached, num_second, None)


def test_commands(folder: Path) -> None:
    lines = chat(folder, "hello", "/reset", "hello", "/help", "/what", "/quit", "hello")
    assert lines[2] == "A new conversation"
    assert figures(lines[1])[4] == figures(lines[4])[4], "the history is still there"
    assert lines[5] == lines[6] == "/reset: a new conversation; /quit or Ctrl-D: leave; Ctrl-C: stop the answer"
    assert len(lines) == 7


def test_the_oldest_turns_make_room(folder: Path) -> None:
    """A turn takes 21 of 100 tokens. After four an answer of 20 no longer fits, so half of the 100 is made free."""
    questions = [f"{number} hello" for number in range(7)]
    lines = chat(folder, *questions, options=("--max-model-len", "100", "--max-tokens", "20"))
    told = "The oldest turns no longer fit into 100 tokens, and are left out: 3"
    sizes = [figures(line)[4] for line in lines if FIGURES.fullmatch(line)]
    assert lines.count(told) == 1
    assert lines.count(SAID) == len(sizes) == 7
    assert sizes == [10, 31, 52, 73, 31, 52, 73]
    hits = [figures(line)[3] for line in lines if FIGURES.fullmatch(line)]
    assert [hit > 0 for hit in hits] == [False, True, True, True, False, True, True]


def test_a_line_that_is_no_utf8(folder: Path) -> None:
    result = CliRunner().invoke(app, ["chat", str(folder), "--num-blocks", "64"], input=b"caf\xe9 \xff\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(SAID)


def test_a_closed_stdin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["minicache", "chat", str(folder), "--num-blocks", "64"])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code


def test_a_question_that_cannot_fit_changes_nothing(folder: Path) -> None:
    options = ("--max-model-len", "60")
    first, under_first, refusal, again, under_again = chat(folder, "hello", "x" * 70, "hello", options=options)
    assert refusal == "a prompt of 73 tokens leaves no room for an answer within max_model_len 60: shorten the prompt"
    assert first == again == SAID
    assert figures(under_again)[4] == 2 * figures(under_first)[4] + NUM_SAID


def test_the_cache_may_be_smaller_than_the_model_is_long(folder: Path) -> None:
    lines = chat(folder, *["hello"] * 6, options=("--num-blocks", "16"))
    assert lines.count(SAID) == 6
    assert any("no longer fit into 64 tokens" in line for line in lines)


def test_what_is_asked_for(folder: Path) -> None:
    options = ("--max-tokens", "2", "--system", "be kind", "--no-prefix-caching")
    answer, line = chat(folder, "hello", options=options)
    assert answer == "\N{REPLACEMENT CHARACTER}"
    assert figures(line) == (2, 5, 64, None, None, "cut off")
    (_, line) = chat(folder, "hello", options=("--system", "be kind"))
    assert figures(line)[4] == num_tokens(folder, "<|system|>be kind<|end|><|user|>hello<|end|><|assistant|>")


def test_what_the_template_refuses_is_told(tmp_path: Path) -> None:
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('not so') }}{% endif %}<|assistant|>"
    write_folder(tmp_path, template=template)
    refusal, answer, _ = chat(tmp_path, "no", "yes")
    assert refusal == "the model's chat template refuses these messages: not so"
    assert answer == SAID


def test_an_answer_does_not_control_the_terminal(tmp_path: Path) -> None:
    write_folder(tmp_path, "a\x1b[2Jb\tc\nd\x07")
    lines = chat(tmp_path, "hello")
    assert lines[:2] == ["a[2Jb\tc", "d"]


@pytest.mark.parametrize("name", ["minigpt", "a folder"])
def test_a_model_without_a_chat_template(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = name if name == "minigpt" else str(write_folder(tmp_path, template=None))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["minicache", "chat", model])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line == (
        f"minicache: {model} has no chat template: complete a prompt with `minicache generate`, or chat with a model "
        "that has one: minicache chat smollm2"
    )


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["minicache", "chat", "no-such-folder"])
    with pytest.raises(SystemExit):
        main()
    assert "there is no checkpoint at no-such-folder" in capsys.readouterr().err


SERVERS = ("fastapi", "httptools", "msgspec", "prometheus_client", "uvicorn", "zmq")


def test_at_a_terminal_in_spanish_and_without_what_a_server_needs(tmp_path: Path) -> None:
    """Ctrl-C stops the answer, which would be very long, and what was computed stays cached; or it gives up a line."""
    write_folder(tmp_path, "日", loops=True, max_len=10**5)
    code = f"import sys; sys.modules.update(dict.fromkeys({SERVERS})); from minicache_cli import main; main()"
    command = [sys.executable, "-c", code, "--lang", "es", "chat", str(tmp_path), "--max-tokens", "90000"]
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is started in the background may ignore it
        os.execve(sys.executable, command, os.environ | {"COLUMNS": "200", "TERM": "dumb"})
    seen = ""

    def until(wanted: str) -> str:
        nonlocal seen
        while wanted not in seen:
            seen += os.read(terminal, 2**16).decode(errors="replace")
        before, _, seen = seen.partition(wanted)
        return before

    until("/help muestra los comandos")
    until("> ")
    os.write(terminal, b"hello\n")
    until(20 * "日")
    os.write(terminal, b"\x03")
    assert "prompt: 0 de 8 en caché" in until(", detenida")
    until("> ")
    os.write(terminal, b"on\n")
    until("日日")
    os.write(terminal, b"\x03")
    found = re.search(r"prompt: (\d+) de (\d+) en caché", until(", detenida"))
    assert found
    assert 64 <= int(found[1]) < int(found[2])
    until("> ")
    os.write(terminal, b"given up")
    until("given up")  # readline has it: before that, it may not wait yet, and Python's input() would miss the signal
    os.write(terminal, b"\x03")
    while not select.select([terminal], [], [], 1)[0]:
        os.write(terminal, b"\x03")
    until("> ")
    os.write(terminal, b"\x04")
    assert os.waitpid(process, 0)[1] == 0
    os.close(terminal)
