"""`minicache route` where it cannot: one line says why."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from minicache_cli import app


def test_without_its_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['httpx'] = None; from minicache_cli import main; main()"
    command = [sys.executable, "-c", code, "route", "--workers", "http://127.0.0.1:1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "httpx" in result.stderr
    assert "minicache-course[serve]" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--workers"),
        (["--workers", "127.0.0.1:8000"], "127.0.0.1:8000"),
        (["--workers", "ftp://a"], "ftp://a"),
        (["--workers", "http://a:1", "http://a:1/v1/"], "a URL is repeated"),
        (["--workers", "http://a:1", "http://b:port"], "http://b:port"),
    ],
)
def test_workers_that_are_none(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["route", *arguments])
    assert result.exit_code == 2
    assert told in result.output


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["route", "--workers", "http://127.0.0.1:1", "--port", str(port)])
    assert result.exit_code == 2
    assert str(port) in result.output
