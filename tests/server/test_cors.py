"""Web pages of other origins: which may ask from a browser, by the headers and in a real one."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.test_live_page import Page

from minicache.serving.http.keys import ApiKeys

pytestmark = pytest.mark.parametrize("engine_kind", ["process"], indirect=True)

LAB = "https://lab.example"
WISH = {"prompt": "Yesterday I", "max_tokens": 3, "temperature": 0}


def preflight(server: Any, origin: str, path: str = "/v1/completions") -> Any:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    return server.ask("OPTIONS", path, headers=asked)


def test_without_the_option_no_origin_is_let_in(serve: Any) -> None:
    server = serve()
    for answer in (preflight(server, LAB), server.ask("POST", "/v1/completions", WISH, {"Origin": LAB})):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert preflight(server, LAB).status == 405


@pytest.mark.parametrize("allowed", [[LAB, "http://localhost:5173"], ["*"]], ids=str)
def test_an_allowed_origin_reads_answers_streams_and_refusals(serve: Any, tmp_path: Path, allowed: list[str]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[keys.ada]\nkey = "ada-1"\n[keys.low]\nkey = "low-1"\ntokens_per_minute = 6\n', encoding="utf-8")
    server = serve(api_keys=ApiKeys.of_file(path), allow_origins=allowed, max_body_nbytes=1000)
    answer = preflight(server, LAB)
    assert answer.status == 200
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert "x-stainless-lang" in answer.headers["access-control-allow-headers"].lower()
    assert "POST" in answer.headers["access-control-allow-methods"]
    statuses = []
    for key, fields in (("ada", {}), ("ada-1", {}), ("ada-1", {"stream": True}), ("low-1", {}), ("low-1", {})):
        headers = {"Origin": LAB, "Authorization": f"Bearer {key}"}
        answer = server.ask("POST", "/v1/completions", WISH | fields, headers)
        statuses.append(answer.status)
        assert answer.headers["access-control-allow-origin"] == ("*" if allowed == ["*"] else LAB)
        assert "retry-after" in answer.headers["access-control-expose-headers"].lower()
        assert "access-control-allow-credentials" not in answer.headers
    assert statuses == [401, 200, 200, 200, 429]
    for headers, body in (({"Content-Type": "text/plain"}, WISH), ({}, {"prompt": "I" * 2000}), ({}, {"prompt": 1.5})):
        headers = {"Origin": LAB, "Authorization": "Bearer ada-1", **headers}
        answer = server.ask("POST", "/v1/completions", body, headers)
        assert answer.status in (400, 413, 415)
        assert answer.headers["access-control-allow-origin"]


def test_another_origin_is_told_nothing(serve: Any) -> None:
    server = serve(allow_origins=[LAB])
    for origin in ("https://other.example", "http://lab.example", LAB + ".evil.example", "https://lab.example:8443"):
        assert preflight(server, origin).status == 400
        answer = server.ask("POST", "/v1/completions", WISH, {"Origin": origin})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["lab.example", LAB + "/", LAB + "/page", "https://*.example", "", "https://Lab.example"]
)
def test_what_is_no_origin(serve: Any, origin: str) -> None:
    with pytest.raises(ValueError, match="expected an origin such as"):
        serve(allow_origins=[origin])


# In a browser


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    page = Page(tmp_path / "chromium")
    yield page
    page.close()


@pytest.fixture
def pages_at(tmp_path: Path) -> Iterator[list[str]]:
    """Two web servers with an empty page each: two origins."""
    (tmp_path / "www").mkdir()
    (tmp_path / "www/index.html").write_text("<!doctype html><title>A page</title>", encoding="utf-8")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=tmp_path / "www")
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
    for each in servers:
        threading.Thread(target=each.serve_forever, args=(0.01,)).start()
    yield [f"http://127.0.0.1:{each.server_port}" for each in servers]
    for each in servers:
        each.shutdown()
        each.server_close()


def go(page: Page, url: str) -> None:
    page.call("Page.navigate", url="about:blank")
    page.wait_for("location.href === 'about:blank'")
    page.call("Page.navigate", url=url)
    page.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")


ASK = """(async () => {
  const options = {method: "POST", body: JSON.stringify(%s),
    headers: {"Content-Type": "application/json", Authorization: "Bearer %s"}};
  try {
    const response = await fetch("%s/v1/completions", options);
    return [response.status, await response.text(), response.headers.get("X-Request-Id")];
  } catch (error) { return [0, error.message, null]; }
})()"""


def test_two_origins_in_a_browser(serve: Any, page: Page, pages_at: list[str]) -> None:
    allowed, other = pages_at
    server = serve(api_key="ada-1", allow_origins=[allowed])
    url = f"http://127.0.0.1:{server.port}"

    def ask(key: str, body: str) -> Any:
        return page.evaluate(ASK % (body, key, url))

    go(page, allowed)
    status, text, request_id = ask("ada-1", '{prompt: "Yesterday I", max_tokens: 3, stream: true}')
    assert status == 200
    assert text.startswith("data: ")
    assert text.endswith("data: [DONE]\n\n")
    assert request_id
    status, text, _ = ask("wrong", '{prompt: "Yesterday I"}')
    assert (status, "invalid_api_key" in text) == (401, True)
    go(page, other)
    assert ask("ada-1", '{prompt: "Yesterday I", max_tokens: 3}')[0] == 0


def test_the_page_behind_a_key_asks_for_it_once(serve: Any, page: Page) -> None:
    server = serve(api_key="ada-1")
    go(page, f"http://127.0.0.1:{server.port}/")
    assert page.evaluate("document.getElementById('served') === null")
    go(page, f"http://anyone:ada-1@127.0.0.1:{server.port}/")  # what the browser's dialog does; then it knows
    go(page, f"http://127.0.0.1:{server.port}/")
    page.wait_for("document.getElementById('served')?.textContent.startsWith('minigpt · Chunked')")
    page.wait_for("document.getElementById('state').textContent === 'idle'")
    page.evaluate("document.getElementById('prompt').value = 'Yesterday I'")
    page.evaluate("document.getElementById('send').click()")
    page.wait_for("document.getElementById('said').textContent === 'The answer is complete.'")
    assert page.evaluate("document.getElementById('key-label').hidden")
