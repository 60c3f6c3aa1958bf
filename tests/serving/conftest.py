"""A load of drawn token ids, small enough to replay in a test; a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from live_server import LiveServer
from smol_server import FLEET, SLOTS, new_server

from loraforge.serving.launch import read_fleet
from loraforge.serving.workload import LoadSpec

MakeLoad = Callable[..., LoadSpec]


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


@pytest.fixture(scope="session")
def smol_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server of the whole ``smol`` fleet for all tests of a session; each leaves it as it was."""
    largest = max(served.pool_bytes(torch.bfloat16) for served in read_fleet(FLEET))
    room = ("--slots", str(SLOTS), "--pool-bytes", str(SLOTS * largest))  # for copies of the largest too
    server = new_server(tmp_path_factory.mktemp("smol"), FLEET, *room)
    with server.engine:
        yield server
    assert server.engine.pid is None
