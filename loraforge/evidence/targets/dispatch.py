"""Dispatch: forced, native and automatic choices over rank, tokens, shape and phase, and whole layers (Figs. 11 and
13-15)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from loraforge.evidence.targets.base import Summary
from loraforge.evidence.targets.kernels import (
    AUTO,
    CSGMV,
    NATIVE,
    Cell,
    Item,
    KernelTarget,
    cells,
    counted,
    geomean,
    settings,
    speedups,
)


class DispatchTarget(KernelTarget):
    """``dispatch``: cells of operation lora (both products), of groups sweep and layer."""

    name: ClassVar = "dispatch"
    figures: ClassVar = ("dispatch", "dispatch_map", "dispatch_layers")

    def summarise(self, records: Sequence[Item], fleet: str) -> Summary:
        found = cells(records)
        swept = [cell for cell in found if cell.group == "sweep" and cell.op == "lora"]
        summary = counted(records) | settings(records) | _worst(swept)
        for phase in ("decode", "prefill"):
            part = [cell for cell in swept if cell.phase == phase]
            for arm in sorted({arm.arm for cell in part for arm in cell.arms} - set(NATIVE)):
                if values := speedups(part, arm, NATIVE):
                    summary[f"geomean.lora_{phase}.{arm}"] = geomean(values)
                    summary[f"worst.lora_{phase}.{arm}"] = min(values)
        for phase in ("decode", "prefill"):
            summary |= _layers(
                [cell for cell in found if cell.group == "layer" and cell.phase == phase], phase
            )
        return summary


def _worst(swept: Sequence[Cell]) -> Summary:
    """The automatic choice against the best native kernel: worst case and share of cases at 0.97 or more."""
    summary: Summary = {}
    for cache, suffix in (("warm", ""), ("flushed", "_flushed")):
        if values := speedups(swept, AUTO, NATIVE, cache):
            summary[f"worst_cell{suffix}"] = min(values)
            summary[f"cells_above_097{suffix}"] = sum(value >= 0.97 for value in values) / len(values)
            summary[f"geomean.lora{suffix}"] = geomean(values)
    if values := speedups(swept, AUTO, CSGMV):
        summary |= {"worst_cell.over_csgmv": min(values), "geomean.lora.over_csgmv": geomean(values)}
    return summary


def _layers(found: Sequence[Cell], phase: str) -> Summary:
    """``<phase>_layer_us.<layer>``: medians of the automatic choice summed over the four projections; ``.<arm>`` those
    of another arm; ``.sequence`` the four measured one after another; ``.floor`` the least they can take."""
    summary: Summary = {}
    for layer in dict.fromkeys(cell.layer for cell in found):
        parts = [cell for cell in found if cell.layer == layer and cell.op == "lora"]
        single = [cell for cell in parts if cell.projection != "layer"]
        if len(single) != 4:
            continue
        key = f"{phase}_layer_us.{layer}"
        for name in dict.fromkeys(arm.arm for arm in single[0].arms):
            for cache, suffix in (("warm", ""), ("flushed", ".flushed")):
                times = [time for cell in single if (time := cell.us(name, cache)) is not None]
                if len(times) == 4:
                    summary[f"{key}{'' if name == AUTO else f'.{name}'}{suffix}"] = sum(times)
        summary[f"{key}.floor"] = sum(cell.floor_us for cell in single)
        for cell in parts:
            if cell.projection == "layer":
                for arm in cell.arms:
                    if (time := cell.us(arm.arm)) is not None:
                        summary[f"{key}.sequence{'' if arm.arm == AUTO else f'.{arm.arm}'}"] = time
    return summary
