"""What is kept at which budget: the retention curves of the quality study, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table, Value
from loraforge.evidence.targets.quality import BASE, ORIGINAL
from loraforge.evidence.targets.study import Record, standings
from loraforge.figures import study, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def table(records: Sequence[Record]) -> Table:
    """Rows of three panels, in points of the native metrics (0 to 100).

    - ``macro``: mean over ``n`` adapters
    - ``delta``: its difference to the original adapters, with the 95 % paired bootstrap interval over adapters and
      examples; ``examples``: the same difference with the interval over the examples of these adapters alone
    - ``sample`` and ``finalist``: adapters and examples, and what was chosen beforehand
    """
    rows = study.sample_rows(records)
    for arm, found in standings(records).items():
        about: dict[str, Value] = {"arm": arm[0], "budget": arm[1], "n": int(study.number(rows[0]))}
        rows.append(study.row("macro", found.macro, **about))
        if arm == ORIGINAL:
            continue
        for panel, (low, high) in (
            ("delta", found.intervals.both),
            ("examples", found.intervals.examples),
        ):
            rows.append(study.row(panel, found.delta, low=low, high=high, **about))
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """(a) every arm's difference to the original by budget; (b) the tightest decided budget, with intervals."""
    arms, budgets = study.policies(rows, "delta"), study.budgets(rows, "delta")
    with style.styled():
        below = study.key_height(arms)
        height = 3.1 + 0.06 * len(arms) + below
        figure = style.new_figure(height)
        cells = figure.add_gridspec(2, 2, width_ratios=(1.0, 1.1), height_ratios=(height - below, below))
        _curves(figure.add_subplot(cells[0, 0]), rows, arms, budgets)
        _intervals(figure.add_subplot(cells[0, 1]), rows, arms)
        study.key(figure.add_subplot(cells[1, :]), arms, lines=True)
        original, base = (
            study.number(item)
            for arm in (ORIGINAL, BASE)
            if (item := study.one(rows, "macro", *arm)) is not None
        )
        style.caption(
            figure,
            context.line(study.sample(rows)) + f"\nOriginal adapters {original:.1f}, base model {base:.1f}."
            " (b) 95 % paired bootstrap: thick over examples, thin over adapters too.",
        )
        return figure


def _curves(axes: Axes, rows: Table, arms: list[str], budgets: list[str]) -> None:
    study.curves(axes, rows, "delta", arms, budgets)
    axes.axhline(0.0, color=style.INK, linewidth=0.8)
    axes.set_xlabel("Budget (share of the nominal ranks)")
    axes.set_ylabel("Points against the originals")
    axes.set_title("(a) Mean over adapters")
    style.grid(axes, "y")


def _intervals(axes: Axes, rows: Table, arms: list[str]) -> None:
    _, budget = study.chosen(rows)
    shown = [arm for arm in reversed(arms) if study.one(rows, "delta", arm, budget)]
    finalists = {str(item["arm"]) for item in rows if item["panel"] == "finalist"}
    for place, (arm, look) in enumerate(study.looks(shown).items()):
        for panel, width, colour in (("delta", 1.0, look.colour), ("examples", 3.0, look.colour)):
            item = study.one(rows, panel, arm, budget)
            if item is not None:
                ends = [study.number(item, "low"), study.number(item, "high")]
                axes.plot(ends, [place, place], color=colour, linewidth=width, alpha=0.55, zorder=2)
        item = study.one(rows, "delta", arm, budget)
        if item is not None:
            axes.plot([study.number(item)], [place], linestyle="none", zorder=3, **study.marks(look))
    axes.axvline(0.0, color=style.INK, linewidth=0.8)
    names = [
        f"{look.label} (chosen)" if arm in finalists else look.label
        for arm, look in study.looks(shown).items()
    ]
    axes.set_yticks(range(len(shown)), names, fontsize=6.2)
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.set_xlabel("Points against the originals")
    axes.set_title(f"(b) At {budget}, with intervals")
    style.grid(axes, "x")
