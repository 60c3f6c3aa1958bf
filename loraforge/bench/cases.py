"""What is timed: projections of two models, cases over them, and the grids of the reported runs. No torch here.

Grids follow the paper (sections 6.6, B.3, B.6). Ranks are prefixes of rank-128 master factors; rank 33 and its like
are left out, since a rank is either masked within a power-of-two bucket (12 and 48 are here for that) or fills it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Phase = Literal["decode", "prefill"]
Op = Literal["shrink", "expand", "lora"]  # lora: both, as one call

RANKS = (1, 2, 4, 8, 12, 16, 32, 48, 64, 128)
PAPER_RANKS = (1, 2, 4, 8, 12, 16)
DECODE_TOKENS = (1, 8, 32, 128, 256)
PREFILL_TOKENS = (128, 512, 2048, 8192)
MAX_RANK = 128
ADAPTERS = 8
SPECTRAL12 = "spectral12"  # the ranks of one layer of the shape fleet qwen50, allocated spectrally at 1/12


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
    """

    projection: Projection
    phase: Phase
    tokens: int
    adapters: int
    rank: int
    capacity: int
    mix: str | None = None

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
        )


def sweep() -> Iterator[Case]:
    """The reported grid: tight pools everywhere; pools of capacity 128 in prefill, and in decode at ranks 8 and 64."""
    for projection in PROJECTIONS:
        for rank in RANKS:
            for phase, counts in (("decode", DECODE_TOKENS), ("prefill", PREFILL_TOKENS)):
                for tokens in counts:
                    for capacity in dict.fromkeys((rank, MAX_RANK)):
                        if capacity == rank or phase == "prefill" or rank in (8, 64):
                            yield Case(projection, phase, tokens, min(ADAPTERS, tokens), rank, capacity)  # type: ignore[arg-type]


def layers(mixed: dict[str, int]) -> Iterator[Case]:
    """Whole layers of Qwen3-4B: decode at T 128 with 50 adapters, prefill at T 2048 with 8.

    mixed: by projection, the greatest rank of the spectral fleet there; none for a run without it.
    """
    for projection in PROJECTIONS[:4]:
        for rank, capacity in ((8, 8), (8, 16), (8, 64), (64, 64)):
            yield Case(projection, "decode", 128, 50, rank, capacity)
            yield Case(projection, "prefill", 2048, 8, rank, capacity)
        if projection.name in mixed:
            most = mixed[projection.name]
            yield Case(projection, "decode", 128, 50, most, max(64, most), SPECTRAL12)


def expand_ablation() -> Iterator[Case]:
    """The 256 conditions of the RowExpand ablation (paper, section B.6)."""
    for projection in PROJECTIONS:
        for rank in (4, 16, 32, 64):
            for phase, counts in (("decode", (32, 128)), ("prefill", (512, 2048))):
                for tokens in counts:
                    for adapters in (1, 8):
                        yield Case(projection, phase, tokens, adapters, rank, rank)  # type: ignore[arg-type]


def tuning() -> Iterator[Case]:
    """What the tuner sees: token counts and ranks between those of :func:`sweep`, so that no operand is shared."""
    for projection in PROJECTIONS:
        for rank in (3, 7, 15, 29, 60, 120):
            for phase, counts in (
                ("decode", (2, 6, 24, 96, 192)),
                ("prefill", (160, 384, 1536, 6144)),
            ):
                for tokens in counts:
                    adapters = min(ADAPTERS, tokens)
                    for capacity in (rank, MAX_RANK):
                        if capacity == rank or (phase == "prefill" and rank in (7, 60)):
                            yield Case(projection, phase, tokens, adapters, rank, capacity)  # type: ignore[arg-type]
        yield Case(projection, "decode", 120, 48, 7, 7)
