"""What is timed: projections of two models, cases over them, and the grids of the reported runs. No torch here.

Grids follow the paper (sections 6.6, B.3, B.6). Ranks are prefixes of rank-128 master factors; rank 33 and its like
are left out, since a rank is either masked within a power-of-two bucket (12 and 48 are here for that) or fills it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

Phase = Literal["decode", "prefill"]
Op = Literal["shrink", "expand", "lora"]  # lora: both, as one call

RANKS = (1, 2, 4, 8, 12, 16, 32, 48, 64, 128)
PAPER_RANKS = (1, 2, 4, 8, 12, 16)
DECODE_TOKENS = (1, 8, 32, 128, 256)
PREFILL_TOKENS = (128, 512, 2048, 8192)
TUNED_RANKS = (4, 8, 16, 32, 64, 128)
# token counts that the tuner measures, and the greatest that each stands for: close below the sizes that engines
# capture and chunk at, since a kernel's last wave of blocks depends on them
TUNED_DECODE = {2: 4, 6: 12, 28: 48, 120: 144, 240: 512}
TUNED_PREFILL = {120: 256, 480: 1024, 1920: 4096, 7680: 16384}
MAX_RANK = 128
ADAPTERS = 8
FEW = 16  # adapters of a batch up to which those tokens that are many are tuned apart
MANY = {120: 40, 240: 60}  # tokens -> adapters of a batch of a large fleet
SPREAD = "spread"  # before the mean of ranks as :func:`spread_ranks` draws them
SPECTRAL12 = "spectral12"  # the ranks of one layer of a shape fleet, allocated spectrally at 1/12
PROMPT = 256  # tokens of a prompt in a mixed step, about


@dataclass(frozen=True)
class Projection:
    """One linear layer, or a fused group: ``channels`` of each slice, in the order of the output's columns."""

    model: str
    name: str
    d_in: int
    channels: tuple[int, ...]

    @property
    def d_out(self) -> int:
        return sum(self.channels)

    @property
    def slices(self) -> list[tuple[int, int]]:
        """(first output channel, channels) of each slice."""
        return [(sum(self.channels[:i]), count) for i, count in enumerate(self.channels)]

    @property
    def offsets(self) -> tuple[int, ...]:
        """First channel of each slice, and the end."""
        return tuple(sum(self.channels[:i]) for i in range(len(self.channels) + 1))


QWEN = "Qwen3-4B"
LLAMA = "Llama-3.1-8B"
PROJECTIONS = (
    Projection(QWEN, "qkv", 2560, (4096, 1024, 1024)),
    Projection(QWEN, "o", 4096, (2560,)),
    Projection(QWEN, "gate_up", 2560, (9728, 9728)),
    Projection(QWEN, "down", 9728, (2560,)),
    Projection(LLAMA, "qkv", 4096, (4096, 1024, 1024)),
    Projection(LLAMA, "o", 4096, (4096,)),
    Projection(LLAMA, "gate_up", 4096, (14336, 14336)),
    Projection(LLAMA, "down", 14336, (4096,)),
)


@dataclass(frozen=True)
class Case:
    """One batch on one projection.

    rank: of every adapter and slice; with ``mix`` the greatest. capacity: directions an engine's pool has room for.
    decodes: of a mixed step, the rows of one token that its prompts stand behind.
    """

    projection: Projection
    phase: Phase
    tokens: int
    adapters: int
    rank: int
    capacity: int
    mix: str | None = None
    decodes: int = 0

    @property
    def ranks(self) -> str:
        return self.mix or str(self.rank)

    @property
    def tight(self) -> bool:
        return self.capacity == self.rank

    @property
    def key(self) -> str:
        """Unique within a run."""
        return (
            f"{self.projection.model}/{self.projection.name}/{self.phase}"
            f"/T{self.tokens}/A{self.adapters}/r{self.ranks}/c{self.capacity}"
        ) + (f"/D{self.decodes}" if self.decodes else "")

    @property
    def prompts(self) -> list[int]:
        """Tokens of each prompt of a mixed step: about PROMPT, as even as can be."""
        rest = self.tokens - self.decodes
        count = max(1, round(rest / PROMPT))
        return [rest * (i + 1) // count - rest * i // count for i in range(count)]


@dataclass(frozen=True)
class Work:
    """A case and the operations that are timed on it."""

    case: Case
    ops: tuple[Op, ...]


def sweep() -> Iterator[Work]:
    """The reported grid of tight pools, and of pools with room for 128 directions where that is asked about.

    Both products together (``lora``) at every rank; each alone at the paper's ranks; the shrink alone, in prefill, with
    room for 128.
    """
    for projection, rank, (phase, counts) in product(PROJECTIONS, RANKS, _PHASES):
        for tokens in counts:
            adapters = min(ADAPTERS, tokens)
            alone: tuple[Op, ...] = ("shrink", "expand") if rank in PAPER_RANKS else ()
            yield Work(Case(projection, phase, tokens, adapters, rank, rank), (*alone, "lora"))
            if phase == "prefill" and rank in PAPER_RANKS:
                yield Work(Case(projection, phase, tokens, adapters, rank, MAX_RANK), ("shrink",))


@dataclass(frozen=True)
class Layer:
    """The four projections of a Qwen3-4B layer in one batch."""

    name: str
    cases: tuple[Case, ...]


def layers(mixed: dict[str, int]) -> Iterator[Layer]:
    """Decode at T 128 with 50 adapters, prefill at T 2048 with 8: rank 8 in pools of 8, 16 and 64, rank 64, and the
    spectral ranks in the pool of 64 that they need. mixed: by projection, the greatest rank there."""
    for phase, tokens, adapters in _LAYERS:
        for rank, capacity in ((8, 8), (8, 16), (8, 64), (64, 64)):
            yield Layer(
                f"rank{rank}" if capacity == rank else f"rank{rank}_pool{capacity}",
                tuple(Case(p, phase, tokens, adapters, rank, capacity) for p in PROJECTIONS[:4]),
            )
    yield Layer(
        SPECTRAL12,
        tuple(
            Case(p, "decode", 128, 50, mixed[p.name], max(64, mixed[p.name]), SPECTRAL12)
            for p in PROJECTIONS[:4]
        ),
    )


def expand_ablation() -> Iterator[Case]:
    """The 256 conditions of the RowExpand ablation (paper, section B.6)."""
    for projection, rank, (phase, counts) in product(PROJECTIONS, (4, 16, 32, 64), _ABLATED):
        for tokens, adapters in product(counts, (1, 8)):
            yield Case(projection, phase, tokens, adapters, rank, rank)


@dataclass(frozen=True)
class Tuned:
    """A case that the tuner measures, and what its entry of the table stands for: see
    :class:`~loraforge.dispatch.table.Entry`."""

    case: Case
    tokens: int
    adapters: int | None
    rank: int
    even: bool = False


def tuning() -> Iterator[Tuned]:
    """What the tuner sees: token counts that :func:`sweep` does not have, so that no operand is shared.

    Few adapters have one rank; many have one rank, or ranks that differ as those of a fleet do.
    """
    for projection, rank, (phase, bounds) in product(PROJECTIONS, TUNED_RANKS, _TUNED):
        for tokens, bound in bounds.items():
            case = Case(projection, phase, tokens, min(ADAPTERS, tokens), rank, rank)
            if phase == "prefill" or tokens not in MANY:
                yield Tuned(case, bound, None, rank)
                continue
            yield Tuned(case, bound, FEW, rank)
            many = replace(case, adapters=MANY[tokens])
            yield Tuned(many, bound, None, rank, even=True)
            most = max(spread_ranks(rank, many.adapters))
            mixed = replace(many, rank=most, capacity=1 << (most - 1).bit_length(), mix=f"{SPREAD}{rank}")
            yield Tuned(mixed, bound, None, rank)


def spread_ranks(mean: int, adapters: int) -> list[int]:
    """Ranks of so many adapters: quantiles of the exponential distribution, which spectral allocation at a small
    budget comes close to, from 1 to MAX_RANK."""
    quantiles = ((index + 0.5) / adapters for index in range(adapters))
    return [min(MAX_RANK, max(1, round(-mean * math.log1p(-q)))) for q in quantiles]


def native_tuning() -> Iterator[Case]:
    """What tiles of the engines' kernels are tuned on: fewer points, since every one compiles each tile anew."""
    for projection, rank, (phase, counts) in product(PROJECTIONS, (8, 64), _NATIVE):
        for tokens in counts:
            yield Case(projection, phase, tokens, min(ADAPTERS, tokens), rank, rank)


_PHASES: tuple[tuple[Phase, tuple[int, ...]], ...] = (("decode", DECODE_TOKENS), ("prefill", PREFILL_TOKENS))
_ABLATED: tuple[tuple[Phase, tuple[int, ...]], ...] = (("decode", (32, 128)), ("prefill", (512, 2048)))
_TUNED: tuple[tuple[Phase, dict[int, int]], ...] = (("decode", TUNED_DECODE), ("prefill", TUNED_PREFILL))
_NATIVE: tuple[tuple[Phase, tuple[int, ...]], ...] = (("decode", (24, 96)), ("prefill", (384, 1536)))
_LAYERS: tuple[tuple[Phase, int, int], ...] = (("decode", 128, 50), ("prefill", 2048, 8))
