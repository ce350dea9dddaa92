"""`minicache serve` where it cannot: the user is told in one line why."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from minicache.cli import app
from minicache.errors import CheckpointError


@pytest.mark.parametrize("module", ["fastapi", "prometheus_client"])
def test_without_its_extra_it_says_what_to_install(module: str) -> None:
    """In a process of its own: modules that were imported without it are no good to other tests."""
    code = f"import sys; sys.modules[{module!r}] = None; from minicache.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "serve"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert module in result.stderr
    assert "minicache[serve]" in result.stderr


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
