"""The compiled operations by ctypes, built at their first use."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

# before the library: it takes the OpenMP runtime that torch has put into the process
import torch  # noqa: F401

from loraforge import jit
from loraforge.errors import LoraForgeError
from loraforge.progress import say

COMPILER = "g++"

_POINTER, _INT, _WIDE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_PROTOTYPES: dict[str, list[Any]] = {
    "lf_cpu_plan": [_POINTER, *[_INT] * 3, *[_POINTER] * 3],
    "lf_cpu_lora": [
        *(_POINTER, _WIDE, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT),  # x, a, b, table
        *(_POINTER, _POINTER, _POINTER, _POINTER, _INT),  # plan, z
        *(_POINTER, _WIDE, _POINTER, _POINTER),  # y, slices
    ],
}


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None, said once, where it can be neither found nor built: torch then does the work."""
    try:
        found = jit.load("cpu", kind=COMPILER)
    except LoraForgeError as error:
        say(f"CPU serving operations run in torch: {error}")
        return None
    for name, arguments in _PROTOTYPES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    found.lf_cpu_isa.argtypes, found.lf_cpu_isa.restype = [], ctypes.c_char_p
    return found


def instructions() -> str:
    """What the operations run on: the instruction set they were compiled for, or ``torch``."""
    found = library()
    return "torch" if found is None else str(found.lf_cpu_isa().decode())


@cache
def extents(slices: tuple[tuple[int, int], ...]) -> tuple[Any, Any]:
    """First channels and numbers of channels as host arrays, kept for good: a model has a handful."""
    kind = ctypes.c_int * len(slices)
    return kind(*(first for first, _ in slices)), kind(*(channels for _, channels in slices))
