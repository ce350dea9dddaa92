"""Bodies that no one would think of, made from the API's own description: none of them is an error of the server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")

from schemathesis import checks  # noqa: E402
from schemathesis.specs.openapi import checks as openapi_checks  # noqa: E402

NUM_EXAMPLES = int(os.environ.get("MINICACHE_SCHEMATHESIS_EXAMPLES", "15"))
CHECKS = (
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
)


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Iterator[Any]:
    with serve_for_module() as running:
        yield running


@pytest.fixture(scope="module")
def described(server: Any) -> Any:
    return schemathesis.openapi.from_dict(server.ask("GET", "/openapi.json").json)


OPERATIONS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
)


def test_these_are_all_operations(described: Any) -> None:
    found = [(each.ok().method.upper(), each.ok().path) for each in described.get_all_operations()]
    assert sorted(found) == sorted(OPERATIONS)


MODES = schemathesis.GenerationMode
CASES = [
    pytest.param(method, path, mode, id=f"{path}-{mode.value}")
    for method, path in OPERATIONS
    for mode in MODES
    if method == "POST" or mode is MODES.POSITIVE  # the others take nothing that could be wrong
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_no_request_is_an_error_of_the_server(server: Any, described: Any, method: str, path: str, mode: Any) -> None:
    operation = described[path][method]

    @settings(max_examples=NUM_EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def no_request_is(case: Any) -> None:
        response = case.call(base_url=f"http://127.0.0.1:{server.port}", timeout=60)
        case.validate_response(response, checks=CHECKS)

    no_request_is()


EXTREME = (10**30, -(10**30), 10**26, 2**64, 2**64 - 1, 2**63, -(2**63) - 1, 2**53 + 1, 2**31, -(2**31) - 1, 10**400)
NOT_INTEGERS = (1e308, -1e308, 5e-324, -0.0, True, "", "\ud800", [], {}, [10**30], {"a": 10**30}, [[10**30]])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "I", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "I"}], "max_tokens": 1}),
    ],
    ids=["completions", "chat"],
)
def test_any_field_may_be_extreme_and_is_named_if_it_is_refused(server: Any, path: str, fields: Any) -> None:
    """Schemathesis draws numbers near the bounds of the schema; these are beyond what a machine's integers hold."""
    api = server.ask("GET", "/openapi.json").json
    schema = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
    for name in api["components"]["schemas"][schema]["properties"]:
        for value in (*EXTREME, *NOT_INTEGERS):
            answer = server.ask("POST", path, {**fields, name: value})
            assert answer.status in (200, 400, 404), (name, value, answer.body)
            if answer.status == 400 and type(value) is int:
                assert answer.json["error"]["param"] == name, (value, answer.body)


def test_after_all_of_that_nothing_is_left(server: Any) -> None:
    server.wait_until_idle()
    server.assert_all_is_given_back()
    assert server.complete(max_tokens=2).status == 200
