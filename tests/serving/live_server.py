"""A real server of either engine, as ``loraforge serve`` starts it: loads, unloads and answers, each in its own way."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraforge.serving.engines import Engine


@dataclass(frozen=True)
class Answer:
    """Status and text of an HTTP answer."""

    status: int
    text: str


@dataclass
class LiveServer:
    """A running server of vLLM. base: name of its base model. prompt: what :meth:`complete` asks."""

    engine: Engine
    counters: Path
    base: str
    prompt: str = "The capital of France is"

    LOAD = "/v1/load_lora_adapter"
    UNLOAD = "/v1/unload_lora_adapter"

    def asked(self, model: str, **more: Any) -> dict[str, Any]:
        """The body of a request for completions of an adapter, or of the base model."""
        return {"model": model, **more}

    def post(self, path: str, **body: Any) -> Answer:
        request = urllib.request.Request(
            f"{self.engine.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return Answer(response.status, response.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode())

    def load(self, name: str, folder: Path) -> Answer:
        return self.post(self.LOAD, lora_name=name, lora_path=str(folder))

    def unload(self, name: str) -> Answer:
        return self.post(self.UNLOAD, lora_name=name)

    def ask(self, model: str, tokens: int) -> Answer:
        """Greedy completion of the fixed prompt."""
        more = {"prompt": self.prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/completions", **self.asked(model, **more))

    def complete(self, model: str, tokens: int = 4) -> str:
        """Its text."""
        answer = self.ask(model, tokens)
        assert answer.status == 200, answer.text
        return str(json.loads(answer.text)["choices"][0]["text"])

    def counts(self) -> dict[str, Any]:
        """What the plugin last wrote of its slots and its pool."""
        return dict(json.loads(self.counters.read_text(encoding="utf-8")))

    def memory(self) -> int:
        """Resident bytes of all processes of the server, shared pages counted in part."""
        total = 0
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(status.read_text().rpartition(")")[2].split()[3]) != self.engine.pid:  # its session
                    continue
                rollup = (status.parent / "smaps_rollup").read_text()
            except (OSError, IndexError):
                continue
            total += int(re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)[1]) * 1024  # type: ignore[index]
        return total


class SglangServer(LiveServer):
    """A running server of SGLang, which takes the adapter beside the base model's name."""

    LOAD = "/load_lora_adapter"
    UNLOAD = "/unload_lora_adapter"

    def asked(self, model: str, **more: Any) -> dict[str, Any]:
        return {"model": self.base, **({} if model == self.base else {"lora_path": model}), **more}
