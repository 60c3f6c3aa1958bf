"""Ordered factors of a whole fleet on one device, without waiting for it in between.

Matrices of one shape are a group; the r x r stages run over all groups of one rank together, in units of at most
``UNIT`` matrices. The FP64-Gram path flags on the device what it cannot vouch for. One read of the flags at the
end tells which matrices, and only those, go to TSQR.

    gram:  X^T X = L L^T;  Q = Y Y^T;  L^T Q L = V S^2 V^T;  X' = X (L^-T V S^1/2);  Y' = (S^-1/2 V^T L^T) Y
    tsqr:  X = Q_X R;      Q = Y Y^T;  R Q R^T = V S^2 V^T;  X' = Q_X (V S^1/2);     Y' = (S^-1/2 V^T R) Y
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from loraforge.errors import InputError, UsageError
from loraforge.factor.batch import normalise
from loraforge.factor.gpu.ops import TALL, WIDE, Backend, ImplicitQ

Method = Literal["auto", "gram", "tsqr"]
Clock = Callable[[str], AbstractContextManager[object]]

GRAM, TSQR, FAILED, NOT_FINITE = 0, 1, 2, 3

UNIT = 8192
# the r x r matrices of a unit, each in FP64: several are alive at once
UNIT_BYTES = 1 << 30
RETRY_UNIT = 512
TSQR_WORKSPACE_BYTES = 4 << 30
# widths that deferred factors are built at: few launches, and at most a third of a buffer unused
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

_EPS = torch.finfo(torch.float64).eps
# Least squared sine between a column of X and those before it: as in the CPU path.
MIN_SQUARED_SINE = 1e-10
# Singular values are roots of eigenvalues here. An error of eps * bound in the core matrix can shift one by
# sqrt(eps * bound), which must stay well below the accepted 1e-4 of the largest.
MAX_CORE_ERROR = 2e-5**2
# FP32 Householder sums squares of entries without scaling them.
_TSQR_RANGE = (2.0**-50, 2.0**50)


class NotFiniteError(InputError):
    """NaN or infinite values: in row ``row`` of group number ``group``."""

    def __init__(self, name: str, group: int, row: int) -> None:
        self.group, self.row = group, row
        super().__init__("holds NaN or infinite values", key=name, remedy="train or copy the adapter again")


@dataclass(frozen=True)
class Group:
    """m updates ``scale * b @ a`` of one shape on one device.

    ``a`` [m, r, d_in] and ``b`` [m, d_out, r] FP32, FP16 or BF16; ``scale`` [m] FP64. ``names`` are for messages.
    """

    a: Tensor
    b: Tensor
    scale: Tensor
    names: Sequence[str] | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """(d_in, d_out, r)."""
        return self.a.shape[2], self.b.shape[1], self.a.shape[1]

    @property
    def transposed(self) -> bool:
        """Whether X is A^T, the smaller side (paper, section A.1)."""
        return self.b.shape[1] > self.a.shape[2]

    def __len__(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Part:
    """Factors of the matrices ``start``..``stop`` of a group at one width: ``a`` [n, k, d_in], ``b`` [n, d_out, k]."""

    start: int
    stop: int
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class GroupFactors:
    """Ordered factors of a group: ``s`` [m, r] FP64 descending with the scale in it, and FP32 factors in parts.

    Without ``ks`` there is one part of full rank. With it, matrices are built at the least of ``WIDTHS`` that
    holds their k, and consecutive matrices of one width make a part: order a group by k to have few. Rows past
    a matrix's own k are its next directions, not padding.
    ``path`` [m] int8 on the CPU: GRAM, TSQR, or FAILED where no path of the method vouches for the result.
    """

    s: Tensor
    parts: tuple[Part, ...]
    path: Tensor

    def factors(self, index: int, k: int | None = None) -> tuple[Tensor, Tensor]:
        """A [k, d_in] and B [d_out, k] of one matrix; views."""
        part = next(part for part in self.parts if part.start <= index < part.stop)
        row = index - part.start
        return part.a[row, :k], part.b[row, :, :k]


def widths(rank: int, k: Tensor) -> Tensor:
    """The width [m] at which matrices of ``rank`` that keep ``k`` [m] directions are built."""
    steps = torch.tensor([*(width for width in WIDTHS if width < rank), rank])
    return steps[torch.searchsorted(steps, k)]


def allocate(groups: Sequence[Group], ks: Sequence[Tensor] | None = None) -> list[GroupFactors]:
    """Uninitialised outputs, for :func:`factorise_groups` to fill again and again. ``ks``: int64 [m] on the CPU."""
    results = []
    for number, group in enumerate(groups):
        d_in, d_out, rank = group.key
        width = torch.full((len(group),), rank) if ks is None else _checked(ks[number], group)
        values, counts = torch.unique_consecutive(width, return_counts=True)
        parts, start = [], 0
        for k, count in zip(values.tolist(), counts.tolist(), strict=True):
            a, b = (
                torch.empty(shape, dtype=torch.float32, device=group.a.device)
                for shape in ((count, k, d_in), (count, d_out, k))
            )
            parts.append(Part(start, start + count, a, b))
            start += count
        s = torch.empty((len(group), rank), dtype=torch.float64, device=group.a.device)
        results.append(GroupFactors(s, tuple(parts), torch.zeros(len(group), dtype=torch.int8)))
    return results


def factorise_groups(
    groups: Sequence[Group],
    backend: Backend,
    *,
    method: Method = "auto",
    ks: Sequence[Tensor] | None = None,
    out: Sequence[GroupFactors] | None = None,
    streams: int = 1,
    unit: int = UNIT,
    clock: Clock | None = None,
) -> list[GroupFactors]:
    """Ordered factors of every group, in order. ``auto`` is Gram with TSQR for what it flags.

    ``out`` is filled (see :func:`allocate`; its widths rule over ``ks``). With ``streams`` above one, units take
    turns on that many streams, so that the eigensolver of one overlaps the products of the next. ``clock`` times
    stages (``gram``, ``qr``, ``core``, ``evd``, ``apply``) on the stream; it means nothing with several.

    Raises NotFiniteError (an InputError) that names the first matrix with NaN or infinite values, UsageError for
    an unknown method.
    """
    if method not in ("auto", "gram", "tsqr"):
        raise UsageError(f"unknown method {method!r}", key="method", remedy="choose from auto, gram, tsqr")
    results = list(allocate(groups, ks) if out is None else out)
    clock = clock or (lambda name: nullcontext())
    _pass(groups, results, backend, method != "tsqr", streams, unit, clock)
    _refuse_not_finite(groups, results)
    if method != "gram":
        _retry(groups, results, backend, unit, clock)
    return results


@dataclass(frozen=True)
class _Piece:
    """The matrices ``start``..``stop`` of group number ``group``."""

    group: int
    start: int
    stop: int


def _units(groups: Sequence[Group], unit: int) -> Iterator[list[_Piece]]:
    """Pieces of equal rank, at most ``unit`` matrices or ``UNIT_BYTES`` together; the costliest rank first."""
    by_rank: dict[int, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        by_rank[group.key[2]].append(number)
    for rank in sorted(by_rank, reverse=True):
        pieces: list[_Piece] = []
        room = most = max(1, min(unit, UNIT_BYTES // (8 * rank * rank)))
        for number in by_rank[rank]:
            start = 0
            while start < len(groups[number]):
                stop = min(len(groups[number]), start + room)
                pieces.append(_Piece(number, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield pieces
                    pieces, room = [], most
        if pieces:
            yield pieces


def _scheduled(
    units: Sequence[list[_Piece]],
    step: Callable[[list[_Piece]], Tensor],
    device: torch.device,
    streams: int,
) -> list[Tensor]:
    if device.type != "cuda" or streams <= 1:
        return [step(pieces) for pieces in units]
    main = torch.cuda.current_stream(device)
    side = _side_streams(device, streams)
    flags = []
    for number, pieces in enumerate(units):
        stream = side[number % streams]
        if number < streams:
            stream.wait_stream(main)
        with torch.cuda.stream(stream):
            flags.append(step(pieces))
            flags[-1].record_stream(main)
    for stream in side:
        main.wait_stream(stream)
    return flags


_STREAMS: dict[tuple[torch.device, int], list[torch.cuda.Stream]] = {}


def _side_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """The same streams every time: solver handles and cached memory belong to a stream."""
    if (device, count) not in _STREAMS:
        _STREAMS[device, count] = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]
    return _STREAMS[device, count]


class _Run:
    """One call: what it reads, where it writes, and the two paths over a unit."""

    def __init__(
        self, groups: Sequence[Group], results: Sequence[GroupFactors], backend: Backend, clock: Clock
    ) -> None:
        self.groups, self.results, self.backend, self.clock = groups, results, backend, clock

    def gram(self, pieces: list[_Piece]) -> Tensor:
        """Build a unit by FP64-Gram; flags int8 [n] on the device."""
        with self.clock("gram"):
            p, q = self._square(pieces), self._square(pieces)
            for piece, rows in _rows(pieces):
                (x, x_layout), (y, y_layout) = self._sides(piece)
                self.backend.gram(x, x_layout, p[rows])
                self.backend.gram(y, y_layout, q[rows])
        with self.clock("core"):
            lower, info = torch.linalg.cholesky_ex(p)
            norms = p.diagonal(dim1=-2, dim2=-1)
            finite = _finite(p, q)
            straight = lower.diagonal(dim1=-2, dim2=-1).square() > MIN_SQUARED_SINE * norms
            good = finite & (info == 0) & straight.all(dim=-1)
            # the core is L^T Q L up to eps * bound, whatever the lengths of the columns of X
            reach = (lower.mT.abs() @ q.diagonal(dim1=-2, dim2=-1).sqrt()[:, :, None]).squeeze(-1)
            bound = _EPS * reach.square().sum(dim=-1)
            core = _or_identity(good, lower.mT @ q @ lower)
        with self.clock("evd"):
            w, vectors = self.backend.eigh(core)
        with self.clock("core"):
            good = good & (bound <= MAX_CORE_ERROR * w[:, 0])
            s, root_x, root_y = self._roots(pieces, w)
            t_x = torch.linalg.solve_triangular(lower.mT, vectors.mT, upper=True) * root_x
            t_y = (lower @ vectors.mT) * root_y
        with self.clock("apply"):
            for piece, rows in _rows(pieces):
                self._store_spectrum(piece, s[rows])
                for side, t in zip(self._sides(piece), (t_x, t_y), strict=True):
                    self._apply(piece, side, t[rows])
        return _flag(good, finite, GRAM)

    def tsqr(self, pieces: list[_Piece]) -> Tensor:
        """Build a unit, whose pieces lie within parts, by TSQR; flags int8 [n] on the device."""
        with self.clock("qr"):
            upper = self._square(pieces, torch.float32)
            largest = upper.new_empty(len(upper))
            implicit: list[ImplicitQ] = []
            for piece, rows in _rows(pieces):
                (x, layout), _ = self._sides(piece)
                implicit.append(self.backend.tsqr_factor(x, layout, upper[rows]))
                largest[rows] = torch.linalg.vector_norm(x, ord=float("inf"), dim=(1, 2)).to(torch.float32)
            good = (largest == 0) | ((largest > _TSQR_RANGE[0]) & (largest < _TSQR_RANGE[1]))
        with self.clock("gram"):
            q = self._square(pieces)
            for piece, rows in _rows(pieces):
                _, (y, layout) = self._sides(piece)
                self.backend.gram(y, layout, q[rows])
        with self.clock("core"):
            finite = _finite(q) & torch.isfinite(largest)
            r = upper.to(torch.float64).triu()
            core = r @ q @ r.mT
            good = good & torch.isfinite(core.sum(dim=(1, 2)))
            core = _or_identity(good, core)
        with self.clock("evd"):
            w, vectors = self.backend.eigh(core)
        with self.clock("core"):
            good = good & torch.isfinite(w[:, 0])
            s, root_x, root_y = self._roots(pieces, w)
            c_x = (vectors.mT * root_x).to(torch.float32)
            t_y = (r.mT @ vectors.mT) * root_y
        with self.clock("apply"):
            for (piece, rows), held in zip(_rows(pieces), implicit, strict=True):
                self._store_spectrum(piece, s[rows])
                (_, layout), other = self._sides(piece)
                ((_, target),) = self._targets(piece, layout)
                self.backend.tsqr_apply(held, _leading(c_x[rows], target, layout), layout, target)
                self._apply(piece, other, t_y[rows])
        return _flag(good, finite, TSQR)

    def split(self, pieces: list[_Piece]) -> Iterator[list[_Piece]]:
        """Units for TSQR: pieces within parts, and orthogonal factors within their workspace."""
        kept: list[_Piece] = []
        used = 0
        for piece in pieces:
            d_in, d_out, rank = self.groups[piece.group].key
            each = max(1, self.backend.tsqr_workspace(1, min(d_in, d_out), rank))
            most = max(1, TSQR_WORKSPACE_BYTES // each)
            for part in self.results[piece.group].parts:
                start, end = max(piece.start, part.start), min(piece.stop, part.stop)
                while start < end:
                    stop = min(end, start + most)
                    if kept and used + (stop - start) * each > TSQR_WORKSPACE_BYTES:
                        yield kept
                        kept, used = [], 0
                    kept.append(_Piece(piece.group, start, stop))
                    used += (stop - start) * each
                    start = stop
        if kept:
            yield kept

    def _sides(self, piece: _Piece) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
        """X and Y^T of a piece, each with its layout."""
        group, rows = self.groups[piece.group], slice(piece.start, piece.stop)
        b, a = (group.b[rows], TALL), (group.a[rows], WIDE)
        return (a, b) if group.transposed else (b, a)

    def _square(self, pieces: list[_Piece], dtype: torch.dtype = torch.float64) -> Tensor:
        rank = self.groups[pieces[0].group].key[2]
        count = sum(piece.stop - piece.start for piece in pieces)
        return torch.empty((count, rank, rank), dtype=dtype, device=self.backend.device)

    def _roots(self, pieces: list[_Piece], w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Singular values [n, r] with the gain, and column factors [n, 1, r] of T_x and T_y: the roots of the
        values and their guarded inverses, with the root of the gain in both and its sign on the side of B."""
        scale = torch.cat([self.groups[piece.group].scale[piece.start : piece.stop] for piece in pieces])
        on_x = torch.cat(
            [
                w.new_full((piece.stop - piece.start,), 0.0 if self.groups[piece.group].transposed else 1.0)
                for piece in pieces
            ]
        )
        gain, sign = scale.abs()[:, None], torch.where(scale < 0, -1.0, 1.0).to(w.dtype)
        # an eigenvalue below rank * eps of the largest is rounding noise; NaN compares false
        live = w > w[:, :1] * (w.shape[-1] * _EPS)
        s = torch.where(live, w, 0.0).sqrt()
        root = (gain * s).sqrt() * torch.where(on_x > 0, sign, 1.0)[:, None]
        inverse = (gain / torch.where(live, s, 1.0)).sqrt() * torch.where(on_x > 0, 1.0, sign)[:, None]
        return s * gain, root[:, None, :], torch.where(live, inverse, 0.0)[:, None, :]

    def _store_spectrum(self, piece: _Piece, s: Tensor) -> None:
        self.results[piece.group].s[piece.start : piece.stop] = s

    def _targets(self, piece: _Piece, layout: int) -> list[tuple[slice, Tensor]]:
        """What of a piece lies in which output: rows of the piece, and their place."""
        found = []
        for part in self.results[piece.group].parts:
            start, stop = max(piece.start, part.start), min(piece.stop, part.stop)
            if start < stop:
                whole = part.a if layout == WIDE else part.b
                place = whole[start - part.start : stop - part.start]
                found.append((slice(start - piece.start, stop - piece.start), place))
        return found

    def _apply(self, piece: _Piece, side: tuple[Tensor, int], t: Tensor) -> None:
        x, layout = side
        for rows, target in self._targets(piece, layout):
            self.backend.apply(x[rows], layout, _leading(t[rows], target, layout), target)


def _pass(
    groups: Sequence[Group],
    results: Sequence[GroupFactors],
    backend: Backend,
    gram: bool,
    streams: int,
    unit: int,
    clock: Clock,
) -> None:
    """Run one path over everything, wait once, and note what it says of every matrix in ``path``."""
    run = _Run(groups, results, backend, clock)
    units = list(_units(groups, unit))
    if not gram:
        units = [small for pieces in units for small in run.split(pieces)]
    if not units:
        return
    flags = _scheduled(units, run.gram if gram else run.tsqr, backend.device, streams)
    host = torch.cat(flags).cpu()
    position = 0
    for piece in (piece for pieces in units for piece in pieces):
        count = piece.stop - piece.start
        results[piece.group].path[piece.start : piece.stop] = host[position : position + count]
        position += count


def _retry(
    groups: Sequence[Group], results: Sequence[GroupFactors], backend: Backend, unit: int, clock: Clock
) -> None:
    """Send what is flagged to TSQR with its entries near one; what that does not vouch for stays FAILED."""
    for group, result in zip(groups, results, strict=True):
        flagged = (result.path == FAILED).nonzero().squeeze(-1)
        for begin in range(0, len(flagged), RETRY_UNIT):
            index = flagged[begin : begin + RETRY_UNIT]
            there = index.to(group.a.device)
            a, a_exponent = normalise(group.a[there].to(torch.float64))
            b, b_exponent = normalise(group.b[there].to(torch.float64))
            scale = torch.ldexp(group.scale[there], a_exponent + b_exponent)
            part = [Group(a.to(torch.float32), b.to(torch.float32), scale)]
            redone = allocate(part)
            _pass(part, redone, backend, False, 1, unit, clock)
            _scatter(result, index, redone[0])


def _scatter(result: GroupFactors, index: Tensor, redone: GroupFactors) -> None:
    result.s[index.to(result.s.device)] = redone.s
    result.path[index] = redone.path
    for part in result.parts:
        inside = ((index >= part.start) & (index < part.stop)).nonzero().squeeze(-1)
        rows, source = ((at).to(part.a.device) for at in (index[inside] - part.start, inside))
        k = part.a.shape[1]
        part.a[rows] = redone.parts[0].a[source, :k]
        part.b[rows] = redone.parts[0].b[source, :, :k]


def _rows(pieces: list[_Piece]) -> Iterator[tuple[_Piece, slice]]:
    """Pieces with their rows of the unit."""
    position = 0
    for piece in pieces:
        count = piece.stop - piece.start
        yield piece, slice(position, position + count)
        position += count


def _leading(t: Tensor, target: Tensor, layout: int) -> Tensor:
    """The columns of ``t`` [n, r, r] that ``target`` has room for."""
    k = target.shape[1] if layout == WIDE else target.shape[2]
    return t[:, :, :k].contiguous()


def _finite(*squares: Tensor) -> Tensor:
    """Whether the factors behind Gram matrices were finite: FP64 holds the square of every FP32 number."""
    total = sum(square.diagonal(dim1=-2, dim2=-1).sum(dim=-1) for square in squares)
    assert isinstance(total, Tensor)
    return torch.isfinite(total)


def _or_identity(good: Tensor, core: Tensor) -> Tensor:
    """``core`` where good: the eigensolver must not see what is not finite."""
    unit = torch.eye(core.shape[-1], dtype=core.dtype, device=core.device)
    return torch.where(good[:, None, None], core, unit)


def _flag(good: Tensor, finite: Tensor, path: int) -> Tensor:
    flag = torch.where(good, path, FAILED)
    return torch.where(finite, flag, NOT_FINITE).to(torch.int8)


def _checked(k: Tensor, group: Group) -> Tensor:
    rank = group.key[2]
    if k.shape != (len(group),) or (len(k) and not (int(k.min()) >= 1 and int(k.max()) <= rank)):
        raise ValueError(f"ranks to keep must be [{len(group)}] of 1 to {rank}")
    return widths(rank, k)


def _refuse_not_finite(groups: Sequence[Group], results: Sequence[GroupFactors]) -> None:
    for number, (group, result) in enumerate(zip(groups, results, strict=True)):
        bad = (result.path == NOT_FINITE).nonzero().squeeze(-1)
        if len(bad):
            index = int(bad[0])
            name = group.names[index] if group.names else f"matrix {index} of group {number} {group.key}"
            raise NotFiniteError(name, number, index)
