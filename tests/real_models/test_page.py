"""The page of the reference: its example runs, and its errors are those that are raised."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from minicache.errors import UnsupportedModelError
from minicache.model import load_folder
from minicache.model.folder import FAMILIES
from minicache.model.gguf import ARCHITECTURES
from minicache.model.gguf_file import TYPES

PAGE = Path(__file__).parents[2] / "docs/en/reference/models.md"


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python title=.*?\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    assert (tmp_path / "a-small-model/config.json").is_file()


def test_the_errors_are_those_that_are_raised(tmp_path):
    llama = {"architectures": ["LlamaForCausalLM"]}
    said = re.findall(r"^    /models/(\w+): (.*)$", PAGE.read_text(), re.MULTILINE)
    config = {
        "gemma": {"architectures": ["GemmaForCausalLM"]},
        "long": {**llama, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        | {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "max_position_embeddings": 8}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    }
    assert {name for name, _ in said} == set(config)
    for name, error in said:
        (tmp_path / "config.json").write_text(json.dumps(config[name]))
        with pytest.raises(UnsupportedModelError) as raised:
            load_folder(tmp_path)
        assert str(raised.value).startswith(f"{tmp_path}: {error.removesuffix(', …')}")


def test_the_table_names_all_families():
    assert all(f"`{name}`" in PAGE.read_text() for name in FAMILIES)


def test_the_table_of_gguf_files_is_complete():
    (table,) = re.findall(r"## GGUF files\n(.*?)\n## ", PAGE.read_text(), re.DOTALL)
    assert all(f"`{name}`" in table for name in ARCHITECTURES)
    assert f"| tensors | {', '.join(TYPES)} |" in table
