"""The names that a user types first: found in their packages, imported when they are first used."""

import importlib
import subprocess
import sys

import pytest

NAMES = {
    "minicache": "LLM SamplingParams AsyncEngine KVCache PagedKVCache BlockPool BlockTable Request create_scheduler",
    "minicache.arithmetic": "kv_bytes_per_token step_flops Transformer Accelerator",
    "minicache.memory": "BlockPool BlockTable CachingBlockPool ContiguousReservation",
    "minicache.cache": "KVCache PagedKVCache PagedStorage RaggedStep SelectiveStep HostStorage causal_attention",
    "minicache.fleet": "PowerOfTwoRouter PrefixAffinityRouter Membership ReplicaView RoutedRequest create_router",
    "minicache.engine": "LLM AsyncEngine SamplingParams Chunk Completion beam_search NgramDrafter",
}


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in NAMES for name in NAMES[package].split()])
def test_a_name_is_found_where_it_is_listed(package: str, name: str) -> None:
    module = importlib.import_module(package)
    assert name in dir(module)
    assert getattr(module, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'NoSuchName' from 'minicache'"):
        exec("from minicache import NoSuchName")
    with pytest.raises(AttributeError, match=r"module 'minicache\.cache' has no attribute 'kvcache'"):
        _ = importlib.import_module("minicache.cache").kvcache


def test_pure_names_bring_in_no_torch() -> None:
    names = "BlockPool, BlockTable, Request, create_scheduler"
    code = f"from minicache import {names}; import sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
