"""A headless Chromium that tests steer over its DevTools protocol: it opens pages at a width, reports what went wrong, and takes pictures."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--remote-debugging-port=0",
]
SECONDS = 300  # for one answer: only a hang takes longer


def chromium() -> str | None:
    """Path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """An empty folder for a profile. Without Chromium the test is skipped, or fails if FAIL_WITHOUT_BROWSER is set."""
    if chromium() is None:
        assert not os.environ.get("FAIL_WITHOUT_BROWSER"), "FAIL_WITHOUT_BROWSER is set, but chromium is not installed"
        pytest.skip("chromium is not installed")
    (tmp_path / "profile").mkdir()
    return tmp_path / "profile"


@dataclass
class Tab:
    """A tab. Every event of the page since the last :meth:`open` is in ``events``."""

    socket: Any
    session: str
    events: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and returns its result. Events that arrive before it are kept."""
        self.sent += 1
        await self.socket.send_json({"id": self.sent, "sessionId": self.session, "method": method, "params": arguments})
        while (message := await self._received()).get("id") != self.sent:
            pass
        assert "error" not in message, f"{method}: {message}"
        return message["result"]

    async def _received(self) -> dict[str, Any]:
        message = await self.socket.receive_json(timeout=SECONDS)
        if "method" in message:
            self.events.append(message)
        return message

    async def open(self, url: str) -> None:
        """Opens a page and waits until it and its scripts are loaded."""
        self.events.clear()
        await self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            await self._received()

    async def resize(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Sets the size of the window, and whether the reader prefers dark pages."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def picture(self, path: Path) -> None:
        """Writes a PNG of the visible part of the page."""
        taken = await self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(taken["data"]))

    def requests(self) -> list[str]:
        return [
            each["params"]["request"]["url"] for each in self.events if each["method"] == "Network.requestWillBeSent"
        ]

    def errors(self) -> list[str]:
        """Errors of the console, uncaught exceptions and failed requests."""
        found = []
        for event in self.events:
            told = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(told["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
                found.append(json.dumps(told["args"]))
            elif event["method"] == "Log.entryAdded" and told["entry"]["level"] == "error":
                found.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        return found


@asynccontextmanager
async def opened_tab(folder: Path) -> AsyncIterator[Tab]:
    """Starts Chromium with a profile in ``folder``, which must be empty, and ends it afterwards."""
    import aiohttp

    program = chromium()
    assert program is not None, "expected chromium on PATH, got none: install Debian's package chromium"
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = folder / "DevToolsActivePort"
        while not (port.is_file() and len(port.read_text().splitlines()) == 2):
            assert process.poll() is None, f"chromium ended with {process.returncode} before it listened"
            await asyncio.sleep(0.05)
        number, path = port.read_text().splitlines()
        async with (
            aiohttp.ClientSession() as client,
            client.ws_connect(f"ws://127.0.0.1:{number}{path}", max_msg_size=0) as socket,
        ):
            tab = Tab(socket, "")
            await socket.send_json({"id": 0, "method": "Target.createTarget", "params": {"url": "about:blank"}})
            made = (await socket.receive_json(timeout=SECONDS))["result"]["targetId"]
            attach = {"targetId": made, "flatten": True}
            await socket.send_json({"id": -1, "method": "Target.attachToTarget", "params": attach})
            while (message := await socket.receive_json(timeout=SECONDS)).get("id") != -1:
                pass
            tab.session = message["result"]["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            yield tab
    finally:
        process.terminate()
        process.wait()
