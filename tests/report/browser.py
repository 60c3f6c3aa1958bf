"""A real browser without a window, driven through its own debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The program of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium. ``events`` has all that it reported: logs, exceptions, requests."""

    def __init__(self, program: str, profile: Path) -> None:
        self._program, self._profile = program, profile
        self.events: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        self._process = subprocess.Popen(
            [self._program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
             "--no-first-run", "--disable-background-networking", "--disable-component-update",
             "--force-color-profile=srgb",
             f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._session = aiohttp.ClientSession()
        try:
            port = await self._port()
            async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (page,) = [target for target in await answer.json() if target["type"] == "page"]
            self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
            self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
            self._number = 0
            self._reader = asyncio.create_task(self._read())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await self.call(f"{domain}.enable")
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._end()

    async def _end(self) -> None:
        await self._session.close()
        self._process.terminate()
        self._process.wait(20)

    async def _port(self) -> int:
        stop = time.monotonic() + 60
        path = self._profile / "DevToolsActivePort"
        while time.monotonic() < stop:
            if path.exists() and (lines := path.read_text().split()):
                return int(lines[0])
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._program} ended with code {self._process.returncode}")
            await asyncio.sleep(0.05)
        raise TimeoutError(f"{self._program} opens no port")

    async def _read(self) -> None:
        async for message in self._socket:
            value = message.json()
            if "id" in value:
                self._answers.pop(value["id"]).set_result(value)
            else:
                self.events.append(value)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        value = await asyncio.wait_for(answer, 60)
        if "error" in value:
            raise RuntimeError(f"{method}: {value['error']}")
        result: dict[str, Any] = value["result"]
        return result

    async def open(self, url: str) -> None:
        """Load ``url`` and wait for its end."""
        before = len(self.events)
        await self.call("Page.navigate", url=url)
        await self.until(
            lambda: any(event["method"] == "Page.loadEventFired" for event in self.events[before:])
        )

    async def until(self, holds: Callable[[], bool]) -> None:
        stop = time.monotonic() + 60
        while not holds():
            if time.monotonic() > stop:
                raise TimeoutError
            await asyncio.sleep(0.02)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page. Raises AssertionError where it throws."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def key(self, key: str, code: int, text: str = "") -> None:
        """Press and release one key."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more
            )

    async def words(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def look(self, width: int, height: int, scheme: str = "light", media: str = "screen") -> None:
        """Set the window and the reader's preference."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.call(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    async def shoot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def pdf(self, path: Path) -> None:
        """The page as it prints."""
        await self.call("Emulation.setEmulatedMedia", media="print")
        made = await self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(made["data"]))

    def seen(self, method: str) -> list[dict[str, Any]]:
        """What was reported as ``method``."""
        return [event["params"] for event in self.events if event["method"] == method]


def drive(program: str, profile: Path, script: Callable[[Browser], Awaitable[None]]) -> None:
    """Run ``script`` with one browser."""

    async def main() -> None:
        async with Browser(program, profile) as browser:
            await script(browser)

    asyncio.run(main())
