"""A load of drawn token ids and an experiment, small enough to replay in a test; a real server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from adapter_folders import MakeAdapter
from live_server import LiveServer
from smol_server import FLEET, SLOTS, new_server
from test_engines import SERVER, two_ports

from loraforge.serving.launch import read_fleet
from loraforge.serving.workload import LoadSpec

MakeLoad = Callable[..., LoadSpec]
Declare = Callable[..., Path]


@pytest.fixture
def make_load() -> MakeLoad:
    """Factory of one-fleet loads: ``make_load("a", "b", each=3, tokens=4)``."""

    def make(*adapters: str | None, each: int = 1, tokens: int = 4, **popularity: Any) -> LoadSpec:
        return LoadSpec.model_validate(
            {
                "fleets": {
                    "fleet": {
                        "adapters": adapters,
                        "vocabulary": {
                            "low": 10,
                            "high": 1000,
                            "tokens": {"kind": "uniform", "low": 2, "high": 9},
                        },
                        "output_tokens": {"kind": "fixed", "tokens": tokens},
                    }
                },
                "popularity": popularity or {"kind": "even", "requests": each},
            }
        )

    return make


@pytest.fixture
def declare(tmp_path: Path, make_adapter: MakeAdapter) -> Declare:
    """Write an experiment of two fleets, each with adapters x and y, and return its file."""

    def write(*server: str, fleets: int = 2, **changed: Any) -> Path:
        declared = {}
        for number in range(fleets):
            folder = tmp_path / f"fleet{number}"
            if not folder.exists():
                for name in ("x", "y"):
                    make_adapter(folder / "original" / name)
                    make_adapter(folder / "spectral" / name, r=2)
                (folder / "base").mkdir()
            declared[f"f{number}"] = {
                "base": f"fleet{number}/base",
                "adapters": {kind: f"fleet{number}/{kind}" for kind in ("original", "spectral")},
                "port": two_ports(),  # the second where arms are abreast
                "context": 64,
                "vocabulary": {"high": 100, "tokens": {"kind": "fixed", "tokens": 3}},
                "output_tokens": {"kind": "uniform", "low": 2, "high": 5},
                "command": [sys.executable, str(SERVER), "--port", "{port}", "--arm", "{arm}", *server],
            }
        experiment = {
            "experiment": "small",
            "protocol": "cpu",
            "engine": "vllm",
            "fleets": declared,
            "arms": ["original_native", "spectral_loraforge", "base_only"],
            "points": [
                {"rate": 200, "requests": 3, "seeds": [1, 2]},
                {"rate": 400, "requests": 2, "seeds": [1]},
            ],
            "warmup": 2,
            "start_s": 30,
            **changed,
        }
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(experiment))
        return path

    return write


@pytest.fixture(scope="session")
def smol_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server of the whole ``smol`` fleet for all tests of a session; each leaves it as it was."""
    largest = max(served.pool_bytes(torch.bfloat16) for served in read_fleet(FLEET))
    room = ("--slots", str(SLOTS), "--pool-bytes", str(SLOTS * largest))  # for copies of the largest too
    server = new_server(tmp_path_factory.mktemp("smol"), FLEET, *room)
    with server.engine:
        yield server
    assert server.engine.pid is None
