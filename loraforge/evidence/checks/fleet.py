"""Adapters are those of the fleet lock, on disk and in every bag that was made from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from loraforge.errors import LoraForgeError
from loraforge.evidence.bag import Bag, input_name, locked_inputs
from loraforge.evidence.checks.base import Check, Failure, Scope, guarded
from loraforge.files import sha256_file
from loraforge.fleet.lock import FleetLock, LockedFile, load_lock
from loraforge.fleet.peft_config import WEIGHTS_NAME


class FleetCheck(Check):
    """Every locked file is re-hashed; bags of that fleet state the same hashes for their adapters."""

    title: ClassVar = "fleet"

    def count(self, scope: Scope) -> int:
        return sum(_files(lock) for lock in scope.locks)

    def run(self, scope: Scope) -> Iterator[Failure]:
        for lock in scope.locks:
            yield from guarded(lock, lambda lock=lock: _look(scope, lock))  # type: ignore[misc]


def _files(lock: Path) -> int:
    try:
        return sum(len(adapter.files) for adapter in load_lock(lock).adapters)
    except (LoraForgeError, ValueError, RecursionError):  # the run says what is wrong with the lock
        return 1


def _look(scope: Scope, path: Path) -> Iterator[Failure]:
    lock = load_lock(path)
    for adapter in lock.adapters:
        for file in adapter.files:
            place = lock.folder(adapter, path) / file.name
            yield from guarded(
                place,
                lambda place=place, file=file, name=adapter.name: _file(place, file, name, path),  # type: ignore[misc]
            )
    for bag in scope.bags:
        yield from guarded(bag.path, lambda bag=bag: _bag(bag, lock, path))  # type: ignore[misc]


def _file(path: Path, file: LockedFile, adapter: str, lock: Path) -> Iterator[Failure]:
    if not path.is_file():
        yield Failure(path, f"adapter {adapter}: file locked in {lock.name} is missing")
        return
    digest = sha256_file(path)
    if digest != file.sha256:
        yield Failure(
            path,
            f"adapter {adapter}: SHA-256 is {digest[:12]}…, {lock.name} says {file.sha256[:12]}…",
        )


def _bag(bag: Bag, lock: FleetLock, path: Path) -> Iterator[Failure]:
    if bag.run.fleet != lock.name:
        return
    locked = {name: digest for files in locked_inputs(lock).values() for name, digest in files.items()}
    inputs = bag.data / "inputs.json"
    stated = {name: digest for name, digest in bag.inputs.items() if name.startswith("adapters/")}
    if not stated:
        yield Failure(inputs, f"states no adapter of fleet {lock.name}")
    for name, digest in stated.items():
        if name not in locked:
            yield Failure(inputs, f"{name}: is not in {path.name}")
        elif locked[name] != digest:
            yield Failure(inputs, f"{name}: SHA-256 is {digest[:12]}…, {path.name} says {locked[name][:12]}…")
    for adapter in bag.target.adapters(bag.records):
        if input_name(adapter, WEIGHTS_NAME) not in stated:
            yield Failure(inputs, f"adapter {adapter} of the records is not among the inputs")
    for adapter, digest in bag.target.original_hashes(bag.records).items():
        if locked.get(input_name(adapter, WEIGHTS_NAME), digest) != digest:
            yield Failure(
                bag.data / "records.jsonl",
                f"adapter {adapter}: was scored with other weights than those of {path.name}",
            )
