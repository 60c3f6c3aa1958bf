"""Figures of the whole fleet as inline SVG, styled by classes of the page's style sheet alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from loraforge.allocate.problem import Floats, Ints, Problem
from loraforge.errors import one_line
from loraforge.report.numbers import AdapterNumbers
from loraforge.report.text import shown

MAX_KINDS = 8  # colours of the style sheet; the rarest kinds of module share the last
MAX_BARS = 40  # adapters that the budget figure draws: all, or the first and the last half of that
DECADES = 6  # below the largest singular value of a module, what is drawn of its spectrum
_WIDTH = 720


def kinds_of(modules: Sequence[str]) -> tuple[list[str], list[int]]:
    """Kinds of module (the last component of a name, the most frequent first), and the kind of each module."""
    parts = [module.rpartition(".")[2] for module in modules]
    counts = Counter(parts)
    kinds = sorted(counts, key=lambda kind: (-counts[kind], kind))
    if len(kinds) > MAX_KINDS:
        kinds = [*kinds[: MAX_KINDS - 1], "other"]
    index = {kind: number for number, kind in enumerate(kinds)}
    return kinds, [index.get(part, len(kinds) - 1) for part in parts]


def budget_figure(adapters: Sequence[AdapterNumbers]) -> str:
    """Bars of each adapter's share of the budget over its uniform share, on a logarithmic axis around 1."""
    ordered = sorted(adapters, key=lambda adapter: (-adapter.ratio, adapter.name))
    half = MAX_BARS // 2
    parts = [ordered] if len(ordered) <= MAX_BARS else [ordered[:half], ordered[-half:]]
    reach = max(0.5, *(abs(math.log2(adapter.ratio)) for adapter in ordered)) * 1.05
    left, right, row = 190.0, _WIDTH - 130.0, 20.0
    middle, unit = (left + right) / 2, (right - left) / 2 / reach
    bars: list[str] = []
    y = 22.0
    for number, part in enumerate(parts):
        if number:
            between = f"… {len(ordered) - MAX_BARS} adapters between …"
            bars.append(_text(middle, y + 14, between, anchor="middle", kind="muted"))
            y += row
        for adapter in part:
            end = middle + unit * math.log2(adapter.ratio)
            title = f"{adapter.name}: {adapter.share:.2%} of the budget, uniform {adapter.uniform_share:.2%}"
            bar = _tag(
                "rect",
                kind="more" if end >= middle else "less",
                x=min(middle, end),
                y=y + 3,
                width=max(abs(end - middle), 0.5),
                height=row - 6,
                rx=2,
            )
            value = f"{adapter.ratio:.2f}× · {adapter.share:.1%}"
            bars.append(
                _group(title, _text(left - 8, y + 14, _clip(adapter.name, 26), anchor="end"), bar)
                + _text(right + 8, y + 14, value, kind="muted")
            )
            y += row
    grid: list[str] = []
    powers = [float(power) for power in range(-9, 10) if abs(power) <= reach]
    for power in powers if len(powers) > 1 else [-0.5, 0.0, 0.5]:
        x = middle + unit * power
        grid.append(_line(x, x, 18, y, "grid" if power else "axis"))
        grid.append(_text(x, 12, f"{2**power:.3g}×", anchor="middle", kind="muted"))
    label = "Share of the budget over the uniform share, by adapter; the table has the same numbers"
    return _svg(_WIDTH, y + 6, label, [*grid, *bars])


def spectra_figure(problem: Problem, k: Ints, kinds: Sequence[str], kind: Ints) -> str:
    """The median spectrum of each kind of module, relative to its largest value, on logarithmic axes; a dot where the
    median rank that is kept ends. ``k`` and ``kind`` (an index into ``kinds``) are int64 [M]."""
    curves = [_median_spectrum(problem, np.flatnonzero(kind == number)) for number in range(len(kinds))]
    reach = max(len(curve) for curve in curves)
    least = min((float(value) for curve in curves for value in curve if value > 0), default=1.0)
    decades = min(DECADES, max(1, math.ceil(-math.log10(least))))
    left, right, top, bottom = 64.0, _WIDTH - 150.0, 14.0, 300.0

    def x(direction: int) -> float:
        return left + (right - left) * (0.5 if reach == 1 else math.log(direction) / math.log(reach))

    def y(value: float) -> float:
        return top + (bottom - top) * min(1.0, -math.log10(value) / decades if value > 0 else 1.0)

    parts: list[str] = []
    for decade in range(decades + 1):
        height = y(10.0**-decade)
        power = _tag("tspan", one_line(f"−{decade}"), kind="sup", dy=-5)
        parts.append(_line(left, right, height, height, "grid"))
        parts.append(
            _tag(
                "text",
                f"10{power}" if decade else "1",
                kind="muted",
                x=left - 8,
                y=height + 4,
                text_anchor="end",
            )
        )
    for direction in (1 << power for power in range(reach.bit_length())):
        parts.append(_text(x(direction), bottom + 18, str(direction), anchor="middle", kind="muted"))
    parts.append(_text((left + right) / 2, bottom + 38, "direction", anchor="middle", kind="muted"))
    for number, (label, curve) in enumerate(zip(kinds, curves, strict=True)):
        points = " ".join(f"{x(j):.1f},{y(float(value)):.1f}" for j, value in enumerate(curve, start=1))
        members = kind == number
        cut = int(np.median(k[members]))
        place = top + 10 + 20 * number
        title = f"{label}: median of {int(members.sum())} modules, median rank kept {cut}"
        parts.append(
            _group(
                title,
                _tag("polyline", points=points),
                _tag("circle", cx=x(max(cut, 1)), cy=y(float(curve[max(cut, 1) - 1])), r=4.5 if cut else 0),
                _line(right + 16, right + 36, place, place, "key"),
                kind=f"k{number}",
            )
        )
        parts.append(_text(right + 42, place + 4, f"{_clip(label, 14)} · {cut}"))
    label = "Median singular values of each kind of module, relative to the largest, by direction"
    return _svg(_WIDTH, bottom + 46, label, parts)


def _median_spectrum(problem: Problem, modules: Ints) -> Floats:
    """Median of sigma_j / sigma_1 over the modules that have a direction j, float64 [largest rank]."""
    rank = problem.rank[modules]
    table = np.full((len(modules), int(rank.max())), np.nan)
    for row, module in zip(table, modules.tolist(), strict=True):
        sigma = problem.sigma[problem.offsets[module] : problem.offsets[module + 1]]
        row[: len(sigma)] = sigma / sigma[0] if sigma[0] > 0 else 0.0
    median: Floats = np.nanmedian(table, axis=0)
    return median


def errors_figure(lost: Floats) -> str:
    """How many modules lose how much of their norm by truncation: a histogram of ``lost`` (float64 [M], 0 to 1)."""
    counts, edges = np.histogram(lost, bins=25, range=(0.0, 1.0))
    left, right, top, bottom = 64.0, _WIDTH - 20.0, 14.0, 190.0
    most = max(1, int(counts.max()))
    width = (right - left) / len(counts)
    parts = [
        _line(left, right, bottom, bottom, "axis"),
        _text(left - 8, top + 8, f"{most:,}", anchor="end", kind="muted"),
        _text(left - 8, bottom, "0", anchor="end", kind="muted"),
        _text((left + right) / 2, bottom + 38, "relative error of a module", anchor="middle", kind="muted"),
    ]
    for index, count in enumerate(counts.tolist()):
        height = (bottom - top) * count / most
        title = f"{edges[index]:.2f} to {edges[index + 1]:.2f}: {count:,} modules"
        bar = _tag(
            "rect", kind="bar", x=left + index * width + 1, y=bottom - height, width=width - 2, height=height
        )
        parts += [_group(title, bar)] if count else []
    for tenth in range(0, 11, 2):
        x = left + (right - left) * tenth / 10
        parts.append(_text(x, bottom + 18, f"{tenth / 10:g}", anchor="middle", kind="muted"))
    return _svg(_WIDTH, bottom + 46, "How many modules lose how much of their norm by truncation", parts)


def share_bar(share: float, even: float, most: float) -> str:
    """A cell's bar: a share of the budget, and a mark at the uniform share; ``most`` is the end of the axis."""
    width, height = 90, 12
    mark = width * even / most
    bar = _tag(
        "rect",
        kind="more" if share >= even else "less",
        width=width * share / most,
        height=height,
        rx=2,
    )
    return _tag(
        "svg",
        _tag("rect", kind="track", width=width, height=height, rx=2),
        bar,
        _line(mark, mark, 0, height, "mark"),
        kind="cell",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        aria_hidden="true",
    )


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    box = f"0 0 {width:.0f} {height:.0f}"
    return _tag("svg", *parts, kind="chart", role="img", viewBox=box, aria_label=label)


def _group(title: str, *parts: str, kind: str | None = None) -> str:
    return _tag("g", _tag("title", shown(title)), *parts, kind=kind)


def _line(x1: float, x2: float, y1: float, y2: float, kind: str) -> str:
    return _tag("line", kind=kind, x1=x1, x2=x2, y1=y1, y2=y2)


def _text(x: float, y: float, text: str, *, anchor: str | None = None, kind: str | None = None) -> str:
    return _tag("text", shown(text), kind=kind, x=x, y=y, text_anchor=anchor)


def _tag(element: str, *children: str, kind: str | None = None, **attributes: str | float | None) -> str:
    """An element: ``children`` are markup, ``kind`` is its class, attributes are escaped, floats have one decimal."""
    stated = {"class": kind, **attributes}
    written = "".join(
        f' {key.replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else shown(str(value))}"'
        for key, value in stated.items()
        if value is not None
    )
    return f"<{element}{written}>{''.join(children)}</{element}>"
