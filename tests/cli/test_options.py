"""An engine's options reach all faces of it: `LLM`, an engine's process, and the commands that make engines."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, Field, fields
from typing import Any

import click
import msgspec
import pytest
import torch
from typer.main import get_command

from minicache.engine import LLM, SamplingParams
from minicache.engine.options import EngineOptions, Option, ReplicaOptions
from minicache.scheduler import create_scheduler
from minicache_cli.commands import app

COMMANDS: Any = get_command(app)
FIELDS = {each.name: each for each in fields(ReplicaOptions)}


def asked(command: str) -> dict[str, click.Parameter]:
    return {each.name: each for each in COMMANDS.commands[command].params if isinstance(each.name, str)}


def expected(each: Field[Any], command: str) -> Any:
    """The default of an option in a command; MISSING where the field says that it is left out."""
    option: Option = each.metadata["option"]
    face = option.faces.get(command)
    if face is None:
        return each.default
    assert face.why, f"{each.name} differs in {command}, and nothing says why"
    return MISSING if face.is_left_out else each.default if face.default is ... else face.default


@pytest.mark.parametrize(
    ("command", "kind"), [("serve", ReplicaOptions), ("simulate", EngineOptions)], ids=["serve", "simulate"]
)
def test_every_option_reaches_the_command(command: str, kind: type[EngineOptions]) -> None:
    params = asked(command)
    for each in fields(kind):
        default = expected(each, command)
        if default is MISSING:
            continue
        assert each.name in params, f"minicache {command} does not ask for {each.name}"
        param = params[each.name]
        is_off = param.opts[0].startswith("--no-")  # a flag that turns off what is on by default
        assert (not param.default if is_off else param.default) == default, each.name


def test_a_fleet_asks_for_some() -> None:
    params = asked("fleet")
    for name in ("model", "num_blocks", "max_num_seqs"):
        assert params[name].default == expected(FIELDS[name], "fleet")


def test_llm_takes_every_option_and_shows_it() -> None:
    parameters = inspect.signature(LLM).parameters
    assert next(iter(parameters)) == "model"
    for each in fields(EngineOptions):
        assert parameters[each.name].default == each.default
    with pytest.raises(TypeError, match="num_threads"):
        LLM(num_threads=1)
    assert LLM("minigpt-draft", num_blocks=40).model.config.num_layers < LLM(num_blocks=40).model.config.num_layers


def test_a_schedulers_options_have_its_defaults() -> None:
    parameters = inspect.signature(create_scheduler).parameters
    names = {each.name for each in fields(EngineOptions)} - {"num_blocks"}  # which only an engine can find out
    shared = {name: parameters[name].default for name in parameters.keys() & names}
    assert len(shared) >= 10
    for name, default in shared.items():
        assert FIELDS[name].default == default, name


def test_every_option_survives_the_message_to_a_process() -> None:
    others: dict[str, Any] = {}
    for each in fields(ReplicaOptions):
        others[each.name] = {bool: not each.default, int: 7, float: 0.5}.get(type(each.default), 3)
    strings = ("model", "device", "speculative")
    others |= dict.fromkeys(strings, "x") | {"scheduler": "paged", "cache": "dense", "preemption": "swap"}
    others |= {"kv_cache_dtype": "int8", "weight_dtype": "int4", "dtype": "float16"}
    others |= {"kv_tiers": ["cpu:1MB", "disk:kv"], "kv_tier_policy": "write_back"}
    options = ReplicaOptions(**others)
    assert all(getattr(options, each.name) != each.default for each in fields(options))
    assert msgspec.json.decode(msgspec.json.encode(options), type=ReplicaOptions) == options


def test_a_processs_engine_has_the_options_that_the_messages_had_lost() -> None:
    from minicache.serving.replica.llm import make_llm

    threads = torch.get_num_threads()
    options = ReplicaOptions(num_blocks=40, watermark=0.5, long_prefill_threshold=4, num_threads=threads)
    llm = make_llm(options)
    for _ in range(2):  # the threshold is not for a request that is alone
        llm.add_request([5] * 10, SamplingParams(max_tokens=2))
    assert llm.scheduler.schedule().num_scheduled_tokens == {0: 4, 1: 4}
