"""`minicache bench serve`, as it is typed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import minicache_cli as cli
from minicache import __version__
from minicache.simulator.costs import HostCost


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "serve", *arguments])


def run(server, *arguments):
    result = invoke("--url", server.url, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments):
    """What an error of usage says, without the frame that is drawn around it."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.fixture
def calibration(tmp_path):
    """A machine on which every step takes 2 ms."""
    file = tmp_path / "calibration.json"
    HostCost("here", "MiniGPT", 0.002, *[0.0] * 7).save(file)
    return str(file)


def test_a_server_is_put_under_load(fake):
    with fake.run() as server:
        text = run(server, "--num-requests", "5", "--num-output-tokens", "6")
    assert "5 × 24 + 6 tokens at once · fake" in text
    assert "time to first token, ms" in text
    assert "sent later than planned, ms" in text
    assert "120 in, 30 out, in 30 events" in text
    assert [call.body["model"] for call in server.calls] == ["fake"] * 5


def test_all_options_of_the_load(fake):
    arguments = ("--num-requests", "4", "--rate", "200", "--num-prompt-tokens", "30", "--num-output-tokens", "2")
    with fake.run() as server:
        options = (
            "--num-shared-tokens",
            "20",
            "--vocab-size",
            "9",
            "--model",
            "named",
            "--api-key",
            "k",
            "--seed",
            "3",
        )
        text = run(server, *arguments, *options)
    assert "4 × 30 + 2 tokens at 200/s · named" in text
    prompts = [call.body["prompt"] for call in server.calls]
    assert all(len(prompt) == 30 and max(prompt) < 9 for prompt in prompts)
    assert all(prompt[:20] == prompts[0][:20] for prompt in prompts)
    assert {call.headers["authorization"] for call in server.calls} == {"Bearer k"}


def test_a_workload_is_made_to_fit_and_says_so(fake):
    with fake.run() as server:
        text = run(server, "--workload", "azure-code", "--num-requests", "300", "--seed", "17", "--rate", "inf")
    assert "300 × Azure code 2023 at once" in text
    assert "multiplied by 0.0312, to fit 512" in text
    lengths = [len(call.body["prompt"].split()) + call.body["max_tokens"] for call in server.calls]
    assert max(lengths) <= 512
    num_cut = lengths.count(512)
    assert num_cut > 1
    assert f"{num_cut:,} requests were cut to 512 tokens" in text


def test_json_and_files(fake, tmp_path):
    out = tmp_path / "new" / "folder"
    with fake.run() as server:
        told = json.loads(run(server, "--num-requests", "3", "--json", "--out", str(out)))
    settings = dict(told["settings"])
    client = settings.pop("client")
    assert (client["version"], client["cores"]) == (__version__, os.cpu_count())
    assert client["machine"]
    assert settings.pop("server") == {"version": "", "lab_files": {}}
    assert settings == {"url": server.url, "model": "fake", "load": "24 + 64 tokens at once", "seed": 0}
    assert told["report"]["num_ok"] == 3
    assert len(told["report"]["requests"]) == 3
    assert "prediction" not in told
    assert json.loads((out / "report.json").read_text(encoding="utf-8")) == told
    for name in ("distributions.png", "over-time.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_the_prediction_beside_it(fake, calibration, tmp_path):
    async def answer(call):
        await asyncio.sleep(0.004)
        yield fake.head + fake.chunk(fake.event())
        await asyncio.sleep(0.016)
        yield fake.chunk(fake.event()) + fake.chunk(fake.usage(24, 2) + fake.done) + b"0\r\n\r\n"

    arguments = ("--num-requests", "4", "--num-output-tokens", "2", "--calibration", calibration, "--predict")
    with fake.run(answer) as server:
        text = run(server, *arguments)
        told = json.loads(run(server, *arguments, "--json", "--num-blocks", "50", "--out", str(tmp_path)))
    assert "prediction error" in text
    # All come at 0, and one step serves all: 2 ms to the first token, 2 ms more to the second.
    predicted = {(each["metric"], each["statistic"]): each["predicted"] for each in told["comparison"]}
    assert predicted["ttft", "p99"] == pytest.approx(0.002)
    assert predicted["tpot", "mean"] == pytest.approx(0.002)
    assert predicted["latency", "p50"] == pytest.approx(0.004)
    assert predicted["tokens_per_second", ""] == pytest.approx(8 / 0.004)
    assert told["prediction"]["num_finished"] == 4
    tpot = next(each for each in told["comparison"] if (each["metric"], each["statistic"]) == ("tpot", "mean"))
    assert tpot["error"] == pytest.approx(0.002 / tpot["measured"] - 1)


def test_what_went_wrong_is_told(fake, calibration):
    async def answer(call):
        if call.number % 2:
            yield fake.plain("429 Too Many Requests", b'{"error": {"message": "no [place]"}}', "Retry-After: 7")
        else:
            yield fake.head + fake.chunk(fake.event() + fake.done) + b"0\r\n\r\n"

    with fake.run(answer) as server:
        text = run(server, "--num-requests", "4", "--predict", "--calibration", calibration, "--max-in-flight", "1")
    assert "2 (Retry-After 7 s median)" in text
    assert "2 × HTTP 429: no [place]" in text
    assert "2 requests were not answered; the simulator serves them" in text
    assert "2 answers are shorter than requested" in text
    assert "The simulator ignores --max-in-flight" in text


def test_if_nothing_was_answered_the_command_fails(fake):
    async def answer(call):
        yield fake.plain("500 Internal Server Error", b"")

    with fake.run(answer) as server:
        result = invoke("--url", server.url, "--num-requests", "2")
    assert result.exit_code == 1
    assert "2 × HTTP 500" in result.output


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (("--url", "localhost:8000"), "is not a server URL"),
        (("--workload", "alpaca", "--num-output-tokens", "3"), "a workload has its own lengths"),
        (("--predict", "--calibration", "nowhere.json"), "nowhere.json"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(arguments, saying):
    assert saying in refusal(*arguments)


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (("--rate", "0"), "rate"),
        (("--num-prompt-tokens", "8", "--num-shared-tokens", "8"), "do not fit into a prompt"),
        (("--workload", "alpaca", "--num-shared-tokens", "511"), "do not fit into a context of 512"),
        (("--timeout", "0"), "timeout"),
    ],
)
def test_what_the_server_cannot_be_asked_is_refused(fake, arguments, saying):
    with fake.run() as server:
        assert saying in refusal("--url", server.url, *arguments)
    assert not server.calls


def test_a_server_that_does_not_say_its_context(fake):
    with fake.run() as server:
        server.models = b'{"data": [{"id": "gpt"}]}'
        assert "set --max-model-len" in refusal("--url", server.url, "--workload", "alpaca")
        text = run(server, "--workload", "alpaca", "--max-model-len", "3000", "--num-requests", "2", "--rate", "inf")
    assert "multiplied" not in text


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_reports_what_was_answered(fake):
    async def answer(call):
        yield fake.head + fake.chunk(fake.event())
        if call.number >= 2:
            await asyncio.sleep(30)
        yield fake.chunk(fake.done) + b"0\r\n\r\n"

    with fake.run(answer) as server:
        # Anyone who runs tests in the background may have SIGINT ignored, and so would the client.
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        code += "from minicache_cli import main; main()"
        options = ("--num-requests", "3", "--max-in-flight", "1", "--num-output-tokens", "1", "--url", server.url)
        command = [sys.executable, "-c", code, "bench", "serve", *options]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while not (len(server.calls) == 3 and server.calls[2].written) and time.monotonic() < deadline:
            time.sleep(0.02)
        client.send_signal(signal.SIGINT)
        stdout, stderr = client.communicate(timeout=30)
    assert client.returncode == 0, stderr
    assert "3 of 3, 1 cut off" in stdout
    assert "The run was stopped" in stdout
