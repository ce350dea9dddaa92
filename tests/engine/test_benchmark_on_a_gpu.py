"""`make gpu`, as far as it goes without a GPU: what it says then, and how it words what it finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minicache.kernels import runtime

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # benchmarks/ is no part of the package

from benchmarks import gpu  # noqa: E402


@pytest.mark.skipif(runtime.has_gpu(), reason="there is a GPU here")
@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == gpu.NO_GPU
    assert "No GPU to measure" in done.stdout
    assert "notebooks/colab/gpu.ipynb" in done.stdout


def test_what_fails_is_recorded_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> gpu.Found:
        raise RuntimeError("CUDA error:\n an illegal | memory access")

    found = gpu.tried(breaks)
    assert gpu.summary({"ladder": found}) == [
        {"what": "ladder", "found": "failed: RuntimeError: CUDA error: an illegal / memory access"}
    ]


@pytest.mark.skipif(runtime.has_gpu(), reason="there is a GPU here")
@pytest.mark.slow
def test_a_section_whose_process_ends_is_recorded() -> None:
    """Here every section's process ends so: there is no GPU."""
    assert gpu.in_a_process("tokens") == {"failed": f"its process ended with exit code {gpu.NO_GPU}"}


def test_the_words_of_every_section() -> None:
    row = {"name": "paged", "measurement": "31.0 µs (minimum 30.2)", "share": "91%"}
    rates = {"tokens_per_second": {"maximum": 5000.4, "median": 4900.0}, "answers_as_minicache": 32}
    results = {
        "gpu": "NVIDIA Made-up 1",
        "tests": {"passed": 400, "failed_tests": 1, "skipped": 20, "reasons": {"a::b": "no"}},
        "tokens": {"answers": 6, "same": {"float32 as on the CPU": 6}, "default_cache_tokens": 10**6},
        "ladder": {"copy_bandwidth": 3.9e12, "rungs": [row]},
        "decode": {"shapes": {"8 over 1": {"contestants": [row]}, "32 over 8": {"failed": "out of memory"}}},
        "others": {"kernels": [row | {"measurement": "not measured", "share": "not measured"}]},
        "engine": {"work": "random Llama", "ways": {"minicache": rates, "transformers": {"failed": "no such call"}}},
    }
    assert [(row["what"], row["found"]) for row in gpu.summary(results)] == [
        ("kernel tests", "400 passed, 1 failed, 20 not for a GPU"),
        ("same tokens: float32 as on the CPU", "6 of 6 answers"),
        ("copy bandwidth, read and written", "3,900 GB/s"),
        ("ladder: paged", "31.0 µs (minimum 30.2), 91%"),
        ("decode, 8 over 1 heads: paged", "31.0 µs (minimum 30.2), 91%"),
        ("decode, 32 over 8 heads", "failed: out of memory"),
        ("paged", "not measured"),
        ("engine: minicache", "4,900 tokens/s, at best 5,000"),
        ("engine: transformers", "failed: no such call"),
    ]


def test_names_of_files() -> None:
    assert gpu.slug("NVIDIA A100-SXM4-40GB") == "nvidia-a100-sxm4-40gb"
    assert gpu.slug("Tesla T4") == "tesla-t4"
