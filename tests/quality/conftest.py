"""A tiny base model, and a fleet of two adapters of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_folders import MakeAdapter
from tiny_model import write_base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def fleet_folder(tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    """Adapters a and b, who answer ``tiny_model.PROMPTS``."""
    make_adapter(tmp_path / "fleet" / "a", r=8, targets=("q_proj", "down_proj"), decay=0.9)
    make_adapter(tmp_path / "fleet" / "b", r=4, seed=1, dtype=torch.bfloat16)
    return tmp_path / "fleet"
