"""The quality study as tables: scores (the paper's Table 1), one budget in detail (2), regressions (8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.quality import BASE, ORIGINAL, by_arm
from loraforge.evidence.targets.study import Record, scores_of, selection_of, standings
from loraforge.figures import study, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINE = 0.155  # inches


def table(records: Sequence[Record]) -> Table:
    """Rows of the three tables, in points of the native metrics, and of ``sample`` and ``finalist``.

    - ``table1``: mean over ``n`` adapters of an arm at a budget
    - ``table2``: an arm at the decided budget: its difference to the original adapters with the 95 % paired
      bootstrap interval over adapters and examples; ``kept``: its compact parameters over those of the originals
    - ``table8``: the most negative change of one adapter (0 where none loses), whose, and in ``n`` how many lose
      more than 5 points
    """
    rows = study.sample_rows(records)
    arms = by_arm(scores_of(records))
    at = selection_of(records).decide_at
    whole = sum(item.parameters or 0 for item in arms[ORIGINAL].values())
    for arm, found in standings(records).items():
        about = {"arm": arm[0], "budget": arm[1]}
        rows.append(study.row("table1", found.macro, n=len(arms[arm]), **about))
        if arm in (BASE, ORIGINAL):
            continue
        if arm[1] == at:
            low, high = found.intervals.both
            rows.append(study.row("table2", found.delta, low=low, high=high, **about))
            kept = [item.parameters for item in arms[arm].values()]
            if whole and None not in kept:
                rows.append(study.row("kept", sum(value or 0 for value in kept) / whole, **about))
        rows.append(study.row("table8", -found.worst, adapter=found.worst_adapter, n=found.n_over_5, **about))
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """The three tables below one another."""
    arms, budgets = study.policies(rows, "table8"), study.budgets(rows, "table8")
    labels = {arm: look.label for arm, look in study.looks(arms).items()}
    _, at = study.chosen(rows)
    one = [["", *budgets]]
    one += [
        [style.ARMS[arm].label, *[_score(rows, arm, budget)] * len(budgets)]
        for arm, budget in (BASE, ORIGINAL)
    ]
    one += [[labels[arm], *(_score(rows, arm, budget) for budget in budgets)] for arm in arms]
    two = [["", "change", "95 % interval", "parameters kept"]]
    two += [[labels[arm], *_detail(rows, arm, at)] for arm in arms if study.one(rows, "table2", arm, at)]
    eight = [["", *budgets]]
    eight += [[labels[arm], *(_regression(rows, arm, budget) for budget in budgets)] for arm in arms]
    parts = {
        "Table 1. Mean native score": one,
        f"Table 2. At {at}, against the original adapters": two,
        "Table 8. Worst change of one adapter / adapters that lose more than 5 points": eight,
    }
    with style.styled():
        heights = [_LINE * (len(lines) + 2) for lines in parts.values()]
        figure = style.new_figure(sum(heights) + 0.5)
        cells = figure.add_gridspec(len(parts), 1, height_ratios=heights)
        for place, (title, lines) in enumerate(parts.items()):
            _write(figure.add_subplot(cells[place, 0]), title, lines)
        style.caption(figure, context.line(study.sample(rows)))
        return figure


def _score(rows: Table, arm: str, budget: str) -> str:
    item = study.one(rows, "table1", arm, budget)
    return "–" if item is None else f"{study.number(item):.2f}"


def _detail(rows: Table, arm: str, budget: str) -> list[str]:
    item = study.one(rows, "table2", arm, budget) or study.row("table2", 0.0)
    kept = study.one(rows, "kept", arm, budget)
    return [
        f"{study.number(item):+.2f}",
        f"[{study.number(item, 'low'):+.2f}, {study.number(item, 'high'):+.2f}]",
        "shared bases" if kept is None else f"{100 * study.number(kept):.2f} %",
    ]


def _regression(rows: Table, arm: str, budget: str) -> str:
    item = study.one(rows, "table8", arm, budget)
    return "–" if item is None else f"{study.number(item):.2f} / {study.number(item, 'n'):.0f}"


def _write(axes: Axes, title: str, lines: list[list[str]]) -> None:
    """A table as text, its first column to the left and the others in equal columns."""
    columns = len(lines[0]) - 1
    axes.axis("off")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlim(0, 1)
    axes.set_ylim(len(lines), -0.2)
    axes.set_title(title)
    for place, cells in enumerate(lines):
        axes.text(0.0, place + 0.5, cells[0], va="center", ha="left", fontsize=6.8)
        for column, cell in enumerate(cells[1:]):
            right = 0.28 + 0.72 * (column + 1) / columns
            weight = "bold" if place == 0 else "normal"
            cell = cell.replace("-", "\N{MINUS SIGN}")
            axes.text(right, place + 0.5, cell, va="center", ha="right", fontsize=6.8, fontweight=weight)
    axes.axhline(1.0, color=style.MUTED, linewidth=0.6)
