"""Microseconds of the low-rank updates of one layer, by ranks and pool: the engines, ours, and the floor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Row, Table
from loraforge.evidence.targets.kernels import AUTO, NATIVE, Cell, Item, cells
from loraforge.figures import kernels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = ("csgmv", "native", "auto")
FLOOR = "floor"


def table(records: Sequence[Item]) -> Table:
    """Rows by phase, layer (``name``) and arm: microseconds summed over the four projections, warm.

    ``native`` takes the fastest engine of each projection. ``floor`` is the least that bytes and launches take.
    """
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells(records):
        if cell.group == "layer" and cell.op == "lora" and cell.projection != "layer" and cell.layer:
            found.setdefault((cell.phase, cell.layer), []).append(cell)
    rows: Table = []
    for (phase, layer), own in found.items():
        first = own[0]
        where: Row = {"phase": phase, "name": layer, "tokens": first.tokens, "adapters": first.adapters}
        for arm in DRAWN:
            times = [cell.best(NATIVE) if arm == "native" else cell.us(arm) for cell in own]
            if None not in times:
                total = sum(time for time in times if time is not None)
                rows.append(where | {"arm": arm, "value": total})
        rows.append(where | {"arm": FLOOR, "value": sum(cell.floor_us for cell in own)})
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """A panel a phase, a group of bars a layer."""
    with style.styled():
        if not rows:
            return kernels.nothing(context, "Whole layers")
        phases = [phase for phase in kernels.PHASES if any(row["phase"] == phase for row in rows)]
        most = max(len({row["name"] for row in rows if row["phase"] == phase}) for phase in phases)
        figure = style.new_figure(0.52 * most + 1.45)
        panels = figure.subplots(1, len(phases), squeeze=False)[0]
        for letter, phase, each in zip("ab", phases, panels, strict=False):
            own = [row for row in rows if row["phase"] == phase]
            _bars(each, own)
            tokens, adapters = int(kernels.number(own[0], "tokens")), int(kernels.number(own[0], "adapters"))
            each.set_title(f"({letter}) {phase.capitalize()}: {tokens:,} tokens, {adapters} adapters")
            each.set_xlabel("Microseconds a layer (four shrinks and expands)")
        floor, *bars = panels[0].get_legend_handles_labels()[0]
        figure.legend(handles=[*bars, floor], loc="outside upper center", ncols=5, fontsize=6.5)
        kernels.caption(
            figure,
            context.line("warm, medians summed over the four projections", "Updates of one Qwen3-4B layer"),
            "×: the engines' best (tuned kernels included, the fastest of each projection) over automatic dispatch."
            " Floor: bytes at the measured copy rate or one launch a projection, whichever is more.",
        )
        return figure


def _bars(axes: Axes, rows: Table) -> None:
    layers = list(dict.fromkeys(str(row["name"]) for row in rows))
    value = {(str(row["name"]), str(row["arm"])): kernels.number(row, "value") for row in rows}
    height = 0.26
    for index, arm in enumerate(DRAWN):
        look = kernels.look_of(arm)
        there = [(place, layer) for place, layer in enumerate(layers) if (layer, arm) in value]
        places = [place + (index - 1) * height for place, _ in there]
        widths = [value[layer, arm] for _, layer in there]
        axes.barh(
            places, widths, height * 0.9, color=look.colour, hatch=look.hatch, edgecolor=style.INK, linewidth=0.5,
            label=look.label,
        )  # fmt: skip
        for place, (_, layer), width in zip(places, there, widths, strict=True):
            words = f"{width:,.0f}" if width >= 100 else f"{width:.1f}"
            if arm == AUTO and (layer, "native") in value:
                words += f" ({kernels.times(value[layer, 'native'] / width)})"
            axes.annotate(
                words, (width, place), xytext=(3, 0), textcoords="offset points", va="center_baseline", fontsize=6
            )  # fmt: skip
    for place, layer in enumerate(layers):
        axes.plot(
            [value[layer, FLOOR]] * 2, [place - 0.42, place + 0.42], color="#c45a6c", linewidth=1.6,
            linestyle=(0, (2.0, 0.8)), zorder=5, label="Floor" if place == 0 else None,
        )  # fmt: skip
    axes.set_yticks(range(len(layers)), [layer_label(layer) for layer in layers])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(layers) - 0.5, -0.55)
    axes.set_xlim(0, 1.22 * max(value.values()))
    style.grid(axes, "x")


def layer_label(layer: str) -> str:
    """``rank8_pool16`` -> ``rank 8, pool 16``; a tight pool is of its rank; mixes by their name."""
    if match := re.fullmatch(r"rank(\d+)(?:_pool(\d+))?", layer):
        return f"rank {match[1]},\npool {match[2] or match[1]}"
    return {"spectral12": "ranks of\nspectral 1/12"}.get(layer, layer)
