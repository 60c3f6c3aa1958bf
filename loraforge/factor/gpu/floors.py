"""Least seconds of each stage of our paths over a fleet: what must move or be computed, at measured rates.

Of m matrices of rank r, with X of d_x rows (the smaller side) and Y of d_y, both FP32; k directions are written:

    gram (gram)  bytes 4 r (d_x + d_y)            FP64 operations r (r + 1) (d_x + d_y)
    qr           bytes 8 r d_x                    FP32 operations 2 r^2 d_x - 2/3 r^3
    gram (tsqr)  bytes 4 r d_y                    FP64 operations r (r + 1) d_y
    core         bytes 48 r^2 (gram), 40 (tsqr)   FP64 operations 10/3 r^3 (gram), 2 r^3 (tsqr)
    evd          bytes 16 r^2                     FP64 operations 10/3 r^3
    apply        bytes 4 (r + k) (d_x + d_y)      FP64 operations 2 r k (d_x + d_y), or of Y alone (tsqr)
                                                  FP32 operations 2 r k d_x (tsqr)

A stage takes at least the greatest of its floors: they are of different units that can work at the same time. Cholesky
is r^3/3, a symmetric congruence by a triangle r^3, a product or solution with one r^3; an eigensolver that reduces to
a tridiagonal matrix needs 4/3 r^3 for that and 2 r^3 to bring the vectors back, and what lies between is not counted.
Reflectors are as large as X; a tree of Householder factorisations costs what a single one does, and its Q, whose
coefficients are zero below r rows, needs one product with all reflectors of a tile. Rates are those of large
products, which small and serial ones cannot reach: the latency of dependent steps, not counted, is what r x r stages
wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from loraforge.factor.gpu.engine import Group, GroupFactors
from loraforge.factor.gpu.timing import copy_rate, product_rate

Bound = Literal["bytes", "flops", "flops32"]
Amounts = dict[tuple[str, Bound], float]


def amounts(path: Literal["gram", "tsqr"], groups: Sequence[Group], out: Sequence[GroupFactors]) -> Amounts:
    """Bytes, FP64 operations (``flops``) and FP32 operations (``flops32``) by stage, of a pass that fills ``out``."""
    total: Amounts = {}
    for group, result in zip(groups, out, strict=True):
        for (stage, bound), amount in _of_group(path, group, result):
            total[stage, bound] = total.get((stage, bound), 0.0) + amount
    return total


def _of_group(
    path: Literal["gram", "tsqr"], group: Group, result: GroupFactors
) -> Iterator[tuple[tuple[str, Bound], float]]:
    d_in, d_out, r = group.key
    m, d_x, d_y = float(len(group)), min(d_in, d_out), max(d_in, d_out)
    directions = float(sum((part.stop - part.start) * part.a.shape[1] for part in result.parts))
    read, written = 4.0 * m * r * (d_x + d_y), 4.0 * directions * (d_x + d_y)
    yield ("apply", "bytes"), read + written
    yield ("evd", "bytes"), 16.0 * m * r**2
    yield ("evd", "flops"), m * r**3 * 10 / 3
    if path == "gram":
        yield ("gram", "bytes"), read
        yield ("gram", "flops"), m * r * (r + 1) * (d_x + d_y)
        yield ("core", "bytes"), 48.0 * m * r**2
        yield ("core", "flops"), m * r**3 * 10 / 3
        yield ("apply", "flops"), 2.0 * r * directions * (d_x + d_y)
    else:
        yield ("qr", "bytes"), 8.0 * m * r * d_x
        yield ("qr", "flops32"), m * (2.0 * r**2 * d_x - r**3 * 2 / 3)
        yield ("gram", "bytes"), 4.0 * m * r * d_y
        yield ("gram", "flops"), m * r * (r + 1) * d_y
        yield ("core", "bytes"), 40.0 * m * r**2
        yield ("core", "flops"), 2.0 * m * r**3
        yield ("apply", "flops"), 2.0 * r * directions * d_y
        yield ("apply", "flops32"), 2.0 * r * directions * d_x


def rates(device: torch.device) -> dict[Bound, float]:
    """Bytes, FP64 and FP32 operations a second, measured on the device."""
    return {
        "bytes": copy_rate(device),
        "flops": product_rate(device, torch.float64),
        "flops32": product_rate(device, torch.float32),
    }


def records(found: Amounts, measured: dict[Bound, float]) -> list[dict[str, Any]]:
    """Records of target ``recompression``, without fleet and method."""
    return [
        {
            "record": "floor",
            "stage": stage,
            "bound": bound,
            "amount": amount,
            "rate": measured[bound],
            "seconds": amount / measured[bound],
        }
        for (stage, bound), amount in found.items()
    ]
