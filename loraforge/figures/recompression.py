"""Seconds to build a whole fleet's ordered factors, by method, with stages and errors (paper, figure 5)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table, Value
from loraforge.evidence.targets.recompression import Item, checks, passes
from loraforge.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "florist": "FLoRIST (FP64)",
    "spectral_transform": "SpecTraL",
    "fraq": "FraQ",
    "tsqr": "TSQR",
    "gram": "FP64 Gram",
}
OTHER = "other"
# Stages in the order of the work; each has the same colour and hatch whatever methods are drawn.
STAGES = ("load", "svd_factors", "qr", "gram", "svd_core", "svd", "evd", "apply", "verify", "core")


def table(records: Sequence[Item]) -> Table:
    """Rows of three panels, in ``value``: ``seconds`` (median of passes, with least and most), ``stage`` (seconds
    of a stage in the median pass, with what no stage accounts for as ``other``) and ``error`` (action, spectrum).
    """
    checked = checks(records)
    rows: Table = []

    def add(panel: str, method: str, value: float, **cells: Value) -> None:
        names = ("name", "low", "high", "n")
        rows.append(
            {"panel": panel, "method": method, **{name: cells.get(name) for name in names}, "value": value}
        )

    for method, items in passes(records).items():
        seconds = [item.seconds for item in items]
        add(
            "seconds", method, statistics.median(seconds), low=min(seconds), high=max(seconds), n=len(seconds)
        )
        middle = sorted(items, key=lambda item: item.seconds)[(len(items) - 1) // 2]
        for name, value in middle.stages.items():
            add("stage", method, value, name=name)
        add("stage", method, max(0.0, middle.seconds - sum(middle.stages.values())), name=OTHER)
        add("error", method, checked[method].max_action_error, name="action", n=checked[method].n)
        add("error", method, checked[method].max_spectrum_error, name="spectrum", n=checked[method].n)
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """(a) seconds on a log scale, (b) share of stages, (c) errors; methods slowest first."""
    seconds = {str(row["method"]): row for row in rows if row["panel"] == "seconds"}
    order = sorted(seconds, key=lambda method: -float(seconds[method]["value"] or 0.0))
    with style.styled():
        figure = style.new_figure(1.75 + 0.24 * len(order))
        axes = figure.subplots(1, 3, sharey=True, width_ratios=(1.35, 1.25, 0.9))
        _seconds(axes[0], seconds, order)
        _stages(axes[1], rows, order)
        _errors(axes[2], rows, order)
        matrices = max(int(row["n"] or 0) for row in rows if row["panel"] == "error")
        repeats = sorted({int(row["n"] or 0) for row in seconds.values()})
        passes_line = "–".join(
            str(number) for number in ([repeats[0], repeats[-1]] if len(repeats) > 1 else repeats)
        )
        style.caption(
            figure,
            context.line(
                f"{style.plural(matrices, 'matrix')}, median of {passes_line} passes, bars from least to most"
            ),
        )
        return figure


def _label(method: str) -> str:
    fleet, dot, method = method.rpartition(".")
    if dot:
        return f"{_label(method)}, {fleet}"
    if method in LABELS:
        return LABELS[method]
    head, _, tail = method.rpartition("_")
    return f"{LABELS[head]}, {tail}" if head in LABELS else method.replace("_", " ")


def _seconds(axes: Axes, seconds: dict[str, dict[str, Value]], order: list[str]) -> None:
    values = [float(seconds[method]["value"] or 0.0) for method in order]
    low = [float(seconds[method]["low"] or 0.0) for method in order]
    high = [float(seconds[method]["high"] or 0.0) for method in order]
    places = range(len(order))
    fastest = min(values)
    axes.errorbar(
        values,
        places,
        xerr=[
            [v - at for v, at in zip(values, low, strict=True)],
            [at - v for v, at in zip(values, high, strict=True)],
        ],
        fmt="none",
        ecolor=style.INK,
        elinewidth=0.8,
        capsize=2.2,
        capthick=0.8,
        zorder=2,
    )
    for place, value in zip(places, values, strict=True):
        axes.plot(
            value,
            place,
            marker="D" if value == fastest else "o",
            markersize=5,
            markeredgecolor=style.INK,
            markeredgewidth=0.5,
            color="#0b4a8f" if value == fastest else "#b9c3cd",
            zorder=3,
        )
    axes.set_xscale("log")
    axes.set_xlim(min(low) / 2.2, max(high) * 14)
    for place, value, most in zip(places, values, high, strict=True):
        times = "" if value == fastest else f"  ({value / fastest:.1f}×)"
        axes.annotate(
            f"{value:.3g} s{times}",
            (most, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
        )
    axes.set_yticks(places, [_label(method) for method in order])
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlabel("Seconds for the fleet (log scale)")
    axes.set_title("(a) Time", loc="left")
    style.grid(axes, "x")


def _stages(axes: Axes, rows: Table, order: list[str]) -> None:
    parts = [row for row in rows if row["panel"] == "stage"]
    whole = {
        method: sum(float(row["value"] or 0.0) for row in parts if row["method"] == method)
        for method in order
    }
    there = {str(row["name"]) for row in parts} - {OTHER}
    names = [name for name in STAGES if name in there] + sorted(there - set(STAGES)) + [OTHER]
    left = dict.fromkeys(order, 0.0)
    for name in names:
        share = {
            str(row["method"]): 100.0 * float(row["value"] or 0.0) / whole[str(row["method"])]
            for row in parts
            if row["name"] == name
        }
        colour, hatch = _stage_look(name)
        axes.barh(
            range(len(order)),
            [share.get(method, 0.0) for method in order],
            left=[left[method] for method in order],
            height=0.62,
            color=colour,
            hatch=hatch,
            edgecolor=style.INK,
            linewidth=0.4,
            label=name.replace("_", " "),
        )
        for method in order:
            left[method] += share.get(method, 0.0)
    axes.set_xlim(0, 100)
    axes.set_xlabel("Share of the pass (%)")
    axes.set_title("(b) Stages", loc="left")
    axes.tick_params(axis="y", left=False)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.23),
        ncols=3,
        handlelength=1.2,
        handleheight=0.9,
        columnspacing=1.0,
        handletextpad=0.4,
        fontsize=6.2,
    )


def _stage_look(name: str) -> tuple[str, str]:
    if name == OTHER:
        return "#ffffff", ""
    return style.series(STAGES.index(name) if name in STAGES else len(STAGES))


def _errors(axes: Axes, rows: Table, order: list[str]) -> None:
    looks = {"action": ("o", "#0b4a8f"), "spectrum": ("s", "#f0a830")}
    floor = 1e-17  # an exact zero has no logarithm; it is drawn at the left edge
    lowest = 1.0
    for name, (marker, colour) in looks.items():
        found = {
            str(row["method"]): max(float(row["value"] or 0.0), floor)
            for row in rows
            if row["panel"] == "error" and row["name"] == name
        }
        lowest = min(lowest, *found.values())
        axes.plot(
            [found[method] for method in order],
            range(len(order)),
            linestyle="none",
            marker=marker,
            color=colour,
            markeredgecolor=style.INK,
            markeredgewidth=0.4,
            label=name,
        )
    axes.set_xscale("log")
    axes.set_xlim(lowest / 5, 1e-3)
    axes.axvline(3e-5, color="#0b4a8f", linewidth=0.8, linestyle=(0, (4.0, 1.5)))
    axes.axvline(1e-4, color="#c07a10", linewidth=0.8, linestyle=(0, (1.0, 1.0)))
    axes.set_xlabel("Largest relative error")
    axes.set_title("(c) Error", loc="left")
    axes.tick_params(axis="y", left=False)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.23),
        ncols=2,
        handlelength=1.0,
        handletextpad=0.3,
        columnspacing=1.0,
        fontsize=6.2,
        title="lines: the limit of each",
        title_fontsize=6.2,
    )
    style.grid(axes, "x")
