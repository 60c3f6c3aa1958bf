"""Safetensors files written as a stream: from tensors of any device to disk, hashed on the way, in one pass.

The library's own writer wants all of a file's bytes in the host's memory, copies them, and hides the system's
error (a full disk). Here the header is known from shapes and types alone, and bytes follow as they arrive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from loraforge.files import canonical_json

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Views = Callable[[Iterable[Tensor]], Iterator[memoryview]]


class Digest(Protocol):
    """What of hashlib is used."""

    def update(self, data: memoryview | bytes, /) -> None: ...


@dataclass(frozen=True)
class Written:
    """A file that was written: hex SHA-256 of all of it, and its size."""

    sha256: str
    bytes: int


def host_views(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of tensors of the CPU, row-major, one view after the other."""
    for tensor in tensors:
        if tensor.numel():
            yield memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], views: Views = host_views
) -> Written:
    """Write ``path``, not atomically. ``views`` brings the bytes of tensors that are not on the CPU."""
    ordered = _ordered(tensors)
    header = _header(ordered, metadata)
    digest = hashlib.sha256(header)
    with open(path, "wb", buffering=0) as stream:
        _write(stream, header)
        size = len(header) + _pour(stream, ordered, digest, views)
    return Written(digest.hexdigest(), size)


def file_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """The size that :func:`write_tensors` gives a file; no value is read: tensors may be torch's meta ones."""
    data = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return len(_header(_ordered(tensors), metadata)) + data


def write_self_hashed(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Callable[[str], Mapping[str, str]],
    views: Views = host_views,
) -> None:
    """Write ``path``, not atomically, with metadata that states :func:`contents_sha256` of it.

    ``metadata`` is called with that hash, and must give texts of one length whatever the hash is.
    """
    ordered = _ordered(tensors)
    start = len(_header(ordered, metadata("0" * 64)))
    digest = hashlib.sha256(canonical_json(_table(ordered)).encode())
    with open(path, "wb", buffering=0) as stream:
        stream.seek(start)
        _pour(stream, ordered, digest, views)
        header = _header(ordered, metadata(digest.hexdigest()))
        assert len(header) == start
        stream.seek(0)
        _write(stream, header)


def contents_sha256(path: Path) -> tuple[str, dict[str, str]]:
    """Hex SHA-256 of a file's table of tensors and their bytes, and its metadata, which are not hashed.

    Raises OSError, or ValueError for what is no safetensors file.
    """
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > 100_000_000:  # the format's own limit
            raise ValueError("not a safetensors header")
        table: Any = json.loads(stream.read(length))
        if not isinstance(table, dict):
            raise ValueError("not a safetensors header")
        metadata: dict[str, str] = table.pop("__metadata__", {})
        digest = hashlib.sha256(canonical_json(table).encode())
        piece = bytearray(1 << 20)
        while count := stream.readinto(piece):
            digest.update(memoryview(piece)[:count])
    return digest.hexdigest(), metadata


def _ordered(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The widest types first, so that every tensor lies aligned; in the order given otherwise."""
    return sorted(tensors.items(), key=lambda item: -item[1].element_size())


def _table(ordered: list[tuple[str, Tensor]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.numel() * tensor.element_size()
        entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        table[name] = entry
        start = stop
    return table


def _header(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    table = {"__metadata__": dict(metadata), **_table(ordered)}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pour(stream: Any, ordered: list[tuple[str, Tensor]], digest: Digest, views: Views) -> int:
    size = 0
    for view in views(tensor for _, tensor in ordered):
        digest.update(view)
        _write(stream, view)
        size += len(view)
    return size


def _write(stream: Any, view: memoryview | bytes) -> None:
    """All of ``view``: an unbuffered stream may take less at once."""
    rest = memoryview(view)
    while rest:
        rest = rest[stream.write(rest) :]
