"""Fixtures that every test may use."""

from __future__ import annotations

import pytest
from adapter_folders import MakeAdapter, write_adapter


@pytest.fixture(scope="session")
def make_adapter() -> MakeAdapter:
    """Factory of real PEFT adapter folders; see :func:`write_adapter`."""
    return write_adapter
