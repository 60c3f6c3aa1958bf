"""Shrinks over the paper's grid against the best of the engines (paper, figure 9 and section B.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.kernels import Item
from loraforge.figures import kernels, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "decode": "Decode, tight pools",
    "decode128": "Decode, pools of 128",
    "prefill": "Prefill, tight pools",
    "prefill128": "Prefill, pools of 128",
}


def table(records: Sequence[Item]) -> Table:
    """Rows by panel (phase, and ``128`` for pools of that capacity), model, arm and measure; see ``kernels``."""
    return kernels.grid_rows(records, "shrink")


def draw(rows: Table, context: style.Context) -> Figure:
    """A panel a phase and pool, on one log scale."""
    panels = [panel for panel in TITLES if any(row["panel"] == panel for row in rows)]
    with style.styled():
        figure = style.new_figure(2.75)
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        low, high = kernels.extent(rows)
        for letter, panel, each in zip("abcd", panels, axes, strict=False):
            own = [row for row in rows if row["panel"] == panel]
            kernels.bars(each, own)
            kernels.ratio_axis(each, "y", low, high, 0.14)
            counts = sorted({int(kernels.number(row, "n")) for row in own})
            each.set_title(f"({letter}) {TITLES[panel]}")
            each.set_xlabel(f"{'–'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} cases a bar")
        axes[0].set_ylabel("Speed over the engines' best")
        arms = [arm for arm in kernels.OURS if any(row["arm"] == arm for row in rows)]
        figure.legend(handles=kernels.bar_handles(arms), loc="outside upper center", ncols=3, fontsize=6.5)
        kernels.caption(
            figure,
            context.line("ranks 1–16, four projections", "Shrinks alone"),
            "Bars: geometric mean over cases, of each the fastest engine kernel (tuned ones included) over ours;"
            " whiskers: least and greatest case.",
            kernels.KERNELS,
        )
        return figure
