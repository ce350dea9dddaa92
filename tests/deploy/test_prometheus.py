"""A real Prometheus, configured by deploy/, asks a real server; the dashboards and the alerts ask Prometheus."""

from __future__ import annotations

import json
import math
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ALERTS = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text(encoding="utf-8"))["groups"]
DASHBOARDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "dashboards").glob("*.json")}
SETTINGS = {"$model_name": ".*", "$__rate_interval": "1m"}
"""What Grafana puts in the place of a dashboard's variables."""
COMPARISON = re.compile(r"^(.+) (==|>) [0-9.]+$")

Ask = Callable[..., Any]


def dashboard_queries(name: str) -> list[str]:
    queries = [target["expr"] for panel in DASHBOARDS[name]["panels"] for target in panel.get("targets", ())]
    for name, value in SETTINGS.items():
        queries = [query.replace(name, value) for query in queries]
    return queries


def alert_queries() -> list[str]:
    """What the alerts compare with a threshold."""
    found = [COMPARISON.match(rule["expr"]) for group in ALERTS for rule in group["rules"]]
    return [match[1] for match in found if match is not None]


def asking(port: int) -> Ask:
    """A function that asks Prometheus' API."""

    def ask(path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]

    return ask


@pytest.fixture(scope="module")
def ask(prometheus_of, server) -> Iterator[Ask]:
    """Of Prometheus that asks a server."""
    with prometheus_of({8000: server.port}) as port:
        yield asking(port)


@pytest.fixture(scope="module")
def ask_of_fleet(prometheus_of, fleet) -> Iterator[Ask]:
    """Of Prometheus that asks two servers and the router."""
    with prometheus_of(fleet, "fleet/prometheus.yml") as port:
        yield asking(port)


def test_every_query_of_dashboards_and_alerts_finds_a_series(ask: Ask, server, key, wait_until) -> None:
    wait_until(lambda: [each["value"][1] for each in ask("query", query="up")["result"]] == ["1"], "it is asked")
    body = {"model": "minigpt", "prompt": "Yesterday I", "max_tokens": 40, "ignore_eos": True, "n": 2}
    for _ in range(2):
        assert server.ask("POST", "/v1/completions", body, Authorization=f"Bearer {key}")[0] == 200
        assert server.ask("POST", "/v1/completions", body, Authorization="Bearer no one's")[0] == 401
    num_tokens = server.metric("vllm:generation_tokens_total")
    newest = "sum(vllm:generation_tokens_total)"
    wait_until(lambda: ask("query", query=newest)["result"][0]["value"][1] == f"{num_tokens:g}", "it was asked again")

    queries = dashboard_queries("minicache") + alert_queries()
    assert len(queries) >= 30
    for query in queries:
        check_that_it_finds_a_series(ask, query, wait_until)


def check_that_it_finds_a_series(ask: Ask, query: str, wait_until: Callable[..., None]) -> None:
    wait_until(lambda: ask("query", query=query)["result"], f"there is a series of {query}")
    numbers = [float(each["value"][1]) for each in ask("query", query=query)["result"]]
    assert not any(map(math.isnan, numbers)), f"{query}: {numbers}"


def test_every_query_of_the_routers_dashboard_finds_a_series(
    ask_of_fleet: Ask, fleet: dict[int, int], wait_until
) -> None:
    up = "up == 1"
    wait_until(lambda: len(ask_of_fleet("query", query=up)["result"]) == 3, "two servers and the router are asked")
    body = json.dumps({"model": "minigpt", "prompt": "Yesterday I", "max_tokens": 8}).encode()
    url = f"http://127.0.0.1:{fleet[8000]}/v1/completions"

    def send() -> bool:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return bool(response.status == 200)

    assert all(send() for _ in range(4))
    answered = "sum(minicache:route_responses_total)"
    wait_until(lambda: [each["value"][1] for each in ask_of_fleet("query", query=answered)["result"]] == ["4"], "asked")
    assert all(send() for _ in range(4))  # a rate needs a change that was seen
    for query in dashboard_queries("route"):
        check_that_it_finds_a_series(ask_of_fleet, query, wait_until)
    assert {
        each["metric"]["worker"] for each in ask_of_fleet("query", query="minicache:route_worker_healthy")["result"]
    } == {f"http://127.0.0.1:{fleet[number]}" for number in (8001, 8002)}


def test_the_alerts_are_evaluated(ask: Ask, wait_until) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in ask("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "all rules were evaluated")
    assert {rule["name"] for rule in rules()} == {rule["alert"] for group in ALERTS for rule in group["rules"]}
    assert [rule.get("lastError") for rule in rules() if rule["health"] != "ok"] == []
    assert len(alert_queries()) == len(rules())


def test_each_alert_fires_when_it_should(promtool, tmp_path: Path) -> None:
    promtool("check", "config", ROOT / "deploy/prometheus.yml")
    promtool("check", "config", ROOT / "dashboards/prometheus.yml")
    for name in ("prometheus.yml", "../alerts.yml"):  # as the compose file mounts them
        shutil.copy(ROOT / "deploy/fleet" / name, tmp_path)
    promtool("check", "config", tmp_path / "prometheus.yml")
    promtool("test", "rules", Path(__file__).with_name("alerts.yml"))
