"""What is compared: an arm prepares a case's operation as a launch that can be captured, checked and reset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraforge.bench.cases import Case, Op
from loraforge.bench.operands import Operands


@dataclass(frozen=True)
class Launch:
    """One operation on prepared operands.

    run: enqueue it on the current stream, without host reads; capturable once it has run on that stream.
    output: canonical Z [T, slices, rank], zero where not live, or Y [T, d_out], after a run.
    poison: make what ``run`` must write unlike any result, and restore what it adds to.
    reset: restore what it adds to.
    variant: tiles and the like, for the record. launches: kernels that one run starts.
    """

    run: Callable[[], object]
    output: Callable[[], Tensor]
    poison: Callable[[], object]
    reset: Callable[[], object]
    variant: str
    launches: int = 1


class Arm(Protocol):
    """A way to compute an operation."""

    name: str

    def supports(self, op: Op, case: Case) -> bool:
        """Whether it is run on a case."""

    def prepare(self, op: Op, operands: Operands) -> Launch:
        """Lay out what the operation needs; nothing of this is timed."""


def nothing() -> None:
    """A reset of outputs that a run writes whole."""


def stain(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Leave NaN in the block that the allocator gives next for this size: for kernels that allocate their output."""
    torch.full(shape, float("nan"), dtype=dtype, device=device)
