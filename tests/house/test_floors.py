"""The guarantees about imports: what a lower layer may bring in, and which way the arrows point."""

import json
import subprocess
import sys

import pytest

LOWER_FLOOR = [
    "minicache",
    "minicache.errors",
    "minicache.palette",
    "minicache.arithmetic.arithmetic",
    "minicache.arithmetic.paper",
    "minicache.grammar",
    "minicache.memory.blocks",
    "minicache.memory.reservation",
    "minicache.memory.prefix",
    "minicache.simulator",
    "minicache.simulator.prompts",
    "minicache.request",
    "minicache.trace",
    "minicache.scheduler",
    "minicache.scheduler.observe",
    "minicache.scheduler.drive",
]


@pytest.mark.parametrize("module", LOWER_FLOOR)
def test_lower_floor_is_pure_standard_library(module: str) -> None:
    code = f"import json, sys; import {module}; print(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"
    # -S keeps site-packages' .pth files from importing anything by themselves; the path is given by hand instead.
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    foreign = set(json.loads(loaded)) - set(sys.stdlib_module_names) - {"minicache", "__main__"}
    assert not foreign, f"import {module} brings in {sorted(foreign)}"


@pytest.mark.slow
def test_without_the_extra_for_real_models_all_else_works() -> None:
    """`minicache-course[hf]` is asked for when a folder's tokenizer or a hub name is, and not before."""
    code = """
import sys
for name in ("transformers", "tokenizers", "huggingface_hub", "jinja2"):
    sys.modules[name] = None
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
assert LLM(num_blocks=10).generate(["She"], SamplingParams(max_tokens=3))[0].text
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_arrows_point_down() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
