"""Acceptance before timing: outputs against FP64 on sampled rows, and against the native output on all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loraforge.bench.operands import Operands

MAX_RELATIVE_L2 = 0.01
MAX_ABSOLUTE = 0.025  # of max(0.1, the reference's greatest magnitude)
SAMPLED_ROWS = 8


@dataclass(frozen=True)
class Errors:
    """relative_l2: ||got - want|| / ||want||. absolute: max |got - want| / max(0.1, max |want|)."""

    relative_l2: float
    absolute: float

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        return self.relative_l2 < MAX_RELATIVE_L2 and self.absolute < MAX_ABSOLUTE


def errors(got: Tensor, want: Tensor) -> Errors:
    """Compare in FP64 where ``want`` is, in FP32 otherwise."""
    wanted = want if want.dtype == torch.float64 else want.float()
    difference = got.to(wanted.dtype) - wanted
    norm = wanted.norm().clamp_min(torch.finfo(torch.float32).tiny)
    found = torch.stack(
        (difference.norm() / norm, difference.abs().amax() / wanted.abs().amax().clamp_min(0.1))
    )
    relative, absolute = found.tolist()
    return Errors(relative, absolute)


def sampled_rows(operands: Operands, count: int = SAMPLED_ROWS) -> Tensor:
    """int64 [min(count, T)], distinct tokens, the first and the last among them."""
    tokens = operands.case.tokens
    generator = torch.Generator().manual_seed(operands.seed)
    inner = 1 + torch.randperm(max(0, tokens - 2), generator=generator)[: max(0, count - 2)]
    ends = torch.tensor(sorted({0, tokens - 1}))
    return torch.cat((ends, inner))[:count].to(operands.device)


def shrink_reference(operands: Operands, rows: Tensor) -> Tensor:
    """FP64 [rows, slices, rank] from the master factors, zero where not live."""
    factors = operands.masters.a[operands.token_slots[rows].long(), :, : operands.case.rank].double()
    z = torch.einsum("tspd,td->tsp", factors, operands.x[rows].double())
    return z * operands.live[rows]


def expand_reference(operands: Operands, z: Tensor, rows: Tensor) -> Tensor:
    """FP64 [rows, d_out]: base + scale Z B^T for canonical ``z`` [rows, slices, rank], zero where not live."""
    slots = operands.token_slots[rows].long()
    scale = torch.tensor(operands.scales, dtype=torch.float64, device=operands.device)[slots, None]
    out = operands.base[rows].double()
    for piece, (first, channels) in enumerate(operands.case.projection.slices):
        factors = operands.masters.b[slots, first : first + channels, : operands.case.rank].double()
        out[:, first : first + channels] += scale * torch.einsum("tnp,tp->tn", factors, z[:, piece].double())
    return out
