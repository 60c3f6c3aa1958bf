"""A fleet lock as the audit reads it: names and hashes alone, without the code (and torch) that opens adapters."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraforge.errors import InputError
from loraforge.files import read_json, sha256_file

WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class LockedFile:
    """One file of an adapter, where it lies and what the lock says of it."""

    adapter: str
    path: Path
    bytes: int
    sha256: str

    @property
    def key(self) -> str:
        """The file's name among the inputs of a bag."""
        return f"adapters/{self.adapter}/{self.path.name}"


@dataclass(frozen=True)
class Lock:
    """Name of a fleet and its files, in the order of the lock."""

    path: Path
    sha256: str
    name: str
    files: tuple[LockedFile, ...]

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters, in the order of the lock."""
        return list(dict.fromkeys(file.adapter for file in self.files))

    def inputs(self, adapters: list[str]) -> dict[str, str]:
        """SHA-256 of the lock and the files of these adapters (of all where the list is empty), as inputs of a bag."""
        files = {file.key: file.sha256 for file in self.files if not adapters or file.adapter in adapters}
        return {"fleet.lock.json": self.sha256} | files


def read_lock(path: Path) -> Lock:
    """Read a lock of schema ``loraforge.fleet-lock/1``. Raises InputError where it is not one."""
    value: Any = read_json(path)
    try:
        if value["schema"] != "loraforge.fleet-lock/1":
            raise InputError(
                f"schema is {value['schema']!r}, not loraforge.fleet-lock/1", path=path, key="schema"
            )
        files = tuple(
            LockedFile(
                adapter["name"],
                Path(os.path.normpath(Path(path).parent / adapter["source"]["path"])) / file["name"],
                int(file["bytes"]),
                str(file["sha256"]),
            )
            for adapter in value["adapters"]
            for file in adapter["files"]
        )
        return Lock(Path(path), sha256_file(path), str(value["name"]), files)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"not a fleet lock ({type(error).__name__}: {error})", path=path) from error
