"""Operands of a case, laid out as each side wants them: engines' pools at capacity, and our table over them.

Masters are drawn once a projection; a case takes prefixes of their directions. A pool keeps what lay behind the live
directions of a slot (another adapter's), as an engine's does; it is finite, so that reading it is waste, not an error
that the check would see: that padding is never used is what the operator tests hold the kernels to, with NaN.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from loraforge.bench.cases import MAX_RANK, Case, Projection
from loraforge.ops.plan import Plan
from loraforge.ops.slots import Slot, SlotTable, bucket


@dataclass(frozen=True)
class Masters:
    """Factors of ``adapters`` adapters on one projection, and activations.

    a: [adapters, slices, MAX_RANK, d_in], of variance 1/d_in; b: [adapters, d_out, MAX_RANK], of variance 1/MAX_RANK;
    x: [tokens, d_in] and base: [tokens, d_out], of variance 1. All of one dtype.
    """

    projection: Projection
    a: Tensor
    b: Tensor
    x: Tensor
    base: Tensor


def masters(
    projection: Projection,
    *,
    adapters: int,
    tokens: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Masters:
    """Draw the masters of a projection; the same seed gives the same on a kind of device."""

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, scale, generator=generator)

    name = f"{projection.model}/{projection.name}/{seed}"
    generator = torch.Generator(device).manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:15], 16))
    slices, d_in, d_out = len(projection.channels), projection.d_in, projection.d_out
    return Masters(
        projection,
        draw(adapters, slices, MAX_RANK, d_in, scale=d_in**-0.5),
        draw(adapters, d_out, MAX_RANK, scale=MAX_RANK**-0.5),
        draw(tokens, d_in),
        draw(tokens, d_out),
    )


def routing(case: Case, seed: int) -> Tensor:
    """int32 [T], the slot of each token: adapters as even as can be; shuffled in decode, grouped in prefill. In a mixed
    step every decode is of another adapter, and every prompt too, as long as there are some."""
    if case.decodes:
        lengths = torch.tensor([1] * case.decodes + case.prompts)
        order = torch.randperm(case.adapters, generator=torch.Generator().manual_seed(seed))
        each = order[torch.arange(len(lengths)) % case.adapters]
        return each.repeat_interleave(lengths).to(torch.int32)
    slots = torch.arange(case.tokens) * case.adapters // case.tokens
    if case.phase == "decode":
        slots = slots[torch.randperm(case.tokens, generator=torch.Generator().manual_seed(seed))]
    return slots.to(torch.int32)


def scales(ranks: list[list[int]]) -> list[float]:
    """A scale a slot, a power of two (an engine that folds it into B then rounds nothing) that is never 1 and makes
    the update about as large as the base output, so that an error in it cannot hide."""
    exponents = [round(math.log2(MAX_RANK / max(1, *mine)) / 2) - slot % 2 for slot, mine in enumerate(ranks)]
    return [2.0 ** (exponent or 1) for exponent in exponents]


@dataclass
class Operands:
    """One case on a device. ``ranks``: live directions of each slot and slice."""

    case: Case
    masters: Masters
    ranks: list[list[int]]
    seed: int
    x: Tensor = field(init=False)
    base: Tensor = field(init=False)
    token_slots: Tensor = field(init=False)
    scales: list[float] = field(init=False)
    plans: dict[int, Plan] = field(default_factory=dict, init=False)  # by tile, as arms fill them

    def __post_init__(self) -> None:
        self.x = self.masters.x[: self.case.tokens]
        self.base = self.masters.base[: self.case.tokens]
        self.token_slots = routing(self.case, self.seed).to(self.device)
        self.scales = scales(self.ranks)

    @property
    def device(self) -> torch.device:
        return self.masters.x.device

    @property
    def dtype(self) -> torch.dtype:
        return self.masters.x.dtype

    @property
    def slots(self) -> int:
        return self.case.adapters

    @property
    def pieces(self) -> int:
        return len(self.case.projection.channels)

    @property
    def uniform(self) -> bool:
        return all(rank == self.case.rank for mine in self.ranks for rank in mine)

    @cached_property
    def slot_ranks(self) -> list[int]:
        """The one rank a slot that an engine knows: the greatest of its slices."""
        return [max(mine) for mine in self.ranks]

    @cached_property
    def a_pool(self) -> Tensor:
        """[slots, slices * capacity, d_in]: slice s of slot i at rows [s * R, s * R + r) for R = ``slot_ranks[i]``.

        A slice of a lower rank than its slot's is padded with zeros up to R, as loaders do."""
        case, pieces = self.case, self.pieces
        pool = torch.empty(
            (self.slots, pieces * case.capacity, case.projection.d_in), dtype=self.dtype, device=self.device
        )
        source = self.masters.a
        filler = source.flip(0).reshape(len(source), -1, case.projection.d_in)  # what another adapter left
        pool.copy_(filler[: self.slots, : pieces * case.capacity])
        if self.uniform:
            live = pool[:, : pieces * case.rank].view(self.slots, pieces, case.rank, -1)
            live.copy_(source[: self.slots, :, : case.rank])
            return pool
        for slot, (mine, most) in enumerate(zip(self.ranks, self.slot_ranks, strict=True)):
            pool[slot, : pieces * most] = 0
            for piece, rank in enumerate(mine):
                pool[slot, piece * most : piece * most + rank] = source[slot, piece, :rank]
        return pool

    @cached_property
    def b_pool(self) -> Tensor:
        """[slots, d_out, capacity], live in ``[:, :, :R]``; zeros between a slice's rank and its slot's."""
        source = self.masters.b[: self.slots]
        pool = source.flip(0)[:, :, : self.case.capacity].contiguous()
        if self.uniform:
            pool[:, :, : self.case.rank] = source[:, :, : self.case.rank]
            return pool
        for slot, (mine, most) in enumerate(zip(self.ranks, self.slot_ranks, strict=True)):
            pool[slot, :, :most] = 0
            for (first, channels), rank in zip(self.case.projection.slices, mine, strict=True):
                rows = slice(first, first + channels)
                pool[slot, rows, :rank] = source[slot, rows, :rank]
        return pool

    @cached_property
    def b_compact(self) -> Tensor:
        """One dimension: a region [channels, bucket(rank)] for each slot and slice; zeros past the rank."""
        source = self.masters.b
        if self.uniform:
            pool = source.new_zeros((self.slots, self.case.projection.d_out, bucket(self.case.rank)))
            pool[:, :, : self.case.rank] = source[: self.slots, :, : self.case.rank]
            return pool.reshape(-1)
        pool = source.new_zeros(sum(size for _, size in self._regions))
        at = iter(self._regions)
        for slot, mine in enumerate(self.ranks):
            for (first, channels), rank in zip(self.case.projection.slices, mine, strict=True):
                offset, size = next(at)
                if rank:
                    region = pool[offset : offset + size].reshape(channels, bucket(rank))
                    region[:, :rank] = source[slot, first : first + channels, :rank]
        return pool

    @cached_property
    def _regions(self) -> list[tuple[int, int]]:
        """(offset, elements) of each region of the compact B, slot by slot."""
        sizes = [
            channels * bucket(rank)
            for mine in self.ranks
            for channels, rank in zip(self.case.projection.channels, mine, strict=True)
        ]
        return [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]

    @cached_property
    def table(self) -> SlotTable:
        """Our metadata: A in the engine's pool, B compact."""
        table = SlotTable(self.slots, self.pieces, self.device)
        d_in = self.case.projection.d_in
        regions = iter(self._regions)
        for slot, (mine, most) in enumerate(zip(self.ranks, self.slot_ranks, strict=True)):
            start = slot * self.a_pool.shape[1]
            table.set(
                slot,
                [
                    Slot(
                        (start + piece * most) * d_in, next(regions)[0], rank, bucket(rank), self.scales[slot]
                    )
                    for piece, rank in enumerate(mine)
                ],
            )
        return table

    @cached_property
    def live(self) -> Tensor:
        """bool [T, slices, rank]: what of Z is live."""
        ranks = torch.tensor(self.ranks, device=self.device)[self.token_slots.long()]
        return torch.arange(self.case.rank, device=self.device) < ranks[:, :, None]

    @cached_property
    def z(self) -> Tensor:
        """FP32 [T, slices, rank] of values that the dtype holds exactly, zero where not live: expand's input."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 1)
        shape = (self.case.tokens, self.pieces, self.case.rank)
        drawn = torch.empty(shape, dtype=torch.float32, device=self.device).normal_(generator=generator)
        return drawn.to(self.dtype).float() * self.live

    def packed_columns(self) -> Tensor:
        """int64 [T, slices * rank]: where an engine keeps Z's entries, slice s at s * R; dead ones go to column 0."""
        most = torch.tensor(self.slot_ranks, device=self.device)[self.token_slots.long()][:, None, None]
        piece = torch.arange(self.pieces, device=self.device)[None, :, None]
        column = piece * most + torch.arange(self.case.rank, device=self.device)
        return (column * self.live).flatten(1)

    def pack(self, z: Tensor, fill: float = 0.5) -> Tensor:
        """FP32 [T, slices * capacity]: canonical Z in an engine's layout, ``fill`` where nothing is live."""
        packed = z.new_full((self.case.tokens, self.pieces * self.case.capacity), fill)
        if self.uniform:
            packed[:, : self.pieces * self.case.rank] = z.flatten(1)
            return packed
        each = torch.arange(self.case.rank, device=self.device)
        width = torch.tensor(self.slot_ranks, device=self.device)[self.token_slots.long()][:, None]
        rows = torch.arange(self.case.tokens, device=self.device)[:, None].expand(-1, self.case.rank)
        for piece in range(self.pieces):
            inside = each < width
            packed[rows[inside], (piece * width + each)[inside]] = z[:, piece][inside]
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Canonical FP32 [T, slices, rank] of an engine's Z, zero where not live."""
        taken = packed.gather(1, self.packed_columns()).float().view(-1, self.pieces, self.case.rank)
        return torch.where(self.live, taken, 0.0)

    def shrink_bytes(self) -> int:
        """The least that a shrink moves: activations, live factors of the adapters in the batch, Z in FP32."""
        size, d_in = self.x.element_size(), self.case.projection.d_in
        return (
            self.case.tokens * d_in * size
            + sum(map(sum, self.ranks)) * d_in * size
            + int(self.live.sum()) * 4
        )

    def expand_bytes(self) -> int:
        """The least that an expand moves: Z in FP32, live factors, the output read and written."""
        size = self.x.element_size()
        weights = sum(
            rank * channels
            for mine in self.ranks
            for channels, rank in zip(self.case.projection.channels, mine, strict=True)
        )
        outputs = 2 * self.case.tokens * self.case.projection.d_out
        return int(self.live.sum()) * 4 + (weights + outputs) * size
