"""Figure 1: how few of a module's nominal directions hold 90 % of its squared energy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.spectra import Spectrum, Timing, rank_for_energy, spectra
from loraforge.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SHARE = "Share of the nominal rank that\nholds 90 % of the energy (%)"


def table(records: Sequence[Spectrum | Timing]) -> Table:
    """One row a module: its nominal rank, k(90 %) and their ratio."""
    rows: Table = []
    for item in spectra(records):
        kept = rank_for_energy(item.sigma)
        rows.append(
            {
                "adapter": item.adapter,
                "module": item.module,
                "kind": item.kind,
                "layer": item.layer,
                "rank": item.rank,
                "rank90": kept,
                "fraction": kept / item.rank,
            }
        )
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """Left: distribution by module kind. Right: cumulative distribution over modules."""
    with style.styled():
        figure = style.new_figure(3.0)
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1.0))
        _by_kind(left, rows)
        _cumulative(right, rows)
        end = min(100.0, 5.0 * math.ceil(1.06 * max(_percent(rows)) / 5.0))
        left.set_xlim(0, end)
        right.set_xlim(0, end)
        adapters = len({row["adapter"] for row in rows})
        style.caption(
            figure,
            context.line(f"{style.plural(adapters, 'adapter')}, {style.plural(len(rows), 'LoRA module')}")
            + "\nEnergy: squared singular values of the update. Box: quartiles; whiskers: 5th and 95th percentiles."
            + f"\n{_pooled(rows)}",
        )
        return figure


def _pooled(rows: Table) -> str:
    """What makes the steps: a share is a whole number of directions out of a module's rank."""
    ranks = sorted({int(row["rank"] or 0) for row in rows})
    if len(ranks) == 1:
        return f"All modules have rank {ranks[0]}, so that shares come in steps of 1/{ranks[0]}."
    return (
        f"Modules of ranks {ranks[0]}–{ranks[-1]} are pooled; the share of each comes in steps of 1/rank,"
        " hence the jumps and equal medians."
    )


def _percent(rows: Table) -> list[float]:
    return [100.0 * float(row["fraction"] or 0.0) for row in rows]


def _by_kind(axes: Axes, rows: Table) -> None:
    kinds = style.kind_order({str(row["kind"]) for row in rows})
    values = [_percent([row for row in rows if row["kind"] == kind]) for kind in kinds]
    places = range(len(kinds))
    axes.boxplot(
        values,
        positions=places,
        orientation="horizontal",
        widths=0.62,
        whis=(5, 95),
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": "#c9daec", "edgecolor": style.INK, "linewidth": 0.6},
        medianprops={"color": "#0b4a8f", "linewidth": 1.8},
        whiskerprops={"color": style.INK, "linewidth": 0.6},
        capprops={"color": style.INK, "linewidth": 0.6},
    )
    for place, numbers in zip(places, values, strict=True):
        axes.annotate(
            f"{statistics.median(numbers):.1f} %",
            (1.0, place),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
            color="#0b4a8f",
        )
    axes.annotate(
        "median",
        (1.0, 1.0),
        xycoords="axes fraction",
        xytext=(3, 2),
        textcoords="offset points",
        fontsize=6.5,
        color="#0b4a8f",
    )
    axes.set_yticks(
        places,
        [f"{style.kind_label(kind)} ({len(numbers):,})" for kind, numbers in zip(kinds, values, strict=True)],
    )
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.set_xlabel(SHARE)
    axes.set_ylabel("Module kind (modules)")
    axes.set_title("(a) By module kind")
    style.grid(axes, "x")


def _cumulative(axes: Axes, rows: Table) -> None:
    groups = {
        "All": rows,
        "Attention": [row for row in rows if row["kind"] in ATTENTION],
        "MLP": [row for row in rows if row["kind"] not in ATTENTION],
    }
    looks = ((style.INK, "-", 1.8), ("#0b4a8f", (0, (4.0, 1.5)), 1.2), ("#e08a1e", (0, (1.0, 1.0)), 1.5))
    for (label, group), (colour, line, width) in zip(groups.items(), looks, strict=True):
        if not group or (len(group) == len(rows) and group is not rows):
            continue
        values = np.sort(_percent(group))
        shares = np.arange(1, len(values) + 1) / len(values)
        axes.step(
            np.concatenate([[0.0], values, [100.0]]),
            np.concatenate([[0.0], shares, [1.0]]) * 100,
            where="post",
            color=colour,
            linestyle=line,
            linewidth=width,
            label=f"{label} (n = {len(values):,})",
        )
    median = statistics.median(_percent(rows))
    axes.plot([median, median], [0, 50], color=style.MUTED, linewidth=0.8)
    axes.plot([0, median], [50, 50], color=style.MUTED, linewidth=0.8)
    axes.annotate(
        f"median {median:.1f} %",
        (median, 50),
        xytext=(4, -3),
        textcoords="offset points",
        va="top",
        fontsize=7,
    )
    axes.set_ylim(0, 102)  # the line at 100 % is seen whole
    axes.set_xlabel(SHARE)
    axes.set_ylabel("Modules at or below (%)")
    axes.set_title("(b) Over all modules")
    axes.legend(loc="lower right")
    style.grid(axes, "both")
