"""What shared bases cost in parameters, and the largest common rank that a budget allows. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loraforge.errors import BudgetError

Ints = NDArray[np.int64]
Variant = Literal["full", "weighted", "diagonal"]


@dataclass(frozen=True)
class Sharing:
    """G modules of a base model and the adapters that have them.

    names: of the modules. d_in, d_out, adapters: int64 [G]; ``adapters`` counts those that target the module.
    """

    names: tuple[str, ...]
    d_in: Ints
    d_out: Ints
    adapters: Ints

    def parameters(self, rank: int, variant: Variant = "full") -> int:
        """Parameters at the common shared rank: r (d_in + d_out) and n cores of r^2, or of r where diagonal.

        A basis of ``min(d_in, d_out)`` directions is whole: no module's rank exceeds that.
        """
        shared = np.minimum(rank, np.minimum(self.d_in, self.d_out))
        cores = self.adapters * (shared if variant == "diagonal" else shared**2)
        return int((shared * (self.d_in + self.d_out) + cores).sum())


def sharing_of(modules: Sequence[tuple[str, int, int]]) -> Sharing:
    """Group (name, d_in, d_out) of every adapter's modules by name. Raises ValueError where shapes of one disagree."""
    shapes: dict[str, tuple[int, int]] = {}
    count: dict[str, int] = {}
    for name, d_in, d_out in modules:
        if shapes.setdefault(name, (d_in, d_out)) != (d_in, d_out):
            raise ValueError(f"{name} has two shapes, {shapes[name]} and {(d_in, d_out)}")
        count[name] = count.get(name, 0) + 1
    d_in_, d_out_ = np.array(list(shapes.values()), dtype=np.int64).T
    return Sharing(tuple(shapes), d_in_, d_out_, np.array(list(count.values()), dtype=np.int64))


def shared_rank(sharing: Sharing, ceiling: int, variant: Variant = "full") -> int:
    """The largest common rank whose parameters fit ``ceiling`` (section B.10).

    Raises BudgetError where rank 1 costs more.
    """
    low, high = 0, int(np.minimum(sharing.d_in, sharing.d_out).max()) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sharing.parameters(middle, variant) <= ceiling else (low, middle)
    if low == 0:
        raise BudgetError(
            f"a shared rank of 1 takes {sharing.parameters(1, variant)} parameters, the ceiling is {ceiling}",
            key="--budget",
            remedy="allow more",
        )
    return low
