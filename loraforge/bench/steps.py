"""Steps as an engine at saturation runs them, as cases: rows of many adapters, alone or beside prompts. No torch here.

A step of decodes has a row an adapter, as long as there are adapters; a mixed one has as many as decode at once, and
prompts of about 256 tokens, each of another adapter. Bounds are close together where engines capture graphs, and every
step is measured a sixteenth below its bound: a captured size stands for the lengths down to the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from loraforge.bench.cases import LLAMA, PROJECTIONS, QWEN, SPECTRAL12, Case, Phase, Projection, Tuned

DECODE_BOUNDS = (4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128)
MIXED_BOUNDS = (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# the bucket that the entries stand for: means of the 1/12 fleets are 4 to 10, of their originals about 60
RANK = 16

Ranks = Mapping[str, Mapping[str, list[list[int]]]]  # model -> projection -> those of each adapter and slice


@dataclass(frozen=True)
class Fleet:
    """What a model is served with. shapes: name of the shape fleet. decodes: rows of a mixed step that decode.
    capacity: directions that an engine's pool has room for."""

    shapes: str
    adapters: int
    decodes: int
    capacity: int


FLEETS = {QWEN: Fleet("qwen50", 50, 48, 64), LLAMA: Fleet("llama35", 35, 35, 128)}


def steps(ranks: Ranks) -> Iterator[Tuned]:
    """Every step on every projection. ranks: of whole fleets."""
    for projection in PROJECTIONS:
        for bound in DECODE_BOUNDS:
            yield step(projection, "decode", bound, ranks)
        for bound in MIXED_BOUNDS:
            yield step(projection, "prefill", bound, ranks)


def step(projection: Projection, phase: Phase, bound: int, ranks: Ranks) -> Tuned:
    """The step that stands for up to ``bound`` tokens; ``prefill``: a mixed one."""
    fleet = FLEETS[projection.model]
    tokens = bound - ceil(bound / 16)
    most = max(max(mine) for mine in ranks[projection.model][projection.name])
    case = Case(
        projection,
        phase,
        tokens,
        fleet.adapters if phase == "prefill" else min(tokens, fleet.adapters),
        most,
        max(fleet.capacity, 1 << (most - 1).bit_length()),
        SPECTRAL12,
        fleet.decodes if phase == "prefill" else 0,
    )
    return Tuned(case, bound, None, RANK)


def ranks_of(case: Case, ranks: Ranks) -> list[list[int]]:
    """Those of each adapter and slice of a case: of adapters from all over the fleet, which stand sorted by rank."""
    whole = ranks[case.projection.model][case.projection.name]
    return [whole[index * len(whole) // case.adapters] for index in range(case.adapters)]


def mean_rank(case: Case, ranks: Ranks) -> int:
    """What an engine's plugin is told of a fleet: the mean over adapters of the greatest of the slices, rounded up."""
    return ceil(fmean(max(mine) for mine in ranks[case.projection.model][case.projection.name]))
