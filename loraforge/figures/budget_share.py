"""Where the budget of the quality study goes: each adapter's share of what an arm keeps, against what it loses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.quality import BASE, ORIGINAL, by_arm
from loraforge.evidence.targets.study import Record, scores_of
from loraforge.figures import study, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def table(records: Sequence[Record]) -> Table:
    """Rows of four panels; arms whose bases are shared have no adapter's own parameters, and are left out.

    - ``share``: part of an arm's compact parameters that an adapter keeps, 0 to 1
    - ``largest``: the largest of these, and whose; ``kept``: the arm's parameters over those of the original adapters
    - ``sample`` and ``finalist``: adapters and examples, and what was chosen beforehand
    """
    rows = study.sample_rows(records)
    arms = by_arm(scores_of(records))
    whole = sum(item.parameters or 0 for item in arms[ORIGINAL].values())
    for arm, scores in arms.items():
        kept = {adapter: item.parameters for adapter, item in sorted(scores.items())}
        total = sum(value or 0 for value in kept.values())
        if arm == BASE or None in kept.values() or not total or not whole:
            continue
        about = {"arm": arm[0], "budget": arm[1]}
        shares = {adapter: (value or 0) / total for adapter, value in kept.items()}
        for adapter, share in shares.items():
            rows.append(study.row("share", share, adapter=adapter, **about))
        largest = max(shares, key=lambda adapter: shares[adapter])
        rows.append(study.row("largest", shares[largest], adapter=largest, **about))
        rows.append(study.row("kept", total / whole, **about))
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """(a) shares by adapter at the decided budget; (b) the largest share by arm."""
    _, budget = study.chosen(rows)
    at = [item for item in rows if item["budget"] == budget]
    arms = study.policies(at, "share")
    adapters = sorted({str(item["adapter"]) for item in at if item["panel"] == "share"})
    with style.styled():
        below = study.key_height(arms)
        height = max(3.4, 1.4 + 0.15 * len(adapters)) + below
        figure = style.new_figure(height)
        cells = figure.add_gridspec(2, 2, width_ratios=(1.4, 1.0), height_ratios=(height - below, below))
        _shares(figure.add_subplot(cells[0, 0]), at, arms, adapters, budget)
        _largest(figure.add_subplot(cells[0, 1]), at, arms)
        study.key(figure.add_subplot(cells[1, :]), arms, lines=False)
        style.caption(figure, context.line(study.sample(rows)))
        return figure


def _shares(axes: Axes, rows: Table, arms: list[str], adapters: list[str], budget: str) -> None:
    shares = {
        (str(item["arm"]), str(item["adapter"])): 100 * study.number(item)
        for item in rows
        if item["panel"] == "share"
    }
    lead = "uniform" if "uniform" in arms else (arms or [""])[0]
    order = sorted(adapters, key=lambda adapter: (shares.get((lead, adapter), 0.0), adapter))
    for place, adapter in enumerate(order):
        values = [shares[arm, adapter] for arm in arms]
        axes.plot([min(values), max(values)], [place, place], color=style.RULE, linewidth=1.4, zorder=1)
    for arm, look in study.looks(arms).items():
        axes.plot(
            [shares[arm, adapter] for adapter in order],
            range(len(order)),
            linestyle="none",
            zorder=3,
            **study.marks(look),
        )
    axes.set_yticks(range(len(order)), order, fontsize=6.2)
    axes.set_ylim(-0.7, len(order) - 0.3)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"Share of the {budget} budget (%)")
    axes.set_title("(a) By adapter")
    style.grid(axes, "x")


def _largest(axes: Axes, rows: Table, arms: list[str]) -> None:
    shown = list(reversed(arms))
    for place, (arm, look) in enumerate(study.looks(shown).items()):
        item = next(row for row in rows if row["panel"] == "largest" and row["arm"] == arm)
        share = 100 * study.number(item)
        axes.barh(place, share, color=look.colour, edgecolor=style.INK, linewidth=0.4, height=0.62)
    names = [look.label for look in study.looks(shown).values()]
    axes.set_yticks(range(len(shown)), names, fontsize=6.2)
    axes.set_ylim(-0.7, max(len(shown), 1) - 0.3)
    axes.set_xlabel("Share (%)")
    axes.set_title("(b) The largest share")
    style.grid(axes, "x")
