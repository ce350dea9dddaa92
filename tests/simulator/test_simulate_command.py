"""`minicache simulate` and `minicache calibrate`, as they are typed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import minicache_cli as cli
from minicache.simulator.costs import HostCost
from minicache.trace import read_trace
from minicache_cli import calibrate


def run(*arguments):
    result = CliRunner().invoke(cli.app, ["simulate", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments):
    """What an error of usage says, without the frame that is drawn around it."""
    result = CliRunner().invoke(cli.app, ["simulate", "--count", "5", *arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.replace("│", " ").split())


def test_a_server_that_one_does_not_have():
    text = run("--count", "40")
    assert "40 × ShareGPT at 2/s · fair · opt-13b on A100-40GB" in text
    assert "time to first token, s" in text
    assert "40 / 0 / 0" in text


@pytest.mark.parametrize("scheduler", ["static", "continuous", "paged", "fair", "orca-max", "orca-pow2", "orca-oracle"])
def test_every_scheduler_serves_everybody(scheduler):
    arguments = ("--workload", "alpaca", "--count", "30", "--rate", "100", "--num-blocks", "140")
    assert "30 / 0 / 0" in run(*arguments, "--scheduler", scheduler)


def test_files(tmp_path):
    out, trace = tmp_path / "new" / "folder", tmp_path / "trace.jsonl"
    run(
        "--count",
        "30",
        "--out",
        str(out),
        "--trace",
        str(trace),
        "--preemption",
        "swap",
        "--num-blocks",
        "130",
        "--audit",
    )
    told = json.loads((out / "report.json").read_text(encoding="utf-8"))
    steps = list(read_trace(trace))
    assert told["report"]["num_finished"] == 30
    assert told["settings"]["num_blocks"] == 130
    assert len(steps) == told["report"]["num_steps"]
    assert sum(event.kind == "preempt" for step in steps for event in step.events) == told["report"]["num_preemptions"]
    for name in ("latency", "distributions", "batch-and-memory"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_quantized_cache_has_more_blocks(tmp_path):
    """256 bytes of a row of 128 numbers become 132: 1.94 times as many blocks in what the weights leave."""
    blocks = []
    for options in ((), ("--kv-cache-dtype", "int8")):
        told = run("--count", "5", "--out", str(tmp_path), *options)
        blocks.append(json.loads((tmp_path / "report.json").read_text())["settings"]["num_blocks"])
    assert "int8 KV cache" in told
    assert blocks[1] == pytest.approx(blocks[0] * 256 / 132, rel=0.002)


def test_a_fleet(tmp_path):
    """The same chats on one server and on three, and routed in two ways."""
    arguments = ("--workload", "chats", "--scheduler", "chunked", "--model", "llama-3-8b", "--rate", "20")
    reports = []
    for policy in ("round_robin", "prefix_affinity"):
        text = run(*arguments, "--count", "150", "--replicas", "3", "--policy", policy, "--out", str(tmp_path))
        assert f"chunked · llama-3-8b on A100-40GB · 3 replicas, {policy}" in " ".join(text.split())
        reports.append(json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["report"])
    assert all(report["num_finished"] == 150 and len(report["replicas"]) == 3 for report in reports)
    assert reports[1]["hit_rate"] > reports[0]["hit_rate"] + 0.1
    assert (tmp_path / "replicas.png").read_bytes().startswith(b"\x89PNG")


def test_a_prefix_cache_is_used_where_prompts_have_tokens():
    arguments = ("--workload", "system-prompt", "--scheduler", "fair", "--count", "60", "--replicas", "1")
    assert "prompt tokens found in a prefix cache 0.0%" in " ".join(run(*arguments, "--no-prefix-caching").split())
    assert "prompt tokens found in a prefix cache 0.0%" not in " ".join(run(*arguments).split())


def test_tiers(tmp_path):
    """Chats on a cache that is too small for them, and with what is below it: on a server, and for a fleet."""
    arguments = ("--workload", "chats", "--scheduler", "chunked", "--model", "llama-3-8b", "--count", "50")
    arguments += ("--rate", "8", "--num-blocks", "600", "--out", str(tmp_path))

    def report(*tiers):
        text = " ".join(run(*arguments, *tiers).split())
        return json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["report"], text

    without, text = report("--audit")
    assert "tokens loaded" not in text
    found, text = report("--kv-tier", "cpu:1GB", "--kv-tier", "disk:/never/made?max=1TB", "--audit")
    assert found["tier_hit_tokens"]["disk"] > 0
    assert "tokens loaded from tiers cpu " in text
    assert found["num_computed_tokens"] < without["num_computed_tokens"]
    two = ("--replicas", "2", "--policy", "round_robin")
    fleet, _ = report(*two)
    sharing, text = report(*two, "--kv-tier", "cpu:20GB", "--kv-tier", "redis://store")
    assert sharing["tier_hit_tokens"]["redis"] > 0
    assert sharing["num_computed_tokens"] < fleet["num_computed_tokens"]
    assert f"tokens computed {sharing['num_computed_tokens']:,}" in text


def test_requests_that_never_fit_are_told_of():
    text = run("--count", "40", "--num-blocks", "20")
    assert "4 requests were refused. The first: request 6 needs 25 blocks" in text


def test_a_server_that_serves_nobody_is_an_error():
    text = refusal("--scheduler", "orca-max", "--num-blocks", "10")
    assert "all 5 requests were refused. The first: request 0 needs 2048 blocks" in text


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (("--rate", "0"), "rate must be above 0"),
        (("--num-blocks", "0"), "--num-blocks"),
        (("--block-size", "0"), "--block-size"),
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--max-num-batched-tokens", "0"), "--max-num-batched-tokens"),
        (("--watermark", "2"), "0 ≤ watermark < 1"),
        (("--watermark", "2", "--scheduler", "orca-max"), "0 ≤ watermark < 1"),
        (("--num-host-blocks", "-1"), "--num-host-blocks"),
        (("--preemption", "swap", "--num-host-blocks", "0"), "host_blocks"),
        (("--model", "llama-3-70b"), "weights and reserve do not fit"),
        (("--model", "gpt"), "'gpt' is not one of"),
        (("--count", "0"), "--count"),
        (("--host", "/nowhere/calibration.json"), "No such file"),
        (("--trace", "/nowhere/trace.jsonl"), "No such file"),
        (("--policy", "round_robin"), "--policy needs --replicas"),
        (("--replicas", "2", "--audit"), "need a single server: leave out"),
        (("--replicas", "2", "--num-blocks", "2"), "too large for a replica"),
        (("--kv-tier", "cpu:1GB"), "--kv-tier needs prompts with tokens"),
        (("--kv-tier", "tape:1GB", "--workload", "chats"), "no tier 'tape:1GB'"),
        (("--kv-tier", "cpu:1KB", "--workload", "chats"), "the tier 'cpu' only 1,000"),
        (("--kv-tier", "cpu:1GB", "--workload", "chats", "--scheduler", "orca-max"), "has no blocks to keep"),
        (("--kv-tier", "cpu:1GB", "--workload", "chats", "--scheduler", "static"), "shares no blocks"),
    ],
)
def test_bad_input_is_an_error_of_usage(arguments, saying):
    assert saying in refusal(*arguments)


def test_the_hosts_engine(tmp_path, monkeypatch):
    """Measured with two small bursts, which is no calibration but goes all the way."""
    monkeypatch.setattr(calibrate, "BATCHES", (1, 4))
    monkeypatch.setattr(calibrate, "PROMPTS", (4, 40))
    file = tmp_path / "calibration.json"
    result = CliRunner().invoke(cli.app, ["calibrate", "--rounds", "1", "--out", str(file)])
    assert result.exit_code == 0, result.output
    assert "fixed" in result.stdout
    host = HostCost.load(file)
    assert 0 < host.fixed < 1
    assert "MiniGPT on" in run("--count", "20", "--host", str(file))
    assert "leave out --model" in refusal("--host", str(file), "--model", "opt-13b")
    assert "leave out --kv-cache-dtype" in refusal("--host", str(file), "--kv-cache-dtype", "int8")


@pytest.mark.slow
def test_a_simulation_needs_no_torch(tmp_path):
    arguments = ["simulate", "--count", "3", "--out", str(tmp_path)]
    call = f"cli.app({arguments}, standalone_mode=False)"
    code = f"import sys; import minicache_cli as cli; {call}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
