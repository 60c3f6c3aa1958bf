"""Targets: one module a kind of evidence, each with its records, summary and claims."""

from __future__ import annotations

from typing import Any

from loraforge.errors import UsageError
from loraforge.evidence.targets.allocation import AllocationTarget
from loraforge.evidence.targets.base import Claim, Record, Summary, Target
from loraforge.evidence.targets.cpu_ops import CpuOpsTarget
from loraforge.evidence.targets.dispatch import DispatchTarget
from loraforge.evidence.targets.end_to_end import EndToEndTarget
from loraforge.evidence.targets.expand_ablation import ExpandAblationTarget
from loraforge.evidence.targets.quality import QualityTarget
from loraforge.evidence.targets.reader_fuzz import ReaderFuzzTarget
from loraforge.evidence.targets.recompression import RecompressionTarget
from loraforge.evidence.targets.scale import ScaleTarget
from loraforge.evidence.targets.serving import (
    Adapters500,
    CpuServing,
    FixedWork,
    MixedServingSglang,
    MixedServingVllm,
    NaturalServing,
    Residency,
    SingleFleet,
    SixCell,
    StoppingContract,
)
from loraforge.evidence.targets.shrink_ablation import ShrinkAblationTarget
from loraforge.evidence.targets.spectra import SpectraTarget
from loraforge.evidence.targets.study import QualitySelectionTarget, QualityStudyTarget

TARGETS: dict[str, Target[Any]] = {
    target.name: target
    for target in (
        SpectraTarget(),
        AllocationTarget(),
        RecompressionTarget(),
        QualityTarget(),
        QualitySelectionTarget(),
        QualityStudyTarget(),
        EndToEndTarget(),
        ShrinkAblationTarget(),
        ExpandAblationTarget(),
        DispatchTarget(),
        CpuOpsTarget(),
        ScaleTarget(),
        MixedServingVllm(),
        MixedServingSglang(),
        SixCell(),
        FixedWork(),
        Residency(),
        StoppingContract(),
        SingleFleet(),
        Adapters500(),
        NaturalServing(),
        CpuServing(),
        ReaderFuzzTarget(),
    )
}


def get_target(name: str) -> Target[Any]:
    """The target of that name. Raises UsageError that lists those there are."""
    try:
        return TARGETS[name]
    except KeyError:
        raise UsageError(
            f"no evidence target {name!r}", remedy=f"choose one of {', '.join(TARGETS)}"
        ) from None


__all__ = ["TARGETS", "Claim", "Record", "Summary", "Target", "get_target"]
