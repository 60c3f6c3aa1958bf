"""The header of a safetensors file that a stranger wrote, checked whole before any tensor is mapped.

Format: 8 bytes of length (little-endian), that much JSON, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from loraforge.errors import InputError
from loraforge.fleet.untrusted_json import parse_untrusted_json

MAX_HEADER_BYTES = 16 << 20  # a hundred thousand tensors; the format itself allows 100 MB
MAX_DIMENSIONS = 8
MAX_NAME = 1024
# bits a value of the format's types
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: type in the format's spelling, shape, and where its bytes lie in the data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, by name, in the header's order.

    Raises InputError for a header that is longer than :data:`MAX_HEADER_BYTES` or the file, is not strict JSON, names
    a tensor twice or unprintably, or states a type, shape or place that the file's size contradicts. At most the header
    is read.
    """
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise _broken(path, "the header is longer than the file")
            if length > MAX_HEADER_BYTES:
                raise _broken(path, f"the header has {length} bytes, at most {MAX_HEADER_BYTES} are read")
            text = stream.read(length)
    except OSError as error:
        raise _broken(path, str(error)) from error
    try:
        table = parse_untrusted_json(text, path)
    except InputError as error:
        raise _broken(path, f"header: {error.problem}", error.key) from error
    if not isinstance(table, dict):
        raise _broken(path, "the header is not a JSON object")
    _check_metadata(table.pop("__metadata__", {}), path)
    entries = {name: _entry(name, value, path) for name, value in table.items()}
    _check_places(entries, size - 8 - length, path)
    return entries


def _check_metadata(metadata: Any, path: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "the metadata are not texts", "__metadata__")


def _entry(name: str, value: Any, path: Path) -> TensorEntry:
    if not name.isprintable() or len(name) > MAX_NAME:
        raise _broken(path, "a tensor's name is not printable, or longer than a name", ascii(name)[:200])
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, "an entry must have dtype, shape and data_offsets", name)
    dtype, shape, places = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _broken(path, f"unknown dtype {str(dtype)[:40]!r}", name)
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise _broken(path, f"shape must be at most {MAX_DIMENSIONS} counts", name)
    if not _counts(places) or len(places) != 2:
        raise _broken(path, "data_offsets must be two counts", name)
    start, stop = places
    # integers of Python do not overflow, however absurd the shape
    if math.prod(shape) * _BITS[dtype] != 8 * (stop - start):
        raise _broken(path, f"{stop - start} bytes are stated for {dtype} {shape}", name)
    return TensorEntry(dtype, tuple(shape), start, stop)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_places(entries: Mapping[str, TensorEntry], size: int, path: Path) -> None:
    """Tensors must fill the data section without gap or overlap."""
    places = sorted((entry.start, entry.stop) for entry in entries.values())
    chain = [(0, 0), *places, (size, size)]
    if any(before[1] != after[0] for before, after in pairwise(chain)):
        raise _broken(path, f"the tensors do not fill the {size} bytes after the header exactly")


def _broken(path: Path, why: str, key: str | None = None) -> InputError:
    return InputError(
        f"not a whole safetensors file ({why})", path=path, key=key, remedy="download or save it again"
    )
