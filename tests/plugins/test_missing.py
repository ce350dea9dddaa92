"""A plug-in whose engine is not installed says so; the adapter needs none."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from minicache.errors import MissingExtraError


@pytest.mark.parametrize(
    ("plugin", "engine"), [("transformers", "transformers"), ("vllm", "vllm"), ("ray_local", "ray")]
)
def test_a_plug_in_without_its_engine_says_what_to_install(monkeypatch, plugin, engine):
    for name in [name for name in sys.modules if name == engine or name.startswith(f"{engine}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, engine, None)
    monkeypatch.delitem(sys.modules, f"minicache.plugins.{plugin}", raising=False)
    with pytest.raises(MissingExtraError, match=r"minicache-course\[(hf|scale)\]|docs/en/reference/plugins.md"):
        importlib.import_module(f"minicache.plugins.{plugin}")


def test_the_adapter_is_pure():
    code = "import sys, minicache.plugins.adapter; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
