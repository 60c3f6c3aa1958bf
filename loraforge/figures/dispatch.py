"""Both products by forced kernels and by the automatic choice, over tokens, at a few ranks (paper, figure 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.kernels import Item
from loraforge.figures import kernels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANKS = (8, 16, 64, 128)
DRAWN = ("csgmv", "custom", "segmented", "fused", "auto")


def table(records: Sequence[Item]) -> Table:
    """Rows by phase, rank, tokens and arm at the ranks that are drawn, warm; see ``kernels.sweep_rows``."""
    rows = [row for row in kernels.sweep_rows(records) if row["cache"] == "warm"]
    ranks = sorted({int(kernels.number(row, "rank")) for row in rows})
    chosen = [rank for rank in RANKS if rank in ranks] or ranks[:4]
    return [row for row in rows if row["rank"] in chosen]


def draw(rows: Table, context: style.Context) -> Figure:
    """A row of panels a phase, a panel a rank; one scale of quotients a phase."""
    with style.styled():
        if not rows:
            return kernels.nothing(context, "Dispatch")
        phases = [phase for phase in kernels.PHASES if any(row["phase"] == phase for row in rows)]
        ranks = sorted({int(kernels.number(row, "rank")) for row in rows})
        figure = style.new_figure(1.75 * len(phases) + 1.0)
        panels = figure.subplots(len(phases), len(ranks), sharey="row", squeeze=False)
        for phase, across in zip(phases, panels, strict=True):
            own = [row for row in rows if row["phase"] == phase]
            auto = [row for row in own if row["arm"] == "auto"]
            lows, highs = zip(kernels.extent(own, ("value",)), kernels.extent(auto or own), strict=True)
            for index, (rank, each) in enumerate(zip(ranks, across, strict=True)):
                _lines(each, [row for row in own if row["rank"] == rank])
                kernels.ratio_axis(each, "y", min(lows), max(highs))
                each.set_title(f"{phase.capitalize()}, rank {rank}")
                each.set_xlabel("Tokens")
                if index == 0:
                    each.set_ylabel("Speed over the engines' best")
        handles = {
            label: handle
            for each in panels.flat
            for handle, label in zip(*each.get_legend_handles_labels(), strict=True)
        }
        looks = [kernels.look_of(arm).label for arm in DRAWN]
        ordered = [label for label in looks if label in handles]
        figure.legend(
            [handles[label] for label in ordered], ordered, loc="outside upper center", ncols=3, fontsize=6.5
        )
        cases = max(int(kernels.number(row, "n")) for row in rows)
        kernels.caption(
            figure,
            context.line(f"{style.plural(cases, 'case')} a point", "Shrink and expand together, tight pools"),
            "Geometric mean over models and projections, of each the fastest engine (tuned ones included) over the arm;"
            " band: least and greatest case of automatic dispatch.",
            kernels.KERNELS,
        )
        return figure


def _lines(axes: Axes, rows: Table) -> None:
    tokens = sorted({int(kernels.number(row, "tokens")) for row in rows})
    for arm in DRAWN:
        own = {int(kernels.number(row, "tokens")): row for row in rows if row["arm"] == arm}
        if not own:
            continue
        look = kernels.look_of(arm)
        places = [tokens.index(count) for count in own]
        if arm == "auto":
            axes.fill_between(
                places,
                [kernels.number(row, "low") for row in own.values()],
                [kernels.number(row, "high") for row in own.values()],
                color=look.colour, alpha=0.14, linewidth=0,
            )  # fmt: skip
        axes.plot(
            places, [kernels.number(row, "value") for row in own.values()], color=look.colour, marker=look.marker,
            linestyle=look.line, linewidth=1.2, markersize=3.6, markeredgecolor=style.INK, markeredgewidth=0.4,
            label=look.label, zorder=4 if arm == "auto" else 3,
        )  # fmt: skip
    axes.set_xticks(range(len(tokens)), [f"{count:,}" for count in tokens])
    axes.set_xlim(-0.3, len(tokens) - 0.7)
