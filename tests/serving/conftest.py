"""A load of drawn token ids, small enough to replay in a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
