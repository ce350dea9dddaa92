"""Every kernel compiles for a Hopper GPU, which takes no GPU, and takes of a processor what its launcher counts on.

The interpreter runs what the compiler would refuse: a type that changes in a loop, a shape that is no power of two,
more shared memory than there is. This is what stands between that and the first user with a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SHARED_MEMORY = 227 * 1024
"""Bytes of it on a processor of a Hopper GPU that programs can have."""

REGISTERS = 64 * 1024
"""Registers of a processor."""

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Case → its kernels with registers and shared memory, or the error. In a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("hopper.py")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=380, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line.pop("case"): line for line in lines}


def test_every_launch_compiles(compiled: dict[str, Any]) -> None:
    errors = {case: found["error"] for case, found in compiled.items() if "error" in found}
    assert errors == {}
    assert {found["kernel"] for case in compiled.values() for found in case["kernels"]} == {
        "store_kernel",
        "gather_kernel",
        "decode_kernel",
        "split_kernel",
        "merge_kernel",
        "prefill_kernel",
        "token_by_token_kernel",
        "block_by_block_kernel",
    }


def test_no_kernel_spills_registers(compiled: dict[str, Any]) -> None:
    spilled = [case for case, found in compiled.items() if any(each["stack"] for each in found["kernels"])]
    assert [case for case in spilled if not case.startswith("ladder")] == []  # a rung is there to be climbed


def test_two_decode_programs_fit_on_a_processor(compiled: dict[str, Any]) -> None:
    for case, found in compiled.items():
        if case.startswith(("decode", "split_kv")):
            kernel = found["kernels"][0]
            assert 2 * kernel["shared"] <= SHARED_MEMORY, case
            assert 2 * kernel["registers"] * 4 * 32 <= REGISTERS, case


def test_tiles_of_keys_and_values_are_buffered_twice(compiled: dict[str, Any]) -> None:
    """With one buffer nothing is read while it is computed on: see `launch_options`."""
    assert compiled["decode bf16"]["kernels"][0]["shared"] >= 2 * 32 * 1024


def test_a_prefill_program_fits_on_a_processor(compiled: dict[str, Any]) -> None:
    for case, found in compiled.items():
        if case.startswith("prefill"):
            assert found["kernels"][0]["shared"] <= SHARED_MEMORY, case
