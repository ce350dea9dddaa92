"""The systemd unit by systemd's own checks, and the compose file: what it mounts, and what its containers run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILES = {"one server": DEPLOY / "compose.yaml", "fleet": DEPLOY / "fleet/compose.yaml"}
COMPOSE, FLEET = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in FILES.values()]
UNIT = (DEPLOY / "minicache.service").read_text(encoding="utf-8")


def option(name: str) -> str:
    [value] = re.findall(rf"^{name}=(.+)$", UNIT, re.MULTILINE)
    return str(value)


def test_systemd_accepts_the_unit_and_finds_little_to_expose(program, tmp_path: Path) -> None:
    analyze, unit = program("systemd-analyze", "systemd"), tmp_path / "minicache.service"
    installed = str(Path(sys.executable).with_name("minicache"))
    unit.write_text(UNIT.replace("/opt/minicache/.venv/bin/minicache", installed), encoding="utf-8")
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr, done.stderr
    command = [analyze, "security", "--offline=true", "--threshold=20", str(unit)]  # of 100
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_systemd_waits_longer_than_the_server_drains() -> None:
    drain = float(re.findall(r"--drain-seconds (\d+)", UNIT)[0])
    assert float(option("TimeoutStopSec")) >= drain + 3 + 5
    assert option("KillMode") == "mixed"


def test_unit_and_compose_start_the_same_server() -> None:
    words = re.findall(r"^ExecStart=((?:.+\\\n)*.+)$", UNIT, re.MULTILINE)[0].replace("\\\n", " ").split()[1:]
    listed = " ".join(COMPOSE["services"]["server"]["command"]).replace("=", " ").split()
    assert [word for word in words if word not in ("--host", "127.0.0.1", "--port", "8000")] == listed


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_what_the_compose_file_mounts_is_there(file: Path) -> None:
    compose = yaml.safe_load(file.read_text(encoding="utf-8"))
    named = set(compose["volumes"])
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source, target, *mode = volume.split(":")
            assert source in named or (mode == ["ro"] and (file.parent / source).exists()), f"{name}: {volume}"
            assert target.startswith("/")
        if (build := service.get("build")) is not None:
            assert (file.parent / build["context"]).resolve() == ROOT
            assert (ROOT / build["dockerfile"]).is_file()


@pytest.mark.parametrize("compose", [COMPOSE, FLEET], ids=FILES)
def test_nothing_of_the_compose_file_listens_to_other_machines(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["network_mode"] == "host"
        assert "ports" not in service
        if name not in ("prometheus", "grafana"):
            assert "--host" not in " ".join(service["command"])  # 127.0.0.1 is the default
    assert "--web.listen-address=127.0.0.1:9090" in compose["services"]["prometheus"]["command"]
    assert compose["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize("name", ["worker-1", "worker-2", "router"])
def test_each_part_of_the_fleet_is_asked_where_it_listens(name: str) -> None:
    service = FLEET["services"][name]
    [port] = re.findall(r"--port=(\d+)", " ".join(service["command"]))
    assert f"http://127.0.0.1:{port}/health" in service["healthcheck"]["test"][-1]
    workers = [f"http://127.0.0.1:{number}" for number in (8001, 8002)]
    assert FLEET["services"]["router"]["command"][-2:] == workers
    scraped = yaml.safe_load((DEPLOY / "fleet/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert f"127.0.0.1:{port}" in [at for job in scraped for each in job["static_configs"] for at in each["targets"]]


def test_grafana_is_given_the_dashboards_and_prometheus() -> None:
    [source] = yaml.safe_load((DEPLOY / "grafana/datasources.yml").read_text(encoding="utf-8"))["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    [provider] = yaml.safe_load((DEPLOY / "grafana/dashboards.yml").read_text(encoding="utf-8"))["providers"]
    mounts = dict(volume.split(":")[1::-1] for volume in COMPOSE["services"]["grafana"]["volumes"])
    folder = (DEPLOY / mounts[provider["options"]["path"]]).resolve()
    for name in ("minicache.json", "route.json"):
        assert json.loads((folder / name).read_text(encoding="utf-8"))["title"]
    mounts = dict(volume.split(":")[1::-1] for volume in FLEET["services"]["grafana"]["volumes"])
    assert (DEPLOY / "fleet" / mounts[provider["options"]["path"]]).resolve() == folder


def test_the_health_check_of_the_container_tells_a_server_from_none(server) -> None:
    kind, python, *words = COMPOSE["services"]["server"]["healthcheck"]["test"]
    assert (kind, python) == ("CMD", "python")
    for port, is_well in ((server.port, True), (1, False)):
        command = [sys.executable, *(word.replace(":8000/", f":{port}/") for word in words)]
        assert (subprocess.run(command, capture_output=True, timeout=60).returncode == 0) == is_well


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_docker_reads_the_compose_file(file: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("no docker compose: its own check of compose.yaml is left out")
    settings = {**os.environ, "GRAFANA_PASSWORD": "one"}
    command = [docker, "compose", "-f", str(file), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=settings)
    assert done.returncode == 0, done.stderr
