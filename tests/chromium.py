"""A headless Chromium driven over its DevTools protocol: opens a page, evaluates, presses keys, takes pictures."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def installed() -> str | None:
    """Chromium as Debian or others name it."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab; `problems` are errors of the console, scripts and content policy, `requests` what it asked for."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=300))
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                answer: dict[str, Any] = message["result"]
                return answer
            self._heard(message)

    def _heard(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, waited for if it is a promise."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:1000])
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 300.0) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} did not become true; problems: {self.problems}")
            time.sleep(0.05)

    def size(self, width: int, height: int = 900, *, phone: bool = False) -> None:
        """The size of the window."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefer(self, scheme: str) -> None:
        """Light or dark, as the system would say."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        """Load a page and wait until its plots are drawn."""
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.documentElement.dataset.plots === 'drawn'")

    def press(self, key: str, text: str = "", code: int = 0) -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                text=text if kind == "keyDown" else "",
                windowsVirtualKeyCode=code,
            )

    def type(self, text: str) -> None:
        """Letters into what has the focus."""
        for letter in text:
            self.press(letter, letter, ord(letter.upper()))

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A screenshot, of the whole page if asked."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browsing() -> Iterator[Page]:
    """A tab of a fresh Chromium without a network, and without anything of the user's."""
    program = installed()
    assert program is not None
    # Processes of Chromium end one after the other, and the last of them may still write into the profile.
    with tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True) as profile:
        arguments = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            "--remote-debugging-port=0",
            "about:blank",
        ]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(arguments, start_new_session=True, **quiet)
        try:
            with connect(_tab(Path(profile), process), max_size=None, proxy=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            process.wait(timeout=300)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _tab(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """The address of a new tab, as soon as Chromium has said where it listens."""
    listening = profile / "DevToolsActivePort"
    deadline = time.monotonic() + 300
    while not (listening.exists() and len(listening.read_text().split()) == 2):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Chromium did not start (exit code {process.poll()}).")
        time.sleep(0.05)
    port, path = listening.read_text().split()
    with connect(f"ws://127.0.0.1:{port}{path}", proxy=None) as browser:
        browser.send(json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}))
        while (message := json.loads(browser.recv(timeout=300))).get("id") != 1:
            continue
    return f"ws://127.0.0.1:{port}/devtools/page/{message['result']['targetId']}"
