"""Both products by forced kernels and by the automatic choice, over every rank and token count (paper, figures 13 to
15)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.kernels import Item
from loraforge.figures import kernels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# (arm, column of the table, title)
MAPS = (
    ("custom", "value", "Decode kernels, forced"),
    ("segmented", "value", "Prefill kernels, forced"),
    ("auto", "value", "Automatic"),
    ("auto", "low", "Automatic, worst case"),
)
CACHES = ("warm", "flushed")
LIMIT = 4.0  # quotients beyond this and below its inverse have the last colour


def table(records: Sequence[Item]) -> Table:
    """Rows by phase, cache, rank, tokens and arm; see ``kernels.sweep_rows``."""
    return kernels.sweep_rows(records)


def draw(rows: Table, context: style.Context) -> Figure:
    """A row of maps a phase and cache, a map an arm; purple is faster than the engines' best, orange slower."""
    with style.styled():
        if not rows:
            return kernels.nothing(context, "Dispatch")
        strips = [
            (phase, cache)
            for phase in kernels.PHASES
            for cache in CACHES
            if any((row["phase"], row["cache"]) == (phase, cache) for row in rows)
        ]
        maps = [each for each in MAPS if any(row["arm"] == each[0] for row in rows)]
        counts = [
            len({row["rank"] for row in rows if (row["phase"], row["cache"]) == strip}) for strip in strips
        ]
        heights = [max(0.128 * count + 0.36, 1.2) for count in counts]
        figure = style.new_figure(sum(heights) + 1.0)
        panels = figure.subplots(
            len(strips), len(maps), squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        image: Any = None
        for line, ((phase, cache), across) in enumerate(zip(strips, panels, strict=True)):
            own = [row for row in rows if (row["phase"], row["cache"]) == (phase, cache)]
            for index, ((arm, column, title), each) in enumerate(zip(maps, across, strict=True)):
                image = _map(each, [row for row in own if row["arm"] == arm], own, column)
                if line == 0:
                    each.set_title(title)
                if line == len(strips) - 1:
                    each.set_xlabel("Tokens")
                if index == 0:
                    each.set_ylabel(f"{phase.capitalize()}, {cache}\nrank")
        bar = figure.colorbar(
            image, ax=panels, location="top", fraction=0.02, aspect=60, pad=0.015, extend="both"
        )
        bar.set_ticks(
            [math.log2(value) for value in (0.25, 0.5, 0.7, 1, 1.4, 2, 4)],
            labels=["0.25×", "0.5×", "0.7×", "1×", "1.4×", "2×", "4×"],
        )
        bar.ax.set_title("Speed over the engines' best", fontsize=7, fontweight="normal", loc="center")
        bar.outline.set_linewidth(0.5)
        cases = max(int(kernels.number(row, "n")) for row in rows)
        kernels.caption(
            figure,
            context.line(f"{style.plural(cases, 'case')} a cell", "Shrink and expand together, tight pools"),
            "Warm: operands in cache as between replays; flushed: the cache overwritten before each sample.",
            "Geometric mean over models and projections, of each the fastest engine (tuned ones included) over the arm;"
            " on the right, the case where automatic dispatch does worst.",
            kernels.KERNELS,
        )
        return figure


def _map(axes: Axes, rows: Table, all_rows: Table, column: str) -> Any:
    from matplotlib.colors import Normalize

    ranks = sorted({int(kernels.number(row, "rank")) for row in all_rows})
    tokens = sorted({int(kernels.number(row, "tokens")) for row in all_rows})
    values = [[math.nan] * len(tokens) for _ in ranks]
    for row in rows:
        at = ranks.index(int(kernels.number(row, "rank"))), tokens.index(int(kernels.number(row, "tokens")))
        values[at[0]][at[1]] = kernels.number(row, column)
    scale = Normalize(-math.log2(LIMIT), math.log2(LIMIT))
    image = axes.imshow(
        [[math.log2(value) if value == value else math.nan for value in line] for line in values],
        cmap="PuOr", norm=scale, aspect="auto", interpolation="nearest",
    )  # fmt: skip
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if value == value:
                dark = abs(math.log2(value)) > 0.62 * math.log2(LIMIT)
                axes.text(
                    x, y, f"{value:.2f}" if value < 9.995 else f"{value:.0f}", ha="center",
                    va="center_baseline", fontsize=5.4, color="white" if dark else style.INK,
                )  # fmt: skip
    axes.set_xticks(range(len(tokens)), [str(count) for count in tokens], fontsize=6)
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks], fontsize=6)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image
