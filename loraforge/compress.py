"""The whole chain in one call: verify, factorise, allocate, export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loraforge.allocate.allocation import allocation_file
from loraforge.allocate.budget import Budget, floor_warning
from loraforge.allocate.policy import allocate, problem_of
from loraforge.config import Layout, Policy
from loraforge.export.manifest import Manifest
from loraforge.export.options import DTYPES, LAYOUTS, parse_dtype
from loraforge.export.writer import export_fleet
from loraforge.factor.cache import factorise_fleet
from loraforge.files import refuse_non_empty, refuse_to_replace
from loraforge.fleet.lock import fleet_name
from loraforge.fleet.peft_io import Adapter
from loraforge.fleet.source import open_source
from loraforge.progress import Timer, say


@dataclass(frozen=True)
class Compressed:
    """What :func:`compress` did: the manifest it wrote, and wall-clock seconds by stage."""

    manifest: Manifest
    seconds: dict[str, float]


def compress(
    source: Sequence[Path],
    budget: Budget,
    out: Path,
    *,
    cache: Path,
    policy: Policy = "spectral",
    layouts: Sequence[Layout] = LAYOUTS,
    dtype: str = "bfloat16",
    force: bool = False,
) -> Compressed:
    """Compress adapter folders, or the fleet of one lock file, under ``budget`` into the folder ``out``.

    Peak memory is that of one adapter's factors and the fleet's spectra. ``cache`` keeps factors, so that another
    budget costs only allocation and export. Raises every :class:`~loraforge.errors.LoraForgeError` that the
    stages do; ``out`` appears whole or not at all.
    """
    width = DTYPES[parse_dtype(dtype)]
    refuse_non_empty(Path(out), force=force)
    refuse_to_replace(out, [*source, cache])
    seconds: dict[str, float] = {}
    with Timer() as timer:
        fleet = open_source(source)
        refuse_to_replace(out, [adapter.path for adapter in fleet])
    seconds["verify"] = timer.s
    with Timer() as timer:
        cached = factorise_fleet(fleet, cache)
    seconds["factor"] = timer.s
    with Timer() as timer:
        problem = problem_of(cached)
        allocation = allocate(problem, policy, budget, bytes_per_parameter=width or widest(fleet))
        chosen = allocation_file(fleet_name(source), problem, allocation)
    seconds["allocate"] = timer.s
    if warning := floor_warning(budget, allocation.ceiling, problem.rank, problem.cost):
        say(warning)
    factors = dict(zip((adapter.name for adapter in fleet), cached, strict=True))
    with Timer() as timer:
        manifest = export_fleet(
            fleet,
            lambda adapter: factors[adapter.name],
            chosen,
            out,
            layouts=layouts,
            dtype=dtype,
            force=force,
        )
    seconds["export"] = timer.s
    return Compressed(manifest, seconds)


def widest(fleet: Sequence[Adapter]) -> int:
    """Bytes of the widest stored parameter: what a byte budget counts where each module keeps its own dtype."""
    return max(module.dtype.itemsize for adapter in fleet for module in adapter.modules)
