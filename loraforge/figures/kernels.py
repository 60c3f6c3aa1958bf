"""What the figures of serving kernels share: looks of arms, quotients over cases, and axes of quotients.

A quotient is the time of the best kernel of the engines over that of an arm, so that more than 1 is faster.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loraforge.evidence.tables import Row, Table
from loraforge.evidence.targets.kernels import NATIVE, Cell, Item, cells, geomean, speedups, sweep
from loraforge.figures import style
from loraforge.figures.style import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

ARMS = {
    "custom": Look("Decode kernels, forced", "#f0a830", "s", (0, (4.0, 1.5)), "////"),
    "segmented": Look("Prefill kernels, forced", "#35a39a", "^", (0, (5.0, 1.2, 1.0, 1.2)), "...."),
    "fused": Look("Both products in one call, forced", "#c45a6c", "D", (0, (1.0, 1.0)), "xxxx"),
    "auto": Look("Automatic dispatch", "#0b4a8f", "o", "-", ""),
    "csgmv": Look("SGLang CSGMV as shipped", "#c9c9c9", "v", (0, (1.0, 1.5)), ""),
    "native": Look("Best of the engines", "#6e6e6e", "P", "-", ""),
}
OURS = ("custom", "segmented", "auto")
# what a bar and its two marks are: name -> (arms it is held against, cache)
MEASURES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "warm": (NATIVE, "warm"),
    "flushed": (NATIVE, "flushed"),
    "over_csgmv": (("csgmv",), "warm"),
}
PHASES = ("decode", "prefill")
KERNELS = (
    "Decode kernels: CUDA, a token or a short segment a block, RowExpand. Prefill kernels: Triton, rank-aware, tall"
    " segments."
)


def look_of(arm: str) -> Look:
    """The look of an arm; one that is not known yet is named as it is."""
    return ARMS.get(arm) or Look(arm, "#4d4d4d", "X", ":", "++++")


def spread(values: Sequence[float]) -> Row:
    """The geometric mean of quotients with the least, the greatest and their number."""
    low, high = min(values), max(values)
    middle = min(max(geomean(values), low), high)  # rounding must not take it out of its own range
    return {"value": middle, "low": low, "high": high, "n": len(values)}


def grid_rows(records: Sequence[Item], op: str, prefix: str = "") -> Table:
    """Quotients of one product over the paper's grid, by model and arm.

    A panel is a phase, with ``128`` after it for pools that have room for 128 directions. ``name`` is one of MEASURES.
    """
    rows: Table = []
    for phase in PHASES:
        for tight in (True, False):
            found = sweep(records, op, phase, tight=tight)
            for model in dict.fromkeys(cell.model for cell in found):
                own = [cell for cell in found if cell.model == model]
                for arm in OURS:
                    for name, (over, cache) in MEASURES.items():
                        if values := speedups(own, arm, over, cache):
                            panel = f"{prefix}{phase}{'' if tight else '128'}"
                            where: Row = {"panel": panel, "model": model, "arm": arm, "name": name}
                            rows.append(where | spread(values))
    return rows


def number(row: Row, name: str) -> float:
    """A cell that is known to be a number."""
    value = row[name]
    assert isinstance(value, int | float)
    return float(value)


def bars(axes: Axes, rows: Table) -> None:
    """A bar from 1 a model and arm: up where the arm is faster. Whiskers from the least to the greatest case, a diamond
    with a flushed cache, a dash over CSGMV as shipped alone. What the bars show stands above them."""
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    arms = [arm for arm in OURS if any(row["arm"] == arm for row in rows)]
    width = 0.8 / max(1, len(arms))
    for place, model in enumerate(models):
        for index, arm in enumerate(arms):
            own = {str(row["name"]): row for row in rows if (row["model"], row["arm"]) == (model, arm)}
            if "warm" not in own:
                continue
            x = place + (index - (len(arms) - 1) / 2) * width
            look, value = look_of(arm), number(own["warm"], "value")
            low, high = number(own["warm"], "low"), number(own["warm"], "high")
            axes.bar(
                x, value - 1, width * 0.86, bottom=1, color=look.colour, hatch=look.hatch,
                edgecolor=style.INK, linewidth=0.5, zorder=2,
            )  # fmt: skip
            axes.errorbar(
                x, value, yerr=[[value - low], [high - value]], fmt="none", ecolor=style.INK, elinewidth=0.7,
                capsize=1.8, capthick=0.7, zorder=3,
            )  # fmt: skip
            marks = (("flushed", "D", 3.2), ("over_csgmv", "_", 8.0))
            for name, marker, size in marks:
                if name in own:
                    axes.plot(
                        x, number(own[name], "value"), marker=marker, markersize=size, color="white",
                        markeredgecolor=style.INK, markeredgewidth=0.8 if marker == "D" else 1.6, zorder=4,
                    )  # fmt: skip
            axes.annotate(
                times(value).rstrip("×"),
                (x, 0.99),
                xycoords=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=6,
            )
    axes.set_xticks(range(len(models)), models)
    axes.set_xlim(-0.55, len(models) - 0.45)
    axes.tick_params(axis="x", length=0)


def bar_handles(arms: Iterable[str]) -> list[Any]:
    """Entries of a legend for :func:`bars`."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    patches: list[Any] = [
        Patch(facecolor=look.colour, hatch=look.hatch, edgecolor=style.INK, linewidth=0.5, label=look.label)
        for look in map(look_of, arms)
    ]
    marks = (("D", 3.2, 0.8, "with a flushed cache"), ("_", 8.0, 1.6, "over SGLang CSGMV as shipped alone"))
    return patches + [
        Line2D(
            [], [], linestyle="none", marker=marker, markersize=size, markerfacecolor="white",
            markeredgecolor=style.INK, markeredgewidth=edge, label=label,
        )
        for marker, size, edge, label in marks
    ]  # fmt: skip


def times(value: float) -> str:
    """``0.97×``, ``2.35×``, ``12.1×``."""
    return f"{value:.{2 if value < 9.995 else 1}f}×"


def ratio_axis(axes: Axes, which: str, low: float, high: float, top: float = 0.06) -> None:
    """A log axis of quotients from ``low`` to ``high`` that has 1, with plain ticks and a line at 1.

    ``top`` is the share of it that stays free above ``high``.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    low, high = min(low, 0.95), max(high, 1.05)
    span = math.log(high / low) / (0.94 - top)
    start, end = math.exp(math.log(low) - 0.06 * span), math.exp(math.log(high) + top * span)
    axis: Axis = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}lim")(start, end)
    axis.set_major_locator(FixedLocator(_ticks(start, end)))
    axis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}×"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    line = axes.axhline if which == "y" else axes.axvline
    line(1.0, color=style.INK, linewidth=0.9, zorder=1.5)
    style.grid(axes, which)


def _ticks(start: float, end: float) -> list[float]:
    span = end / start
    steps = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8]
    if span > 40:
        steps = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
    elif span > 5:
        steps = [2.0**power for power in range(-8, 9)]
    elif span > 2:
        steps = [0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0]
    return [step for step in steps if start <= step <= end]


def extent(rows: Table, names: Iterable[str] = ("value", "low", "high")) -> tuple[float, float]:
    """The least and the greatest of some columns."""
    found = [number(row, name) for row in rows for name in names]
    return min(found), max(found)


def sweep_rows(records: Sequence[Item]) -> Table:
    """Quotients of both products together, by phase, cache, rank, tokens and arm, over models and projections.

    The engines' best is an arm of its own where it is not 1 by definition: CSGMV as shipped.
    """
    found = [cell for cell in cells(records) if cell.group == "sweep" and cell.op == "lora"]
    grouped: dict[tuple[str, int, int], list[Cell]] = {}
    for cell in found:
        if cell.capacity == cell.rank:
            grouped.setdefault((cell.phase, cell.rank, cell.tokens), []).append(cell)
    rows: Table = []
    for (phase, rank, tokens), own in sorted(grouped.items()):
        for cache in ("warm", "flushed"):
            for arm in ("csgmv", "custom", "segmented", "fused", "auto"):
                if values := speedups(own, arm, NATIVE, cache):
                    where: Row = {"phase": phase, "cache": cache, "rank": rank, "tokens": tokens, "arm": arm}
                    rows.append(where | spread(values))
    return rows


def caption(figure: Figure, *lines: str) -> None:
    """Small print, broken where the page ends."""
    style.caption(figure, "\n".join(part for line in lines for part in textwrap.wrap(line, 148)))


def nothing(context: style.Context, what: str) -> Figure:
    """A figure of a run that did not get to what it would show."""
    figure = style.new_figure(1.0)
    axes = figure.add_subplot()
    axes.axis("off")
    axes.text(0.5, 0.5, f"{what}: not measured in this run", ha="center", va="center", color=style.MUTED)
    caption(figure, context.line("no case", what))
    return figure
