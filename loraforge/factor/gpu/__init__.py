"""Factorisation on a GPU: kernels by ctypes, a batched eigensolver, and the engine that schedules a fleet."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from loraforge import jit
from loraforge.errors import UsageError

if TYPE_CHECKING:
    from loraforge.factor.gpu.ops import Kernels


@cache
def available() -> bool:
    """Whether factors are built on a GPU here: torch sees one, and its kernels are built or can be.

    An empty ``CUDA_VISIBLE_DEVICES`` keeps everything on the CPU.
    """
    if not torch.cuda.is_available():
        return False
    kind = "nvcc" if torch.version.cuda else "hipcc"
    return jit.prebuilt() is not None or jit.find_compiler(kind) is not None


@cache
def kernels() -> Kernels | None:
    """The kernels on the current device, built at the first call; None where :func:`available` says no."""
    from loraforge.factor.gpu.ops import Kernels

    return Kernels() if available() else None


def device_names(count: int) -> tuple[str, ...]:
    """The first ``count`` GPUs, as torch names them; no name for one, which is the current or, without any, the CPU.

    Raises UsageError for more than there are.
    """
    if count == 1:
        return ()
    found = torch.cuda.device_count() if available() else 0
    if count > found:
        raise UsageError(
            f"{count} devices asked for, {found} found", key="--devices", remedy="name as many as torch sees"
        )
    return tuple(f"cuda:{index}" for index in range(count))
