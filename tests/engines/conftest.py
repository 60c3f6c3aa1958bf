"""The small model of both engines' tests on a GPU, made once for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_model import Reference, write_model


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and the adapters, of random weights."""
    folder = tmp_path_factory.mktemp("gpu")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def reference(root: Path) -> Reference:
    """The base model in FP32."""
    return Reference(root)
