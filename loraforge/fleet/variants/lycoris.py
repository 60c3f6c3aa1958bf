"""LoHa and LoKr (arXiv:2309.14859): products of thin matrices by other rules, which are thin products too.

LoHa: (W1a W1b) * (W2a W2b), entry by entry. Row by row it is the product of all pairs of columns with all pairs of
rows: rank r^2 (the face-splitting product). LoKr: kron(W1, W2) with W_i = L_i R_i is kron(L1, L2) kron(R1, R2): the
rank is the product of the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loraforge.fleet.modules import Get, LoraModule
from loraforge.fleet.variants.source import Named, Source

_HADA = re.compile(r"(?P<module>.+)\.(?P<part>hada_(?:w[12]_[ab]|t[12]))")
_KRON = re.compile(r"(?P<module>.+)\.(?P<part>lokr_(?:w[12](?:_[ab])?|t2))")


@dataclass(frozen=True)
class LoHaBuild:
    """A [r^2, d_in] and B [d_out, r^2] from w1_a, w2_a [d_out, r] and w1_b, w2_b [r, d_in]."""

    w1_a: str
    w1_b: str
    w2_a: str
    w2_b: str

    @property
    def keys(self) -> tuple[str, ...]:
        return self.w1_b, self.w2_b, self.w1_a, self.w2_a

    def factors(self, get: Get) -> tuple[Tensor, Tensor]:
        a1, b1, a2, b2 = (get(key).double() for key in (self.w1_a, self.w1_b, self.w2_a, self.w2_b))
        a = (b1[:, None, :] * b2[None, :, :]).flatten(0, 1)
        return a, (a1[:, :, None] * a2[:, None, :]).flatten(1)


def loha_modules(source: Source) -> list[LoraModule]:
    """Every module of a LoHa adapter. Raises InputError for convolutions, and where r^2 exceeds the module's size."""
    modules: list[LoraModule] = []
    for name, parts in source.groups(_HADA).items():
        _refuse_convolution(source, parts, "hada_t1", "hada_t2")
        w1_a, w1_b, w2_a, w2_b = (
            source.part(name, parts, f"hada_{part}") for part in ("w1_a", "w1_b", "w2_a", "w2_b")
        )
        (d_out, r), (_, d_in) = source.matrix(w1_a), source.matrix(w1_b)
        if source.matrix(w2_a) != (d_out, r) or not source.matrix(w1_b) == source.matrix(w2_b) == (r, d_in):
            raise source.error(f"shapes of module {name} disagree", w1_a, "save the adapter again")
        build = LoHaBuild(w1_a.stored, w1_b.stored, w2_a.stored, w2_b.stored)
        modules.append(source.converted(name, build, parts, (r * r, d_in, d_out), source.config.scale(name)))
    return modules


@dataclass(frozen=True)
class LoKrBuild:
    """kron(R1, R2) and kron(L1, L2), from each factor's keys: of both halves, or of the whole."""

    w1: tuple[str, ...]
    w2: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return *self.w1, *self.w2

    def factors(self, get: Get) -> tuple[Tensor, Tensor]:
        (l1, r1), (l2, r2) = (_halves([get(key).double() for key in keys]) for keys in (self.w1, self.w2))
        return torch.kron(r1.contiguous(), r2.contiguous()), torch.kron(l1.contiguous(), l2.contiguous())


def lokr_modules(source: Source) -> list[LoraModule]:
    """Every module of a LoKr adapter. Raises InputError for convolutions."""
    modules: list[LoraModule] = []
    for name, parts in source.groups(_KRON).items():
        _refuse_convolution(source, parts, "lokr_t2")
        (m1, r1, n1), w1 = _factor(source, name, parts, "lokr_w1")
        (m2, r2, n2), w2 = _factor(source, name, parts, "lokr_w2")
        build = LoKrBuild(w1, w2)
        shape = (r1 * r2, n1 * n2, m1 * m2)
        modules.append(source.converted(name, build, parts, shape, source.config.scale(name)))
    return modules


def _halves(stored: list[Tensor]) -> tuple[Tensor, Tensor]:
    """L and R with L R the matrix [m, n] that is stored as both, or whole; their inner size is at most min(m, n)."""
    if len(stored) == 2:
        left, right = stored
        if left.shape[1] <= min(left.shape[0], right.shape[1]):
            return left, right
        whole = left @ right
    else:
        (whole,) = stored
    eye = torch.eye(min(whole.shape), dtype=whole.dtype)
    return (whole, eye) if whole.shape[1] < whole.shape[0] else (eye, whole)


def _factor(
    source: Source, name: str, parts: Mapping[str, Named], part: str
) -> tuple[tuple[int, int, int], tuple[str, ...]]:
    """Rows, inner size and columns of one factor, and the keys that it is stored under."""
    if part in parts:
        m, n = source.matrix(parts[part])
        return (m, min(m, n), n), (parts[part].stored,)
    left, right = source.part(name, parts, f"{part}_a"), source.part(name, parts, f"{part}_b")
    (m, r), (rows, n) = source.matrix(left), source.matrix(right)
    if r != rows:
        raise source.error(f"shapes of module {name} disagree", left, "save the adapter again")
    return (m, min(m, r, n), n), (left.stored, right.stored)


def _refuse_convolution(source: Source, parts: Mapping[str, Named], *names: str) -> None:
    for name in names:
        if name in parts:
            raise source.error(
                "cannot be converted: the update of a convolution is not one matrix product", parts[name]
            )
