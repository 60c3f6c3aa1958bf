"""A real HTTP server that speaks streaming completions as an engine does, and misbehaves on request.

An adapter's name says how: ``ok``, ``e404`` and ``e500`` (before the stream), ``inband`` (an error in it), ``reset``
(the connection dropped after two tokens), ``short`` (a token too few), ``hang``, ``nousage``, ``garbage``,
``mistyped``, ``cut`` (no [DONE]), ``empty`` (no text at all), ``crumbs`` (events cut into bytes).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class CompletionsServer:
    """first_s, token_s: seconds to the first token and between tokens. ended: who was answered to the last word."""

    first_s: float = 0.0
    token_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    peers: set[Any] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    url: str = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        return app

    async def listen(self, port: int) -> web.AppRunner:
        runner = web.AppRunner(self.app(), shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return runner

    def __enter__(self) -> CompletionsServer:
        """Serve from a thread, since the client has the main one for its signals."""
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.runner = asyncio.run_coroutine_threadsafe(self.listen(0), self.loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        asyncio.run_coroutine_threadsafe(self._settle(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _settle(self) -> None:
        """Let the handlers of dropped connections end."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def close(self) -> None:
        """Listen no more, and drop what is open."""
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result()

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        cards = [{"id": "tuned", "parent": "base"}, {"id": "base", "parent": None}]
        return web.json_response({"object": "list", "data": cards})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.arrived.append(time.perf_counter())
        asked = await request.json()
        self.bodies.append(asked)
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        how = asked.get("lora_path", asked["model"])
        self.count(how)
        if how == "e404":
            return web.json_response({"error": {"message": f"The model `{how}` does not exist."}}, status=404)
        if how == "e500":
            return web.Response(text="Internal Server Error", status=500)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await asyncio.sleep(self.first_s)
        if how == "hang":
            await asyncio.sleep(3600)
        if how == "garbage":
            await answer.write(b"data: [1, 2\n\n")
            return answer
        if how == "mistyped":
            await self._send(answer, {"choices": [{"text": 7}]})
            return answer
        count = (asked.get("custom_params") or {}).get("loraforge_stop_at", asked["max_tokens"]) - (
            how == "short"
        )
        self.trace(asked)
        for place in range(count):
            if place:
                await asyncio.sleep(self.token_s)
            if how == "inband" and place == 1:
                await self._send(answer, {"error": {"message": "EngineCore\n died", "code": 500}})
            if how == "reset" and place == 2:
                request.transport.abort()
                return answer
            text = "" if how == "empty" else f" t{place}é"
            last = "length" if place == count - 1 else None
            event = {"choices": [{"index": 0, "text": text, "finish_reason": last}], "usage": None}
            await self._send(answer, event, piece=1 if how == "crumbs" else 1 << 16)
        if how != "nousage":
            usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": count}
            await self._send(answer, {"choices": [], "usage": usage})
        if how == "cut":
            return answer
        await answer.write(b"data: [DONE]\n\n")
        self.ended.append(how)
        return answer

    def count(self, adapter: str | None = None) -> None:
        """Write the counters that an engine's plugin would, of one byte a load."""
        if (path := os.environ.get("LORAFORGE_COUNTERS")) is None or adapter in ("base", *self.seen):
            return
        self.seen += [adapter] if adapter else []
        loads = len(self.seen)
        values = {
            "execution": "loraforge",
            "pool": "ragged",
            "loads": loads,
            "unloads": 0,
            "source_bytes": loads,
        }
        values |= {
            "moves": 0,
            "capacity_bytes": 64,
            "live_bytes": loads,
            "lora_bytes": 100,
            "adapters": loads,
        }
        temporary = f"{path}.new"
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump(values | {"peak_allocated_bytes": None}, stream)
        os.replace(temporary, path)

    def trace(self, asked: dict[str, Any]) -> None:
        """Add a step to the trace that an engine's plugin would keep, of the request's prompt alone."""
        if (path := os.environ.get("LORAFORGE_ADMISSION_TRACE")) is None:
            return
        with open(path, "a", encoding="utf-8") as stream:
            step = {
                "step": len(self.bodies),
                "time": time.time(),
                "held": False,
                "running": 2,
                "unfinished": 5,
            }
            step |= {"prefill_tokens": asked["max_tokens"], "prefill_requests": 1}
            stream.write(json.dumps(step | {"decode_tokens": 1, "decode_requests": 1}) + "\n")

    async def _send(self, answer: web.StreamResponse, event: dict[str, Any], piece: int = 1 << 16) -> None:
        data = b": comment\r\ndata: " + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\r\n"
        for at in range(0, len(data), piece):
            await answer.write(data[at : at + piece])
            if piece == 1:
                await asyncio.sleep(0)


def main() -> None:
    """Serve as a process: slow to start, crashing, stubborn or with a child, as an engine may be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--start-s", type=float, default=0.0)
    parser.add_argument("--first-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=float(os.environ.get("TOKEN_S", "0")))
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--crash-as", default="", help="the arm that crashes")
    parser.add_argument("--arm", default="")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM, and have a child that does")
    options = parser.parse_args()
    print("loading weights", flush=True)
    time.sleep(options.start_s)
    if options.crash or (options.crash_as and options.crash_as == options.arm):
        sys.exit("RuntimeError: out of memory in the worker")
    loop = asyncio.new_event_loop()
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the child inherits it
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid} of {os.getpid()}", flush=True)

    async def serve() -> None:
        server = CompletionsServer(options.first_s, options.token_s)
        server.count()
        await server.listen(options.port)
        await asyncio.Event().wait()

    loop.run_until_complete(serve())


if __name__ == "__main__":
    main()
