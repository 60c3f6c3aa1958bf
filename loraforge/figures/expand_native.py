"""Expands against the best of the engines: RowExpand by tile limit, all of ours over the paper's grid (figure 17)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loraforge.evidence.tables import Row, Table
from loraforge.evidence.targets.kernels import NATIVE, Item, cells
from loraforge.figures import kernels, style
from loraforge.figures.expand_ablation import SCOPES, draw_limits, limit_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = "grid_"


def table(records: Sequence[Item]) -> Table:
    """Rows of two kinds of panels: all, decode and prefill of the ablation by staging and tile limit (``at``), and
    ``grid_<phase>`` of the paper's grid by model, arm and measure (``name``; see ``kernels``)."""
    ablated = [cell for cell in cells(records) if cell.group == "ablation"]
    columns = ("panel", "model", "arm", "name", "at", "value", "low", "high", "n")
    empty: Row = dict.fromkeys(columns)
    rows = limit_rows(ablated, NATIVE) + kernels.grid_rows(records, "expand", GRID)
    return [empty | row for row in rows]


def draw(rows: Table, context: style.Context) -> Figure:
    """Tile limits by scope above, bars of the grid below."""
    swept = [row for row in rows if row["panel"] in SCOPES]
    grids = [phase for phase in kernels.PHASES if any(row["panel"] == GRID + phase for row in rows)]
    with style.styled():
        if not rows:
            return kernels.nothing(context, "Expands against the engines")
        heights = ([1.7] if swept else []) + ([2.1] if grids else [])
        figure = style.new_figure(sum(heights) + 1.05)
        parts = figure.add_gridspec(len(heights), 6, height_ratios=heights)
        handles: list[Any] = []
        if swept:
            places = [parts[0, 2 * column : 2 * column + 2] for column in range(3)]
            handles += draw_limits(figure, places, swept, "Speed over the engines' best", gain=False)
        for column, phase in enumerate(grids):
            own = [row for row in rows if row["panel"] == GRID + phase]
            each = figure.add_subplot(parts[-1, 3 * column : 3 * column + 3])
            kernels.bars(each, own)
            kernels.ratio_axis(each, "y", *kernels.extent(own), 0.14)
            letter = "de"[column] if swept else "ab"[column]
            cases = max(int(kernels.number(row, "n")) for row in own)
            each.set_title(f"({letter}) {phase.capitalize()}, the paper's grid: {cases} cases a bar")
            if column == 0:
                each.set_ylabel("Speed over the engines' best")
                arms = [arm for arm in kernels.OURS if any(row["arm"] == arm for row in rows)]
                handles += kernels.bar_handles(arms)
        figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=6.5)
        text = [context.line("tight pools, geometric means over cases", "Expands alone")]
        if swept:
            conditions = style.plural(max(int(kernels.number(row, "n")) for row in swept), "condition")
            text.append(f"(a) to (c): RowExpand as the paper has it, with a fixed tile limit, {conditions}.")
        if grids:
            text.append(f"Whiskers: least and greatest case. {kernels.KERNELS}")
        kernels.caption(figure, *text)
        return figure
