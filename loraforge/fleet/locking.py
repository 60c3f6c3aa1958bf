"""Making a fleet lock: adapters are opened, so that nothing unusable is locked, and their files hashed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from loraforge.errors import InputError
from loraforge.files import sha256_file
from loraforge.fleet.lock import FleetLock, LockedAdapter, LockedBase, LockedFile, PathSource
from loraforge.fleet.options import DEFAULT, ReadOptions
from loraforge.fleet.peft_config import CONFIG_NAME
from loraforge.fleet.peft_io import Adapter, open_fleet
from loraforge.progress import track

# The history of an adapter, beside what decides it; other files (a model card, say) may change freely.
_OPTIONAL = ("recipe.yaml", "training.json")


def make_lock(
    adapters: Sequence[Path],
    path: Path,
    *,
    name: str,
    base: Path | None = None,
    options: ReadOptions = DEFAULT,
) -> FleetLock:
    """Open and hash adapter folders (or folders of them) for a lock that will be written to ``path``.

    ``base`` is a folder with the base model's safetensors files, to be hashed too; without it the base model
    is described by name, and by its pins where this package ships them. Raises InputError for whatever
    :func:`open_fleet` refuses, for a ``base`` without safetensors, and for an adapter outside the lock's folder.
    """
    fleet = open_fleet(adapters, options)
    described = _pinned_base(fleet[0].base_model) if base is None else _hashed_base(fleet[0].base_model, base)
    locked = [_lock_adapter(adapter, path) for adapter in track(fleet, "hash", len(fleet))]
    return FleetLock(name=name, base_model=described, adapters=tuple(locked))


def _lock_adapter(adapter: Adapter, lock: Path) -> LockedAdapter:
    deciding = (CONFIG_NAME, *(file.name for file in (*adapter.weights.others, *adapter.weights.files)))
    present = [name for name in _OPTIONAL if (adapter.path / name).is_file()]
    files = [
        LockedFile(name=name, bytes=path.stat().st_size, sha256=sha256_file(path))
        for name, path in ((name, adapter.path / name) for name in (*deciding, *present))
    ]
    place = Path(lock).resolve().parent
    if not adapter.path.resolve().is_relative_to(place):
        raise InputError(
            f"is not in the folder of {lock}, and a lock names nothing outside its own",
            path=adapter.path,
            remedy="put the lock beside or above its adapters",
        )
    relative = os.path.relpath(adapter.path.resolve(), place)
    return LockedAdapter(
        name=adapter.name,
        task=_task(adapter.path / "recipe.yaml"),
        source=PathSource(path=Path(relative).as_posix()),
        files=tuple(files),
    )


def _task(recipe: Path) -> str | None:
    if not recipe.is_file():
        return None
    try:
        value: Any = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"not valid YAML ({str(error).splitlines()[0]})", path=recipe) from error
    task = value.get("task") if isinstance(value, dict) else None
    return None if task is None else str(task)


def _pinned_base(name: str) -> LockedBase:
    from loraforge.fleet.base_model import SMOLLM2

    if name != SMOLLM2.name:
        return LockedBase(name=name)
    return LockedBase(
        name=name,
        source=SMOLLM2.source,
        files={Path(SMOLLM2.member).name: SMOLLM2.gguf_sha256},
        tensors_sha256=SMOLLM2.tensors_sha256,
    )


def _hashed_base(name: str, folder: Path) -> LockedBase:
    from loraforge.fleet.base_model import tensors_sha256

    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise InputError("holds no safetensors file", path=folder, remedy="name the folder of the base model")
    return LockedBase(
        name=name,
        files={path.name: sha256_file(path) for path in weights},
        tensors_sha256=tensors_sha256(weights[0]) if len(weights) == 1 else None,
    )
