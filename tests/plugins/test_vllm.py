"""Our schedulers inside vLLM, in vLLM's own environment, which these tests start processes in."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="vLLM is not here: scripts/peers_env.sh vllm makes its environment, 3.5 GB"
    ),
]


def run(*arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [PYTHON, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def steps():
    """What tests/plugins/vllm_steps.py printed: lines of JSON among vLLM's own."""
    printed = run("tests/plugins/vllm_steps.py")
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_each_scheduler_serves_vllms_requests(steps):
    """19 of 20 answers, as one request is aborted; workers without an allocator had every token in its place."""
    runs = [line for line in steps if "scheduler" in line]
    stages = ["static", "continuous", "paged", "fair", "chunked", "async"]
    assert [line["scheduler"] for line in runs] == [*stages, "async", "async", None]
    for line in runs:
        assert (line["right"], line["finished"]) == (19, 19), line
        assert line["stopped"] > 0
        assert (
            line["preempted"] >= line["resumed"] > 0
        )  # every stage by reset_prefix_cache, the last ones by themselves
    preempted = {line["scheduler"]: line["preempted"] for line in runs}
    assert preempted["paged"] > preempted["continuous"]


def test_only_async_scheduling_is_ahead_of_the_tokens(steps):
    """Most tokens were scheduled before they were known: without prefix cache, with it, and by the default stage."""
    ahead = [line["ahead"] for line in steps if "scheduler" in line]
    assert ahead[:6] == [0] * 6
    assert min(ahead[6:]) > 100


def test_what_is_not_scheduled_is_refused_by_name(steps):
    refused = [line for line in steps if "refused" in line]
    assert refused == [{"refused": ["bad", "long"], "all": 5}] * 2
    small, behind = [line["error"] for line in steps if "error" in line]
    assert "max_num_batched_tokens 32 below max_model_len 64" in small
    assert 'async scheduling with this stage: take "async"' in behind


@pytest.mark.timeout(300)
def test_vllm_gives_our_answers():
    """MiniGPT in vLLM, with our scheduler, preemptions included: token for token what our engine gives."""
    printed = run("-m", "minicache.plugins.compare", "vllm", "chunked")
    [line] = [line for line in printed.splitlines() if line.startswith("chunked:")]
    assert line.startswith("chunked: 24 of 24 answers identical")
    assert not line.endswith(" 0 preemptions")
