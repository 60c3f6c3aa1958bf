"""Expand ablation: RowExpand's tile limit and staging over 256 conditions, and expands over the paper's grid (Figs. 10
and 17, Table 5, section B.6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from loraforge.evidence.targets.base import Summary
from loraforge.evidence.targets.kernels import (
    NATIVE,
    Cell,
    Item,
    KernelTarget,
    Resources,
    cells,
    compared,
    counted,
    geomean,
    settings,
    speedups,
    sweep,
)

LIMITS = (1, 4, 8, 16)
STAGED, DIRECT = "staged", "unstaged"


def arm(staging: str, limit: int) -> str:
    """The name of an ablated RowExpand."""
    return f"{staging}{limit}"


class ExpandAblationTarget(KernelTarget):
    """``expand_ablation``: cells of operation expand, of groups ablation and sweep, and compiled resources."""

    name: ClassVar = "expand_ablation"
    figures: ClassVar = ("expand_ablation", "expand_native")

    def summarise(self, records: Sequence[Item], fleet: str) -> Summary:
        summary = counted(records) | settings(records)
        summary |= compared(sweep(records, "expand", "decode"), "expand_decode")
        summary |= compared(sweep(records, "expand", "prefill"), "expand_prefill")
        ablated = [cell for cell in cells(records) if cell.group == "ablation"]
        for phase in ("all", "decode", "prefill"):
            summary |= _ablation([cell for cell in ablated if phase in ("all", cell.phase)], phase)
        for item in records:
            if isinstance(item, Resources):
                key = f"resources.{STAGED if item.staged else DIRECT}.width{item.width}"
                summary |= {
                    f"{key}.registers": item.registers,
                    f"{key}.local_bytes": item.local_bytes,
                    f"{key}.shared_bytes": item.shared_bytes,
                    f"{key}.occupancy": item.occupancy,
                }
        return summary


def _ablation(found: Sequence[Cell], phase: str) -> Summary:
    """Speeds over tile limit 1 of the same staging, over the unstaged at the same limit, and over the best native."""
    summary: Summary = {f"ablation.{phase}.cases": len(found)} if found else {}
    for staging in (STAGED, DIRECT):
        for limit in LIMITS:
            name = arm(staging, limit)
            others = {"over_limit1": (arm(staging, 1),), "over_native": NATIVE}
            if staging == STAGED:
                others["over_unstaged"] = (arm(DIRECT, limit),)
            for what, over in others.items():
                if values := speedups(found, name, over):
                    summary[f"ablation.{phase}.{name}.{what}"] = geomean(values)
    return summary
