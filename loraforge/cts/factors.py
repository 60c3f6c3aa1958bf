"""The updates of one module over all adapters that have it, as concatenated factors; batched over modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

import torch
from torch import Tensor


class Fit(Protocol):
    """Bases of g modules: a dataclass of tensors whose first dimension is g, ``error`` [g] among them."""

    @property
    def error(self) -> Tensor: ...


F = TypeVar("F", bound=Fit)


@dataclass(frozen=True)
class Stack:
    """g modules of one shape and n adapters each: ``dW_i = b[:, i] @ a[:, i]``.

    Parameters
    ----------
    a: [g, n, r, d_in]. b: [g, n, d_out, r], scale included. Ranks below r are filled with zeros, which change nothing.
    """

    a: Tensor
    b: Tensor

    @property
    def transposed(self) -> Stack:
        """The stack of dW_i^T."""
        return Stack(self.b.mT, self.a.mT)

    def squared_norms(self) -> Tensor:
        """|dW_i|_F^2, [g, n]: the sum of (B^T B) * (A A^T), with nothing larger than r x r."""
        return ((self.b.mT @ self.b) * (self.a @ self.a.mT)).sum(dim=(-2, -1)).clamp_min(0)

    def weighted(self, weight: Tensor) -> Stack:
        """The stack of sqrt(weight_i) dW_i, ``weight`` [g, n]."""
        return Stack(self.a, self.b * weight.sqrt()[..., None, None])

    @property
    def reduced(self) -> tuple[Tensor, Tensor, SideBySide]:
        """Q_b [g, d_out, p], Q_a [g, d_in, q] and coordinates b'_i [p, r] and a'_i [r, q] in them.

        b_i = Q_b b'_i and a_i = a'_i Q_a^T, by QR of all factors of a module side by side: p = min(d_out, n r) and
        q = min(d_in, n r). The directions that fit the updates best lie in these spans.
        """
        out, b = torch.linalg.qr(_beside(self.b))
        into, a = torch.linalg.qr(_beside(self.a.mT))
        return out, into, SideBySide(a.mT.contiguous(), b, self.a.shape[1])


@dataclass(frozen=True)
class SideBySide:
    """A :class:`Stack` whose adapters' factors stand one beside the other.

    A basis that all adapters share is so multiplied by one matrix of n r rows or columns; a product for every adapter
    would read the basis n times and be too small to be fast.

    Parameters
    ----------
    a: [g, n r, d_in]. b: [g, d_out, n r]. adapters: n.
    """

    a: Tensor
    b: Tensor
    adapters: int

    @property
    def transposed(self) -> SideBySide:
        """That of dW_i^T; nothing is copied."""
        return SideBySide(self.b.mT, self.a.mT, self.adapters)

    def inner(self, right: Tensor) -> Tensor:
        """a_i right, [g, n, r, k], of a basis [g, d_in, k]."""
        product = self.a @ right
        return product.reshape(len(product), self.adapters, -1, right.shape[-1])

    def outer(self, inner: Tensor) -> Tensor:
        """sum_i b_i inner_i, [g, d_out, k]."""
        return self.b @ inner.flatten(1, 2)

    def images(self, inner: Tensor) -> Tensor:
        """[b_i inner_i]_i side by side, [g, d_out, n k]."""
        g, d_out, _ = self.b.shape
        return _beside(self.b.reshape(g, d_out, self.adapters, -1).transpose(1, 2) @ inner)

    def core(self, left: Tensor, right: Tensor) -> Tensor:
        """``left^T dW_i right``, [g, n, p, q], of bases [g, d_out, p] and [g, d_in, q]."""
        return self.transposed.inner(left).mT @ self.inner(right)


def _beside(columns: Tensor) -> Tensor:
    """[g, n, d, r] as [g, d, n r]."""
    return columns.transpose(1, 2).flatten(2)


def stack(
    modules: Sequence[Sequence[tuple[Tensor, Tensor]]], dtype: torch.dtype, device: str = "cpu"
) -> Stack:
    """Make a stack of factors ``modules[g][i] = (A [r_i, d_in], B [d_out, r_i] with the scale)``, n equal for all g."""
    rank = max(a.shape[0] for module in modules for a, _ in module)
    first_a, first_b = modules[0][0]
    shape = (len(modules), len(modules[0]))
    a = torch.zeros(*shape, rank, first_a.shape[1], dtype=dtype, device=device)
    b = torch.zeros(*shape, first_b.shape[0], rank, dtype=dtype, device=device)
    for g, module in enumerate(modules):
        for i, (one_a, one_b) in enumerate(module):
            a[g, i, : one_a.shape[0]] = one_a.to(dtype)
            b[g, i, :, : one_b.shape[1]] = one_b.to(dtype)
    return Stack(a, b)


def better(one: F | None, two: F) -> F:
    """Of every module the fit of lower error; the first at a tie."""
    if one is None:
        return two
    second = two.error < one.error
    picked = {}
    for field in fields(two):  # type: ignore[arg-type]
        first, other = getattr(one, field.name), getattr(two, field.name)
        picked[field.name] = torch.where(second.reshape(-1, *[1] * (first.ndim - 1)), other, first)
    return type(two)(**picked)
