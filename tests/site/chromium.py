"""Chromium without a window, driven through its DevTools pipe: open a page, run scripts in it, see what it asks for."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str:
    """The program; without it the test is skipped, or fails where one has to be."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if path := shutil.which(name):
            return path
    if os.environ.get("MINICACHE_REQUIRE_CHROMIUM") == "1":
        pytest.fail("no browser: install the package `chromium`")
    pytest.skip("no browser: install the package `chromium` to have the pages looked at")


class Chromium:
    """A browser with one page. A context manager.

    Attributes:
        requests: the URL of everything that was asked for, workers included.
    """

    def __init__(self, profile: Path, *flags: str) -> None:
        self._command = [chromium(), *FLAGS, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        self.requests: list[str] = []
        self._rest = b""
        self._num_sent = 0
        self._answers: dict[int, dict[str, Any]] = {}  # that no one has taken yet
        self._loaded = False

    def __enter__(self) -> Chromium:
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()

        def connect() -> None:  # Chromium reads from file 3 and writes to file 4
            reads, writes = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            self._command, stdin=quiet, stdout=quiet, stderr=quiet, close_fds=False, preexec_fn=connect
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._page = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._follow(self._page)
        self._call("Page.enable", self._page)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self._loaded = False
        self._call("Page.navigate", self._page, url=url)
        self._read_until(lambda: self._loaded, 30, f"{url} to load")

    def evaluate(self, script: str, seconds: float = 60) -> Any:
        """The value of a JavaScript expression in the page, once it is there, if it is a promise."""
        answer = self._call(
            "Runtime.evaluate", self._page, seconds, expression=script, awaitPromise=True, returnByValue=True
        )
        if problem := answer.get("exceptionDetails"):
            raise AssertionError(f"{script}\n{problem.get('exception', problem).get('description', problem)}")
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> None:
        """Ask until the expression is true."""
        until = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({script})"):
            assert time.monotonic() < until, f"{seconds} s, and never true: {script}"
            self._read(0.05)

    def press(self, key: str, *, shift: bool = False, control: bool = False) -> None:
        """Press a key that writes nothing: "Tab", "Escape", "Enter", or "a" or "z" with control."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "a": 65, "z": 90}
        text = {"Enter": "\r"}.get(key, "")
        modifiers = 2 * control + 8 * shift
        about: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        self._call("Input.dispatchKeyEvent", self._page, type="keyDown", text=text, **about)
        self._call("Input.dispatchKeyEvent", self._page, type="keyUp", **about)

    def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        self._call("Input.insertText", self._page, text=text)

    def resize(self, width: int, height: int) -> None:
        """Give the page the size of another screen."""
        size: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", self._page, **size)

    def _follow(self, session: str) -> None:
        """Note the requests of a page or worker, and of the workers that it starts. It may be gone by now."""
        self._send("Network.enable", session)
        self._send("Target.setAutoAttach", session, autoAttach=True, waitForDebuggerOnStart=True, flatten=True)
        self._send("Runtime.runIfWaitingForDebugger", session)

    def _send(self, method: str, session: str = "", **params: Any) -> int:
        """Ask for something; the number that the answer will have."""
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        return self._num_sent

    def _call(self, method: str, session: str = "", seconds: float = 30, **params: Any) -> dict[str, Any]:
        number = self._send(method, session, **params)
        self._read_until(lambda: number in self._answers, seconds, method)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        return dict(answer["result"])

    def _read_until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < until, f"Chromium took more than {seconds} s for {what}"
            self._read(0.2)

    def _read(self, seconds: float) -> None:
        """Take in what has come, waiting a little for it."""
        if not select.select([self._in], [], [], seconds)[0]:
            return
        *messages, self._rest = (self._rest + os.read(self._in, 2**20)).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._hear(message["method"], message["params"], message.get("sessionId", ""))

    def _hear(self, event: str, about: dict[str, Any], session: str) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Page.loadEventFired" and session == self._page:
            self._loaded = True
        elif event == "Target.attachedToTarget" and session:  # a worker of the page
            self._follow(about["sessionId"])
