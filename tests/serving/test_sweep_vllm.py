"""A whole experiment on a real engine: vLLM, as its CPU edition too, with two arms of a fleet of shapes.

Runs where vLLM is installed, or where VLLM_PYTHON names the interpreter of an environment that has it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from test_engines import free_port
from test_served_shapes import KINDS, SMALL, small_fleet
from test_vllm import PYTHON

from loraforge.serving.experiment import Experiment
from loraforge.serving.points import read_sweep
from loraforge.serving.records import read_run
from loraforge.serving.residency import GIB, native_slot_bytes
from loraforge.serving.shapes import base_shapes, write_served_fleet
from loraforge.serving.sweep import run_sweep

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed, and VLLM_PYTHON is not set"),
]
# heads as small as the engine's attention takes
CONFIG = SMALL | KINDS["llama"] | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}


PROJECTIONS = [shape for part in base_shapes(CONFIG) for name, shape in part.items() if "_proj" in name]


def test_two_arms_on_a_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    write_served_fleet(
        small_fleet(CONFIG),
        CONFIG,
        tmp_path / "small",
        torch.device("cpu"),
        1,
        weights=("spectral",),
        budget="1/2",
    )
    slot = native_slot_bytes([tuple(reversed(shape)) for shape in PROJECTIONS], 8)
    experiment = Experiment.model_validate(
        {
            "experiment": "small",
            "protocol": "cpu",
            "engine": "vllm",
            "python": PYTHON or sys.executable,
            "fleets": {
                "small": {
                    "base": "small/base",
                    "adapters": {"original": "small/original", "spectral": "small/spectral_1-2"},
                    "budget_gib": 1.5 * slot / GIB,  # one native slot, but room for both compressed adapters
                    "port": free_port(),
                    "context": 64,
                    "running": 8,
                    "kv_tokens": 1024,
                    "kv_block": 32,
                    "vocabulary": {
                        "low": 2,
                        "high": 300,
                        "tokens": {"kind": "uniform", "low": 4, "high": 12},
                    },
                    "output_tokens": {"kind": "uniform", "low": 2, "high": 9},
                }
            },
            "arms": ["original_native", "spectral_loraforge"],
            "points": [{"rate": 8, "requests": 8, "seeds": [1, 2]}],
            "warmup": 4,
            "extra": ["--enforce-eager"],
            "env": {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        }
    )
    outcome = run_sweep(experiment, tmp_path, tmp_path / "out")
    assert (outcome.problems, outcome.left) == ([], 0)
    found = read_sweep(tmp_path / "out")
    assert found.setting.engine.startswith("vllm")
    native, ours = found.starts
    assert (native.engines["small"].slots, ours.engines["small"].slots) == (1, 2)
    for start, execution in ((native, "native"), (ours, "loraforge")):
        assert start.engines["small"].counters is not None
        assert start.engines["small"].counters.execution == execution
    for point in found.complete:
        run = read_run(tmp_path / "out" / point.requests)
        assert point.failures == {}
        assert [row.output_tokens for row in run.requests] == [row.asked_tokens for row in run.requests]
        assert all(row.text_s is not None for row in run.requests)  # every token id has a word
        assert {row.model for row in run.requests} == {"00-r4", "01-r8"}
        assert point.pool_bytes is not None
        assert point.loads is not None
        if point.arm == "original_native":
            assert point.loads > 0  # two adapters take turns in one slot
            assert point.pool_bytes >= slot
        else:
            assert point.loads == 0
            assert 0 < point.windows["small"].after.live_bytes <= point.windows["small"].after.capacity_bytes
    log = next((tmp_path / "out" / "logs").glob("001-*.log")).read_text()
    assert "LoRAForge" in log
    assert "is active" in log
