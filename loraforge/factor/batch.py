"""Batches of updates of one shape, and the ordered factors that every path makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ordered:
    """Ordered balanced factors of m updates dW = U diag(s) V^T.

    ``s`` float64 [m, r], descending, the scale of the update included; ``a`` float32 [m, r, d_in] = S^1/2 V^T;
    ``b`` float32 [m, d_out, r] = U S^1/2. Hence ``b[:, :, :k] @ a[:, :k]`` is the best rank-k update.
    """

    s: Tensor
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Batch:
    """m updates ``s B A`` of one shape, oriented to the smaller side, in FP64.

    ``x`` [m, d_s, r] and ``y`` [m, r, d_l] with d_s = min(d_in, d_out): ``x @ y`` is B A, or its transpose
    where ``transposed`` (paper, section A.1). ``gain`` [m] >= 0 is the magnitude of the scale and ``sign`` [m]
    its sign. FP64 holds the fourth power of every FP32 number, so that Gram matrices of Gram matrices neither
    overflow nor vanish; only factors stored as FP64 are divided by their own powers of two, which go into
    ``gain``. Both are exact.
    """

    x: Tensor
    y: Tensor
    gain: Tensor
    sign: Tensor
    transposed: bool

    @classmethod
    def of(cls, a: Tensor, b: Tensor, scale: Tensor) -> Batch:
        """Take ``a`` [m, r, d_in], ``b`` [m, d_out, r] (any float type, finite) and ``scale`` [m]."""
        scale = scale.to(torch.float64)
        gain = scale.abs()
        if torch.float64 in (a.dtype, b.dtype):
            a, a_exponent = normalise(a.to(torch.float64))
            b, b_exponent = normalise(b.to(torch.float64))
            gain = torch.ldexp(gain, a_exponent + b_exponent)
        transposed = b.shape[1] > a.shape[2]
        x, y = (a.mT, b.mT) if transposed else (b, a)
        return cls(
            x.to(torch.float64),
            y.to(torch.float64),
            gain,
            torch.where(scale < 0, -1.0, 1.0).to(torch.float64),
            transposed,
        )

    @property
    def rank(self) -> int:
        return self.x.shape[2]

    def __len__(self) -> int:
        return self.x.shape[0]

    @cached_property
    def a(self) -> Tensor:
        """A, FP64 [m, r, d_in]."""
        return self.x.mT if self.transposed else self.y

    @cached_property
    def b(self) -> Tensor:
        """B, FP64 [m, d_out, r]."""
        return self.y.mT if self.transposed else self.x

    def select(self, index: Tensor) -> Batch:
        """The updates at ``index`` (int64)."""
        if len(index) == len(self):
            return self
        return Batch(self.x[index], self.y[index], self.gain[index], self.sign[index], self.transposed)

    def ordered(self, s: Tensor, x: Tensor, y: Tensor) -> Ordered:
        """Turn oriented results into A and B: ``s`` [m, r] without the gain, ``x`` and ``y`` with it."""
        x = x * self.sign[:, None, None].to(x.dtype) if bool((self.sign < 0).any()) else x
        a, b = (x.mT, y.mT) if self.transposed else (y, x)
        return Ordered(
            s * self.gain[:, None],
            a.to(torch.float32, memory_format=torch.contiguous_format),
            b.to(torch.float32, memory_format=torch.contiguous_format),
        )

    def roots(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Guard ``s`` [m, r] (descending): directions that are rounding noise become exact zeros.

        Returns s, the root sqrt(gain * s) that belongs to unit columns of x, and the guarded inverse
        sqrt(gain / s) that belongs to rows of y that have length s.
        """
        live = s > s[:, :1] * (self.rank * torch.finfo(torch.float64).eps)
        s = torch.where(live, s, 0.0)
        gain = self.gain[:, None]
        return s, (gain * s).sqrt(), torch.where(live, (gain / torch.where(live, s, 1.0)).sqrt(), 0.0)


def normalise(factor: Tensor) -> tuple[Tensor, Tensor]:
    """FP64 ``factor`` [m, ., .] with its largest entry in [1/2, 1), and the exponent [m] (int32) taken out."""
    largest = torch.linalg.vector_norm(factor, ord=float("inf"), dim=(1, 2))
    # 2**1023 is the largest power of two: a factor of FP64 subnormals stays smaller than 1/2, exactly
    exponent = torch.frexp(largest).exponent.clamp_min(-1022)
    return factor * torch.ldexp(torch.ones_like(largest), -exponent)[:, None, None], exponent
