"""`minicache serve` where it cannot: the user is told in one line why."""

from __future__ import annotations

import socket
import sys

import pytest
from typer.testing import CliRunner

from minicache.cli import app
from minicache.errors import CheckpointError, MissingExtraError


@pytest.mark.parametrize("module", ["fastapi", "uvicorn", "prometheus_client", "httptools"])
def test_without_its_extra_it_says_what_to_install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith(("minicache.server", "uvicorn.protocols"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    result = CliRunner().invoke(app, ["serve"])
    assert isinstance(result.exception, MissingExtraError)
    assert module in str(result.exception)
    assert "minicache[serve]" in str(result.exception)


def test_a_model_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(app, ["serve", "--model", "/nowhere/at/all"])
    assert isinstance(result.exception, CheckpointError)
    assert "/nowhere/at/all" in str(result.exception)


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--port", str(port), "--model", "/nowhere/at/all"])
    assert result.exit_code == 2
    assert str(port) in result.output
    assert "--port" in result.output
