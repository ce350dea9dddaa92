"""Kernels compile for GPUs of three generations, which takes no GPU, and take of one what the site's table says.

The interpreter runs what the compiler would refuse: a type that changes in a loop, a shape that is no power of two,
more shared memory than there is. This is what stands between that and the first user with a GPU. Only corners are
compiled here; `python -m benchmarks.compiled` compiles every launch and writes the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMPILED = json.loads((ROOT / "benchmarks/results/compiled.json").read_text(encoding="utf-8"))

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def corners() -> list[dict[str, Any]]:
    """What a selection of launches takes. In a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compiled", "--corners"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_and_none_spills(corners: list[dict[str, Any]]) -> None:
    assert [each for each in corners if "error" in each] == []
    assert {each["kernel"] for each in corners} == {
        "store_kernel",
        "quantized_store_kernel",
        "quantized_linear_kernel",
        "gather_kernel",
        "decode_kernel",
        "split_kernel",
        "merge_kernel",
        "prefill_kernel",
        "token_by_token_kernel",
        "block_by_block_kernel",
    }
    assert [each for each in corners if each["spilled"]] == []


@pytest.mark.skipif(
    find_spec("triton") is not None and version("triton") != COMPILED["triton"],
    reason="another Triton than the table's",
)
def test_the_table_says_what_the_compiler_says(corners: list[dict[str, Any]]) -> None:
    """Else a kernel or a configuration has changed: run `python -m benchmarks.compiled`."""
    of_the_package = [each for each in corners if "_by_" not in each["kernel"]]
    assert [each for each in of_the_package if each not in COMPILED["launches"][each["architecture"]]] == []
