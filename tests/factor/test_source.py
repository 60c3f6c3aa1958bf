"""What a command accepts as a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraforge.errors import IntegrityError, UsageError
from loraforge.fleet.lock import save_lock
from loraforge.fleet.locking import make_lock
from loraforge.fleet.source import open_source


@pytest.fixture
def lock(tmp_path: Path, make_adapter: Any) -> Path:
    folders = [make_adapter(tmp_path / "tiny" / name) for name in ("one", "two")]
    path = tmp_path / "tiny.lock.json"
    save_lock(make_lock(folders, path, name="tiny"), path)
    return path


def test_lock_and_folders_open_the_same_adapters(lock: Path) -> None:
    by_lock, by_folder = open_source([lock]), open_source([lock.parent / "tiny"])
    assert [adapter.name for adapter in by_lock] == ["one", "two"]
    assert [adapter.weights_sha256 for adapter in by_lock] == [
        adapter.weights_sha256 for adapter in by_folder
    ]


def test_changed_byte_is_refused(lock: Path) -> None:
    weights = lock.parent / "tiny" / "two" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"two/adapter_model\.safetensors"):
        open_source([lock])


def test_lock_stands_alone(lock: Path) -> None:
    with pytest.raises(UsageError, match="stands alone"):
        open_source([lock, lock.parent / "tiny"])
