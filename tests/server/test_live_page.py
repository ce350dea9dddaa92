"""The live page in headless Chromium, with a real engine behind it: it draws blocks, it answers, it converses."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.chatting import write_folder
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
        self.bodies: list[Any] = []  # that it has sent
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
                if body := params["request"].get("postData"):
                    self.bodies.append(json.loads(body))
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


@contextmanager
def serving(llm: LLM) -> Iterator[str]:
    """The address of a server's page."""
    ports: Queue[int] = Queue()
    server = Server(create_app(AsyncEngine(llm)), port=0, on_listening=ports.put)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield f"http://127.0.0.1:{ports.get(timeout=30)}/"
    server.stop()
    thread.join()


@pytest.fixture
def address() -> Iterator[str]:
    with serving(UnhurriedLLM(num_blocks=256, block_size=4, max_num_seqs=8)) as address:
        yield address


def test_it_draws_a_request_and_shows_its_answer(address: str, page: Page) -> None:
    page.call("Page.navigate", url=address)
    page.wait_for("document.getElementById('served')?.textContent.startsWith('minigpt · Chunked')")
    page.wait_for("document.getElementById('state').textContent === 'idle'")
    assert page.evaluate("document.getElementById('chat').hidden")  # MiniGPT has no chat template
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


SAID = "<i>日&"
NUM_SAID = len(SAID.encode())


def test_a_conversation(tmp_path: Path, page: Page) -> None:
    """With a model that says SAID again and again: history, markup as text, a stop, a new one, one that is too long."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_folder(folder, SAID, loops=True)
    llm = UnhurriedLLM(folder, num_blocks=256, block_size=4, prefix_caching=True)

    def send(text: str, *, max_tokens: int, until: str) -> list[dict[str, str]]:
        """Type it and press Enter; the messages that were sent last."""
        page.evaluate(f"document.getElementById('chat-max-tokens').value = {max_tokens}")
        page.evaluate("document.getElementById('message').focus()")
        page.call("Input.insertText", text=text)
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        page.call("Input.dispatchKeyEvent", type="keyDown", **key)
        page.wait_for(until)
        return page.bodies[-1]["messages"]

    def texts(of: str) -> list[str]:
        return page.evaluate(f"[...document.querySelectorAll('#turns {of}')].map((each) => each.textContent)")

    def answered(number: int) -> str:
        return f"document.querySelectorAll('#turns .ended').length === {number}"

    def turn(asked: str, said: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]

    with serving(llm) as address:
        page.call("Page.navigate", url=address)
        page.wait_for("document.getElementById('chat')?.hidden === false")
        assert page.evaluate("document.getElementById('try').open") is False
        send("<b>hi</b>", max_tokens=NUM_SAID, until=answered(1))
        messages = send("and?", max_tokens=NUM_SAID, until=answered(2))
        assert messages == [*turn("<b>hi</b>", SAID), {"role": "user", "content": "and?"}]
        assert texts(".asked") == ["<b>hi</b>", "and?"]
        assert texts(".given") == [SAID, SAID]
        assert all(head.startswith(f"{NUM_SAID} tokens, first token after") for head in texts(".head"))
        assert page.evaluate("document.querySelectorAll('#turns b, #turns i').length") == 0

        send("on", max_tokens=200, until="document.querySelectorAll('#turns .given')[2]?.textContent.length > 9")
        page.evaluate("document.getElementById('chat-stop').click()")
        page.wait_for(answered(3))
        assert page.evaluate("document.getElementById('chat-said').textContent") == "Stopped."
        page.wait_for("document.getElementById('state').textContent === 'idle'")
        stopped = texts(".given")[2]
        assert (SAID * 50).startswith(stopped)
        assert send("?", max_tokens=1, until=answered(4))[4:6] == turn("on", stopped)

        page.evaluate("document.getElementById('chat-new').click()")
        assert texts("li") == []
        send("x" * 150, max_tokens=NUM_SAID, until=answered(1))
        messages = send("y" * 150, max_tokens=NUM_SAID, until=answered(2))
        assert messages == [{"role": "user", "content": "y" * 150}]
        assert texts(".about") == ["The turns above no longer fit, and are left out."]
        send("z" * 300, max_tokens=1, until="document.querySelector('#chat-said.problem')?.textContent")
        assert page.evaluate("document.getElementById('message').value") == "z" * 300  # to be shortened
        assert llm.scheduler.stats.num_hit_tokens > 0
    assert all("400" in complaint for complaint in page.complaints), page.complaints
