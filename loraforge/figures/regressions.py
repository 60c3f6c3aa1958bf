"""Who pays: what every adapter loses under the arms of the quality study, at the budget that was decided at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.quality import BASE, ORIGINAL, by_arm
from loraforge.evidence.targets.study import Record, scores_of, standings
from loraforge.figures import study, style
from loraforge.quality.scores import LARGE_LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def table(records: Sequence[Record]) -> Table:
    """Rows of four panels, in points of the native metrics.

    - ``loss``: of one adapter against its original, negative where it gains
    - ``worst``: the largest of an arm at a budget (0 where none loses), and whose
    - ``n_over_5``: number of adapters that lose more than 5 points
    - ``sample`` and ``finalist``: adapters and examples, and what was chosen beforehand
    """
    rows = study.sample_rows(records)
    arms = by_arm(scores_of(records))
    original = arms[ORIGINAL]
    for arm, found in standings(records).items():
        if arm in (BASE, ORIGINAL):
            continue
        about = {"arm": arm[0], "budget": arm[1]}
        for adapter, item in sorted(arms[arm].items()):
            rows.append(
                study.row("loss", original[adapter].score - item.score, adapter=adapter, n=item.n, **about)
            )
        rows.append(study.row("worst", found.worst, adapter=found.worst_adapter, **about))
        rows.append(study.row("n_over_5", found.n_over_5, n=len(arms[arm]), **about))
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """(a) losses by adapter and arm at the decided budget; (b) the worst and (c) the count over 5 by budget."""
    _, budget = study.chosen(rows)
    arms, budgets = study.policies(rows, "worst"), study.budgets(rows, "worst")
    adapters = sorted({str(item["adapter"]) for item in rows if item["panel"] == "loss"})
    with style.styled():
        below = study.key_height(arms)
        height = max(4.4, 1.6 + 0.15 * len(adapters)) + below
        figure = style.new_figure(height)
        cells = figure.add_gridspec(
            3, 2, width_ratios=(1.35, 1.0), height_ratios=((height - below) / 2, (height - below) / 2, below)
        )
        _losses(figure.add_subplot(cells[:2, 0]), rows, arms, adapters, budget)
        _lines(figure.add_subplot(cells[0, 1]), rows, "worst", arms, budgets)
        _lines(figure.add_subplot(cells[1, 1]), rows, "n_over_5", arms, budgets)
        study.key(figure.add_subplot(cells[2, :]), arms, lines=True)
        style.caption(figure, context.line(study.sample(rows)))
        return figure


def _losses(axes: Axes, rows: Table, arms: list[str], adapters: list[str], budget: str) -> None:
    losses = {
        (str(item["arm"]), str(item["adapter"])): study.number(item)
        for item in rows
        if item["panel"] == "loss" and item["budget"] == budget
    }
    shown = [arm for arm in arms if any(name == arm for name, _ in losses)]
    lead = study.chosen(rows)[0]
    lead = lead if lead in shown else (shown or [lead])[0]
    order = sorted(adapters, key=lambda adapter: (losses.get((lead, adapter), 0.0), adapter))
    for place, adapter in enumerate(order):
        values = [losses[arm, adapter] for arm in shown if (arm, adapter) in losses]
        if values:
            axes.plot([min(values), max(values)], [place, place], color=style.RULE, linewidth=1.4, zorder=1)
    for arm, look in study.looks(arms).items():
        points = [
            (losses[arm, adapter], place) for place, adapter in enumerate(order) if (arm, adapter) in losses
        ]
        axes.plot(
            [value for value, _ in points],
            [place for _, place in points],
            linestyle="none",
            zorder=3,
            **study.marks(look),
        )
    axes.axvline(0.0, color=style.INK, linewidth=0.8)
    axes.axvline(LARGE_LOSS, color=style.MUTED, linewidth=0.8, linestyle=(0, (2.0, 2.0)))
    axes.set_yticks(range(len(order)), order, fontsize=6.2)
    axes.set_ylim(-0.7, len(order) - 0.3)
    axes.set_xlabel("Points lost against the original adapter")
    axes.set_title(f"(a) By adapter at {budget}")
    style.grid(axes, "x")


def _lines(axes: Axes, rows: Table, panel: str, arms: list[str], budgets: list[str]) -> None:
    study.curves(axes, rows, panel, arms, budgets)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", integer=True)  # half an adapter is none
    words = {"worst": "Points lost", "n_over_5": "Adapters"}
    titles = {"worst": "(b) The worst adapter", "n_over_5": "(c) Losing more than 5 points"}
    axes.set_ylabel(words[panel])
    axes.set_xlabel("Budget (share of the nominal ranks)")
    axes.set_title(titles[panel])
    style.grid(axes, "y")
