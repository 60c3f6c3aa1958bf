"""Shrink ablation: direct, rank-aware segmented and native shrinks over the paper's grid (Fig. 9, section B.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from loraforge.evidence.targets.base import Summary
from loraforge.evidence.targets.kernels import Item, KernelTarget, compared, counted, settings, sweep


class ShrinkAblationTarget(KernelTarget):
    """``shrink_ablation``: cells of operation shrink."""

    name: ClassVar = "shrink_ablation"
    figures: ClassVar = ("shrink_ablation",)

    def summarise(self, records: Sequence[Item], fleet: str) -> Summary:
        return (
            counted(records)
            | settings(records)
            | compared(sweep(records, "shrink", "decode"), "shrink_decode")
            | compared(sweep(records, "shrink", "prefill"), "shrink_prefill")
            | compared(sweep(records, "shrink", "prefill", tight=False), "shrink_prefill_cap128")
        )
