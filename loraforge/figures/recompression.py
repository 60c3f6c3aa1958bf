"""Seconds to build a whole fleet's ordered factors, by method, with stages and errors (paper, figure 5).

A method that was timed on a sample of a fleet is drawn as what it is: an extrapolation, hollow and in words.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loraforge.evidence.tables import Table, Value
from loraforge.evidence.targets.recompression import Item, Pass, checks, passes, samples
from loraforge.evidence.targets.spectra import MAX_ACTION_ERROR, MAX_SPECTRUM_ERROR
from loraforge.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In brackets: the precision in which factors are reduced to a core; every core is then worked on in FP64.
LABELS = {
    "florist": "FLoRIST (FP64)",
    "florist_batched": "FLoRIST, batched (FP64)",
    "spectral_transform": "SpecTraL (FP32)",
    "spectral_transform_batched": "SpecTraL, batched (FP32)",
    "fraq": "FraQ (FP32)",
    "fraq_batched": "FraQ, large batches (FP32)",
    "tsqr": "TSQR (FP32)",
    "gram": "Gram (FP64)",
    "gram_streams": "Gram, 2 streams (FP64)",
    "gram_deferred": "Gram, deferred spectral (FP64)",
    "gram_deferred_uniform": "Gram, deferred uniform (FP64)",
}
REFERENCE = "gram"
OTHER = "other"
PALE = 0.45  # opacity of what a sample alone tells
# Stages in the order of the work; each has the same colour and hatch whatever methods are drawn.
STAGES = ("load", "svd_factors", "qr", "gram", "svd_core", "svd", "evd", "apply", "verify", "core")
ERRORS = {
    "action": ("o", "#0b4a8f", "#0b4a8f", (0, (4.0, 1.5)), MAX_ACTION_ERROR),
    "spectrum": ("s", "#f0a830", "#c07a10", (0, (1.0, 1.0)), MAX_SPECTRUM_ERROR),
}


def table(records: Sequence[Item]) -> Table:
    """Rows of five panels, in ``value``.

    - ``seconds``: median of ``n`` passes over the whole fleet, with least (``low``) and most (``high``)
    - ``sample``: the same of a method timed on a sample; ``extrapolated``: these times matrices of the fleet over the
      ``n`` sampled ones
    - ``stage``: seconds of a stage in the median pass, with what no stage accounts for as ``other``
    - ``error``: the largest of ``action`` and ``spectrum`` over ``n`` matrices
    """
    checked = checks(records)
    matrices: dict[str | None, int] = {}
    for check in checked.values():
        matrices[check.fleet] = max(matrices.get(check.fleet, 0), check.n)
    rows: Table = []

    def add(panel: str, method: str, value: float, **cells: Value) -> None:
        names = ("name", "low", "high", "n")
        rows.append(
            {"panel": panel, "method": method, **{name: cells.get(name) for name in names}, "value": value}
        )

    def add_timed(panel: str, method: str, items: Sequence[Pass], times: float, n: int) -> None:
        seconds = [item.seconds * times for item in items]
        add(panel, method, statistics.median(seconds), low=min(seconds), high=max(seconds), n=n)

    for method, items in (passes(records) | samples(records)).items():
        taken = items[0].n
        add_timed("seconds" if taken is None else "sample", method, items, 1.0, len(items))
        if taken is not None:
            add_timed("extrapolated", method, items, matrices[items[0].fleet] / taken, taken)
        middle = sorted(items, key=lambda item: item.seconds)[(len(items) - 1) // 2]
        for name, value in middle.stages.items():
            add("stage", method, value, name=name)
        add("stage", method, max(0.0, middle.seconds - sum(middle.stages.values())), name=OTHER)
        add("error", method, checked[method].max_action_error, name="action", n=checked[method].n)
        add("error", method, checked[method].max_spectrum_error, name="spectrum", n=checked[method].n)
    return rows


@dataclass(frozen=True)
class _Line:
    """One method of one fleet at height ``place``; ``sample`` matrices were timed, or all if None, in ``passes``."""

    place: float
    fleet: str
    method: str  # as the table names it
    value: float
    low: float
    high: float
    sample: int | None
    passes: int

    @property
    def name(self) -> str:
        return self.method.rpartition(".")[2]

    def ties(self, other: _Line) -> bool:
        """Whether passes of one were as fast as some of the other: no order can be told."""
        return self.low <= other.high and other.low <= self.high


def draw(rows: Table, context: style.Context) -> Figure:
    """(a) seconds on a log scale, (b) share of stages, (c) errors; fleet by fleet, methods slowest first."""
    lines, headings = _lines(rows)
    bottom = max(line.place for line in lines) + 0.6
    with style.styled():
        height = 0.2 * bottom + 0.2
        figure = style.new_figure(height + 1.65)
        cells = figure.add_gridspec(2, 3, width_ratios=(1.6, 1.1, 0.8), height_ratios=(height, 0.5))
        time = figure.add_subplot(cells[0, 0])
        axes = [time, *(figure.add_subplot(cells[0, column], sharey=time) for column in (1, 2))]
        keys = [figure.add_subplot(cells[1, column]) for column in range(3)]
        for key in keys:
            key.axis("off")
        _seconds(axes[0], keys[0], lines)
        _stages(axes[1], keys[1], rows, lines)
        _errors(axes[2], keys[2], rows, lines)
        places = [*headings.values(), *(line.place for line in lines)]
        labels = [*headings, *(_label(line.name) for line in lines)]
        time.set_yticks(places, labels)
        for text, mark in zip(time.get_yticklabels(), time.yaxis.get_major_ticks(), strict=True):
            if text.get_text() in headings:
                text.set_fontweight("bold")
                mark.tick1line.set_visible(False)
        time.set_ylim(bottom, -0.6)
        for other in axes[1:]:
            other.tick_params(axis="y", left=False, labelleft=False)
        style.caption(figure, _caption(rows, lines, context))
        return figure


def _lines(rows: Table) -> tuple[list[_Line], dict[str, float]]:
    """Methods from top to bottom, and the headings of shape fleets with their heights."""
    timed = [row for row in rows if row["panel"] in ("seconds", "extrapolated")]
    fleets = list(dict.fromkeys(str(row["method"]).rpartition(".")[0] for row in timed))
    lines: list[_Line] = []
    headings: dict[str, float] = {}
    place = 0.0
    repeats = {row["method"]: int(row["n"] or 0) for row in rows if row["panel"] in ("seconds", "sample")}
    for fleet in fleets:
        if fleet:
            headings[fleet] = place
            place += 1.0
        own = [row for row in timed if str(row["method"]).rpartition(".")[0] == fleet]
        for row in sorted(own, key=lambda row: -float(row["value"] or 0.0)):
            value, low, high = (float(row[name] or 0.0) for name in ("value", "low", "high"))
            sample = int(row["n"] or 0) if row["panel"] == "extrapolated" else None
            method = str(row["method"])
            lines.append(_Line(place, fleet, method, value, low, high, sample, repeats[method]))
            place += 1.0
        place += 0.3
    return lines, headings


def _caption(rows: Table, lines: list[_Line], context: style.Context) -> str:
    matrices: dict[str, int] = {}
    for row in rows:
        if row["panel"] == "error":
            fleet = str(row["method"]).rpartition(".")[0]
            matrices[fleet] = max(matrices.get(fleet, 0), int(row["n"] or 0))
    repeats = sorted({line.passes for line in lines})
    once, several = repeats[0] == 1, [number for number in repeats if number > 1]
    span = "–".join(str(number) for number in dict.fromkeys((several[0], several[-1]))) if several else "1"
    timing = f"median of {span} {'passes' if several else 'pass'}"
    if once and several:
        timing += " (of one where it says so)"
    if list(matrices) == [""]:
        text = context.line(f"{style.plural(matrices[''], 'matrix')}, {timing}, whiskers from least to most")
    else:
        named = [f"{fleet or context.fleet} ({style.plural(n, 'matrix')})" for fleet, n in matrices.items()]
        text = context.line(", ".join(named), "Shape fleets" if len(named) > 1 else "Shape fleet")
        text += (
            f"\nSynthetic factors with measured spectra, drawn from those of fleet {context.fleet};"
            f" {timing}, whiskers from least to most."
        )
    text += (
        "\nIn brackets: precision in which factors are reduced to a core (QR, SVD or Gram); cores are FP64."
    )
    if any(line.sample is not None for line in lines):
        text += (
            "\nHollow and pale: timed and checked on a sample alone (matrices after “from”); seconds for the fleet are"
            " extrapolated, not measured."
        )
    if any("deferred" in line.name for line in lines):
        text += "\nDeferred: writes only the ranks that the named policy allocates, not the full factors."
    return text


def _label(method: str) -> str:
    return LABELS.get(method, method.replace("_", " "))


def _seconds(axes: Axes, key: Axes, lines: list[_Line]) -> None:
    from matplotlib.lines import Line2D

    low, high = min(line.low for line in lines), max(line.high for line in lines)
    room = max(math.log10(high / low), 0.3)
    start, end = math.log10(low) - 0.1 * room, math.log10(high) + 0.1 * room
    axes.set_xscale("log")
    axes.set_xlim(10**start, 10**end)
    references = {line.fleet: line for line in lines if line.name == REFERENCE and line.sample is None}
    rare = max(line.passes for line in lines) > 1
    for line in lines:
        measured = line.sample is None
        axes.errorbar(
            line.value,
            line.place,
            xerr=[[line.value - line.low], [line.high - line.value]],
            fmt="o" if measured else "D",
            markersize=4.6,
            markerfacecolor="#0b4a8f" if measured else "white",
            markeredgecolor=style.INK,
            markeredgewidth=0.5 if measured else 0.9,
            ecolor=style.INK,
            elinewidth=0.8,
            capsize=2.2,
            capthick=0.8,
            zorder=3,
        )
        left = math.log10(line.value) > (start + end) / 2  # the text goes where there is room
        axes.annotate(
            _said(line, references.get(line.fleet), rare),
            (line.low if left else line.high, line.place),
            xytext=(-5 if left else 5, 0),
            textcoords="offset points",
            va="center_baseline",
            ha="right" if left else "left",
            fontsize=6.3,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    _plain_ticks(axes, start, end)
    axes.set_xlabel("Seconds for the fleet (log scale)")
    axes.set_title("(a) Time")
    style.grid(axes, "x")
    looks = [("o", "#0b4a8f", 0.5, "measured on the whole fleet")]
    if any(line.sample is not None for line in lines):
        looks.append(("D", "white", 0.9, "extrapolated from a sample"))
    handles = [
        Line2D(
            [],
            [],
            linestyle="none",
            marker=marker,
            markersize=4.6,
            markerfacecolor=face,
            markeredgecolor=style.INK,
            markeredgewidth=edge,
            label=label,
        )
        for marker, face, edge, label in looks
    ]
    if references:
        handles += [
            Line2D([], [], linestyle="none", label=text)
            for text in (
                f"×: seconds over those of {_label(REFERENCE)}",
                "tie: whiskers overlap with its own",
            )
        ]
    _key(key, handles, 1)


def _said(line: _Line, reference: _Line | None, rare: bool) -> str:
    """Seconds, and how many times those of the reference; no order is claimed between ranges that overlap. A single
    pass is told where it is ``rare``."""
    text = f"{'' if line.sample is None else '≈ '}{_short(line.value)} s"
    if reference is not None:
        if line is reference:
            text += " (1×)"
        elif line.sample is None and line.ties(reference):
            text += " (tie)"
        else:
            times = line.value / reference.value
            digits = 0 if times >= 20 else 1 if times >= 1.05 else 2
            text += f" ({times:,.{digits}f}×)"
    if rare and line.passes == 1:
        text += ", 1 pass"
    return text if line.sample is None else f"{text}, from {line.sample:,}"


def _short(value: float) -> str:
    """Three significant digits, trailing zeros kept: 0.0510, 4.44, 59.4."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(value))}f}"


def _plain_ticks(axes: Axes, start: float, end: float) -> None:
    """Plain numbers: the shorter the range, the more of them."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    steps = (1, 2, 3, 4, 6) if end - start < 0.9 else (1, 2, 5) if end - start < 1.6 else (1,)
    decades = range(math.floor(start), math.ceil(end) + 1)
    marks = [step * 10.0**decade for decade in decades for step in steps]
    axes.xaxis.set_major_locator(FixedLocator([at for at in marks if start <= math.log10(at) <= end]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _stages(axes: Axes, key: Axes, rows: Table, lines: list[_Line]) -> None:
    from matplotlib.patches import Patch

    parts: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["panel"] == "stage":
            parts.setdefault(str(row["method"]), {})[str(row["name"])] = float(row["value"] or 0.0)
    staged = [line for line in lines if set(parts[line.method]) != {OTHER}]
    there = {name for line in staged for name in parts[line.method]} - {OTHER}
    names = [name for name in STAGES if name in there] + sorted(there - set(STAGES)) + [OTHER]
    left = dict.fromkeys((line.method for line in staged), 0.0)
    bars = []
    for name in names:
        share = {
            line.method: 100.0 * parts[line.method].get(name, 0.0) / sum(parts[line.method].values())
            for line in staged
        }
        colour, hatch = _stage_look(name)
        drawn = axes.barh(
            [line.place for line in staged],
            list(share.values()),
            left=list(left.values()),
            height=0.66,
            color=colour,
            hatch=hatch,
            edgecolor=style.INK,
            linewidth=0.4,
        )
        for line, bar in zip(staged, drawn, strict=True):
            if line.sample is not None:
                bar.set_alpha(PALE)
        bars.append(
            Patch(
                facecolor=colour,
                hatch=hatch,
                edgecolor=style.INK,
                linewidth=0.4,
                label=name.replace("_", " "),
            )
        )
        for method, value in share.items():
            left[method] += value
    for line in lines:
        if line not in staged:
            axes.text(
                1.5, line.place, "stages not timed", va="center_baseline", fontsize=6.3, color=style.MUTED
            )
    axes.set_xlim(0, 100)
    axes.set_xlabel("Share of the pass (%)")
    axes.set_title("(b) Stages")
    _key(key, bars, 3)


def _stage_look(name: str) -> tuple[str, str]:
    if name == OTHER:
        return "#ffffff", ""
    return style.series(STAGES.index(name) if name in STAGES else len(STAGES))


def _errors(axes: Axes, key: Axes, rows: Table, lines: list[_Line]) -> None:
    from matplotlib.lines import Line2D

    found: dict[str, dict[str, float]] = {name: {} for name in ERRORS}
    for row in rows:
        if row["panel"] == "error":
            found[str(row["name"])][str(row["method"])] = float(row["value"] or 0.0)
    seen = [value for values in found.values() for value in values.values() if value > 0]
    lowest, highest = min([*seen, MAX_ACTION_ERROR]), max([*seen, MAX_SPECTRUM_ERROR])
    zero = False
    axes.set_xscale("log")
    axes.set_xlim(lowest / 30, highest * 8)
    handles = []
    for name, (marker, colour, limit_colour, limit_line, limit) in ERRORS.items():
        for line in lines:
            value = found[name][line.method]
            zero |= value == 0
            axes.plot(
                value or lowest / 8,  # an exact zero has no logarithm: hollow, left of all others
                line.place,
                linestyle="none",
                marker=marker if value else "<",
                color=colour if value else "white",
                markeredgecolor=style.INK,
                markeredgewidth=0.4 if value else 0.8,
                alpha=None if line.sample is None else PALE,
            )
        axes.axvline(limit, color=limit_colour, linewidth=0.9, linestyle=limit_line, zorder=1)
        power = math.floor(math.log10(limit))
        head = "" if round(limit / 10**power) == 1 else f"{limit / 10**power:.0f}×"
        handles += [
            Line2D(
                [],
                [],
                linestyle="none",
                marker=marker,
                color=colour,
                markeredgecolor=style.INK,
                markeredgewidth=0.4,
                label=name,
            ),
            Line2D(
                [],
                [],
                color=limit_colour,
                linewidth=0.9,
                linestyle=limit_line,
                label=f"its limit, {head}$10^{{{power}}}$",
            ),
        ]
    if zero:
        handles.append(
            Line2D(
                [],
                [],
                linestyle="none",
                marker="<",
                color="white",
                markeredgecolor=style.INK,
                markeredgewidth=0.8,
                label="exactly 0",
            )
        )
    axes.set_xlabel("Largest relative error")
    axes.set_title("(c) Error")
    style.grid(axes, "x")
    _key(key, handles, 1)


def _key(axes: Axes, handles: list[Any], columns: int) -> None:
    axes.legend(
        handles=handles,
        loc="upper center",
        ncols=columns,
        handlelength=1.6,
        handleheight=0.9,
        columnspacing=1.0,
        handletextpad=0.5,
        labelspacing=0.3,
        borderaxespad=0.0,
        fontsize=6.2,
    )
