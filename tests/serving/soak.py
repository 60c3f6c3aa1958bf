"""Requests over adapters that come and go, against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import aiohttp
from live_server import LiveServer

REQUESTS = 2000 if os.environ.get("LORAFORGE_SOAK") == "1" else 200
ADAPTERS = 85
# bytes that a server of some 4 GB may grow by in half a soak, which in its full length puts 4 GB of adapters into slots
MEMORY = 64 << 20


class Soak:
    """Requests over adapters that are loaded and unloaded all the while; fails at the first that is not answered."""

    def __init__(self, server: LiveServer, folders: dict[str, Path], seed: int) -> None:
        self.server, self.folders, self.random = server, folders, random.Random(seed)
        self.loaded: set[str] = set()
        self.open = dict.fromkeys(folders, 0)  # requests on their way, by name
        self.left = self.changes = 0

    def run(self, requests: int) -> None:
        self.left = requests
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as self.session:
            # more names than slots, and than adapters that the engine keeps in host memory
            while len(self.loaded) < 30:
                await self._load(self._other())
            await asyncio.gather(*(self._ask() for _ in range(8)), self._change())
            for name in sorted(self.loaded):
                await self._unload(name)

    async def _ask(self) -> None:
        while self.left:
            self.left -= 1
            name = self.random.choice(sorted(self.loaded))
            self.open[name] += 1
            prompt = [self.random.randrange(100, 1000) for _ in range(4)]
            body = self.server.asked(name, prompt=prompt, max_tokens=2, ignore_eos=True)
            answer = await self._post("/v1/completions", body)
            assert json.loads(answer)["usage"]["completion_tokens"] == 2
            self.open[name] -= 1

    async def _change(self) -> None:
        """Load and unload at random, as long as there are requests; never what a request is on its way to."""
        while self.left:
            await asyncio.sleep(self.random.expovariate(10.0))
            idle = sorted(name for name in self.loaded if not self.open[name])
            if idle and self.random.random() < len(self.loaded) / 60:
                await self._unload(self.random.choice(idle))
            else:
                await self._load(self._other())

    def _other(self) -> str:
        return self.random.choice(sorted(self.folders.keys() - self.loaded))

    async def _load(self, name: str) -> None:
        await self._post(self.server.LOAD, {"lora_name": name, "lora_path": str(self.folders[name])})
        self.loaded.add(name)
        self.changes += 1

    async def _unload(self, name: str) -> None:
        self.loaded.remove(name)
        await self._post(self.server.UNLOAD, {"lora_name": name})
        self.changes += 1

    async def _post(self, path: str, body: dict[str, Any]) -> str:
        async with self.session.post(f"{self.server.engine.url}{path}", json=body) as response:
            text = await response.text()
            assert response.status == 200, f"{path} {body}: {text}"
            return text


def soak(server: LiveServer, folder: Path, adapters: list[Path]) -> None:
    """Ask for copies of these adapters in four parts, and hold pool and host memory against each other after each."""
    folders = {}
    for number in range(ADAPTERS):
        link = folder / f"copy_{number}"
        link.symlink_to(adapters[number % len(adapters)])
        folders[link.name] = link
    before = server.counts()
    load = Soak(server, folders, seed=1)
    sizes = []
    for _ in range(4):  # in the first half every page of the pool, too, is touched at last
        load.run(REQUESTS // 4)
        sizes.append(server.memory())
        end = server.counts()
        # nothing is left of what was unloaded
        assert (end["adapters"], end["live_bytes"], end["loads"] - end["unloads"]) == (0, 0, 0)
    print(
        f"{REQUESTS} requests, {load.changes} loads and unloads by name, {end['loads'] - before['loads']} into slots"
    )
    print("resident MB after each quarter:", *(f"{size / 1e6:.1f}" for size in sizes))
    assert load.changes > REQUESTS // 10
    assert end["loads"] - before["loads"] > REQUESTS // 2  # adapters were paged all the while
    assert sizes[3] - sizes[1] < MEMORY
