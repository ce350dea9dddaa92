"""The live page in headless Chromium, with a real engine behind it: it draws blocks, and a prompt is answered."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.site.chromium import FLAGS, chromium

from minicache.engine.answers import Chunk
from minicache.engine.async_engine import AsyncEngine
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.serving.http.app import create_app
from minicache.serving.http.running import Server


class Page:
    """One page of a Chromium, over its debugging pipe: JSON messages with a zero byte after each."""

    def __init__(self, profile: Path) -> None:
        its_input, self._out = os.pipe()
        self._in, its_output = os.pipe()
        # It reads from file 3 and writes to file 4, whatever their numbers are here.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (its_input, its_output)]
        nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
        moved = [(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(ends, start=3)]
        command = [chromium(), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self._process = os.posix_spawn(command[0], command, os.environ, file_actions=[*nowhere, *moved])
        for end in (its_input, its_output, *ends):
            os.close(end)
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.urls: list[str] = []  # that it has asked for
        self.complaints: list[str] = []  # errors of the console, of scripts and of the network
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 20.0) -> Any:
        """Until `script` gives something true."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, f"never true: {script}\n{self.evaluate('document.body.innerText')}"
            time.sleep(0.02)
        return value

    def close(self) -> None:
        os.kill(self._process, signal.SIGTERM)
        os.waitpid(self._process, 0)
        os.close(self._out)
        os.close(self._in)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])


class UnhurriedLLM(LLM):
    """On any machine a run takes long enough to be looked at."""

    def step(self) -> list[Chunk]:
        time.sleep(0.003)
        return super().step()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    page = Page(tmp_path)
    yield page
    page.close()


@pytest.fixture
def address() -> Iterator[str]:
    ports: Queue[int] = Queue()
    llm = UnhurriedLLM(num_blocks=256, block_size=4, max_num_seqs=8)
    server = Server(create_app(AsyncEngine(llm)), port=0, on_listening=ports.put)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield f"http://127.0.0.1:{ports.get(timeout=30)}/"
    server.stop()
    thread.join()


def test_it_draws_a_request_and_shows_its_answer(address: str, page: Page) -> None:
    page.call("Page.navigate", url=address)
    page.wait_for("document.getElementById('served')?.textContent.startsWith('minigpt · Chunked')")
    page.wait_for("document.getElementById('state').textContent === 'idle'")
    assert "256 free" in page.evaluate("document.getElementById('pool-said').textContent")

    # What is drawn while it runs is noted by an observer in the page: the run may be over before we ask.
    page.evaluate(
        """
        window.most = { rows: 0, cells: 0, path: 0 };
        new MutationObserver(() => {
          const most = window.most;
          const path = document.querySelector("#pool .of.request-0:not(.reserved)").getAttribute("d") ?? "";
          most.rows = Math.max(most.rows, document.querySelectorAll("#tables > li").length);
          most.cells = Math.max(most.cells, document.querySelectorAll("#tables .cell").length);
          most.path = Math.max(most.path, path.split("M").length - 1);
        }).observe(document.getElementById("tables"), { childList: true, subtree: true });
        document.getElementById("temperature").value = "0";
        document.getElementById("max-tokens").value = "100";
        document.getElementById("prompt").value = "";
        document.getElementById("prompt").focus();
        """
    )
    page.call("Input.insertText", text="Yesterday I")
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    page.call("Input.dispatchKeyEvent", type="keyDown", **key)
    page.wait_for("document.getElementById('said').textContent === 'The answer is complete.'")
    page.wait_for("document.getElementById('state').textContent === 'idle'")

    most = page.evaluate("window.most")
    assert most["rows"] == 1
    assert most["cells"] >= 2  # of the 26 blocks that it needs at its end
    assert most["path"] >= 2
    expected = LLM().generate(["Yesterday I"], SamplingParams(max_tokens=100))[0]
    assert page.evaluate("document.querySelector('#answers .given').textContent") == expected.text
    assert page.evaluate("document.querySelector('#answers .ended').textContent") == expected.finish_reason
    assert page.evaluate("document.querySelectorAll('#steps .decode').length") == 60
    assert page.evaluate("document.querySelectorAll('#tables > li').length") == 0
    assert "256 free" in page.evaluate("document.getElementById('pool-said').textContent")

    page.evaluate("document.getElementById('prompt').value = 'Yesterday xyzzy'")
    page.evaluate("document.getElementById('send').click()")
    assert "xyzzy" in page.wait_for("document.querySelector('#said.problem')?.textContent")

    assert {urlsplit(url).netloc for url in page.urls} == {urlsplit(address).netloc}
    assert all("400" in complaint for complaint in page.complaints), page.complaints  # the browser tells of that one
