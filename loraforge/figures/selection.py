"""How the quality study chose: validation scores of every candidate, and who went on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.quality import BASE, ORIGINAL
from loraforge.evidence.targets.study import Record, standings
from loraforge.figures import study, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def table(records: Sequence[Record]) -> Table:
    """Rows of four panels, in points of the native metrics on the validation splits.

    - ``delta``: mean over adapters less that of the originals, with the 95 % paired bootstrap interval over adapters
      and examples
    - ``worst``: the largest loss of one adapter (0 where none loses), and whose
    - ``sample`` and ``finalist``: adapters and examples, and what was chosen
    """
    rows = study.sample_rows(records)
    for arm, found in standings(records).items():
        if arm in (BASE, ORIGINAL):
            continue
        about = {"arm": arm[0], "budget": arm[1]}
        low, high = found.intervals.both
        rows.append(study.row("delta", found.delta, low=low, high=high, **about))
        rows.append(study.row("worst", found.worst, adapter=found.worst_adapter, **about))
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """(a) differences and (b) worst losses at the decided budget, candidates by rank."""
    _, budget = study.chosen(rows)
    ranked = sorted(
        (item for item in rows if item["panel"] == "delta" and item["budget"] == budget),
        key=lambda item: (study.number(item), str(item["arm"])),
    )
    arms = [str(item["arm"]) for item in ranked]
    with style.styled():
        figure = style.new_figure(1.3 + 0.17 * max(4, len(arms)))
        cells = figure.add_gridspec(1, 2, width_ratios=(1.5, 1.0))
        _deltas(figure.add_subplot(cells[0, 0]), rows, arms, budget)
        _worst(figure.add_subplot(cells[0, 1]), rows, arms, budget)
        style.caption(
            figure, context.line(study.sample(rows)) + "\nValidation splits: nothing here is a result."
        )
        return figure


def _deltas(axes: Axes, rows: Table, arms: list[str], budget: str) -> None:
    finalists = {str(item["arm"]) for item in rows if item["panel"] == "finalist"}
    found = study.looks(arms)
    for place, arm in enumerate(arms):
        item = study.one(rows, "delta", arm, budget)
        if item is not None:
            ends = [study.number(item, "low"), study.number(item, "high")]
            axes.plot(ends, [place, place], color=style.MUTED, linewidth=1.0, zorder=2)
            look = found[arm]
            axes.plot([study.number(item)], [place], linestyle="none", zorder=3, **study.marks(look))
    names = [f"{found[arm].label} (goes on)" if arm in finalists else found[arm].label for arm in arms]
    axes.axvline(0.0, color=style.INK, linewidth=0.8)
    axes.set_yticks(range(len(arms)), names, fontsize=6.2)
    axes.set_ylim(-0.7, len(arms) - 0.3)
    axes.set_xlabel("Points against the originals")
    axes.set_title(f"(a) Mean over adapters at {budget}")
    style.grid(axes, "x")


def _worst(axes: Axes, rows: Table, arms: list[str], budget: str) -> None:
    for place, arm in enumerate(arms):
        item = study.one(rows, "worst", arm, budget)
        if item is not None:
            axes.barh(place, study.number(item), color=style.MUTED, height=0.6)
    axes.set_yticks(range(len(arms)), [""] * len(arms))
    axes.set_ylim(-0.7, len(arms) - 0.3)
    axes.set_xlim(left=0)
    axes.set_xlabel("Points lost")
    axes.set_title("(b) The worst adapter")
    style.grid(axes, "x")
