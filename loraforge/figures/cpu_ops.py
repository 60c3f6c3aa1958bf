"""CPU serving operations: speed over the CPU engine's own, and microseconds of a layer with its floor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loraforge.evidence.tables import Row, Table
from loraforge.evidence.targets.cpu_ops import Batch, Engine, Item, Machine
from loraforge.figures import kernels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# projection -> marker and colour
MARKS = {
    "qkv": ("o", "#0b4a8f"),
    "o": ("s", "#f0a830"),
    "gate_up": ("^", "#35a39a"),
    "down": ("D", "#e9d5a1"),
}
OTHER = ("v", "#8c3b4a")


def table(records: Sequence[Item]) -> Table:
    """Rows of three panels by batch.

    - ``speed``: median over blocks of the engine's time over ours, by projection, with least and greatest block
    - ``layer``: microseconds over the projections by arm (ours, engine, and the floor: bytes at the copy rate)
    - ``machine``: threads in ``value``; ``name`` says instructions and the engine's version
    """
    machine = next(item for item in records if isinstance(item, Machine))
    engine = next((item for item in records if isinstance(item, Engine)), None)
    batches = [item for item in records if isinstance(item, Batch)]
    columns = (
        "panel", "model", "phase", "tokens", "adapters", "rank", "capacity", "projection", "arm", "name", "value",
        "low", "high",
    )  # fmt: skip
    empty: Row = dict.fromkeys(columns)
    against = "" if engine is None else f", against {engine.distribution} {engine.version}"
    rows: Table = [
        empty | {"panel": "machine", "name": f"{machine.instructions}{against}", "value": machine.threads}
    ]
    layers: dict[str, list[Batch]] = {}
    for item in batches:
        layers.setdefault(item.situation, []).append(item)
    for items in layers.values():
        first = items[0]
        where: Row = empty | {
            "model": first.model, "phase": first.phase, "tokens": first.tokens, "adapters": first.adapters,
            "rank": first.rank, "capacity": first.capacity,
        }  # fmt: skip
        for item in items:
            if item.engine_us is not None and item.speedup is not None:
                blocks = [theirs / ours for theirs, ours in zip(item.engine_us, item.ours_us, strict=True)]
                rows.append(
                    where
                    | {"panel": "speed", "projection": item.projection, "value": item.speedup}
                    | {"low": min(blocks), "high": max(blocks)}
                )
        floor = sum(item.bytes for item in items) / machine.copy_gb_s / 1e3
        totals = {"ours": sum(statistics.median(item.ours_us) for item in items), "floor": floor}
        if all(item.engine_us for item in items):
            totals["engine"] = sum(statistics.median(item.engine_us or ()) for item in items)
        rows += [where | {"panel": "layer", "arm": arm, "value": total} for arm, total in totals.items()]
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """(a) speed by projection, (b) microseconds of all projections; a line a batch."""
    machine = next(row for row in rows if row["panel"] == "machine")
    layers = [row for row in rows if row["panel"] == "layer"]
    batches = list(dict.fromkeys(_batch(row) for row in layers))
    speeds = [row for row in rows if row["panel"] == "speed"]
    with style.styled():
        figure = style.new_figure(0.3 * len(batches) + 1.7)
        first, second = figure.subplots(1, 2, sharey=True)
        _speeds(first, speeds, batches)
        _layers(second, layers, batches)
        first.set_yticks(range(len(batches)), [_label(batch) for batch in batches])
        first.set_ylim(len(batches) - 0.5, -0.5)
        for axes in (first, second):
            axes.tick_params(axis="y", length=0)
        handles = [*first.get_legend_handles_labels()[0], *second.get_legend_handles_labels()[0]]
        figure.legend(handles=handles, loc="outside upper center", ncols=7, fontsize=6.5)
        threads = style.plural(int(kernels.number(machine, "value")), "thread")
        text = [
            context.line(f"{threads}, {machine['name']}", "Low-rank updates on a CPU"),
            "Shrink and expand of one batch; medians of interleaved blocks"
            f"{', whiskers from the least to the greatest block' if speeds else ''}.",
            "Floor: bytes at the machine's copy rate; operands that stay in a cache can beat it.",
        ]
        kernels.caption(figure, *text)
        return figure


def _batch(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "phase", "tokens", "adapters", "rank", "capacity"))


def _label(batch: tuple[Any, ...]) -> str:
    model, phase, tokens, adapters, rank, capacity = batch
    return f"{model}, {phase} T {tokens},\n{adapters} adapters, rank {rank}, pool {capacity}"


def _speeds(axes: Axes, rows: Table, batches: list[tuple[Any, ...]]) -> None:
    axes.set_title("(a) Speed over the engine's")
    if not rows:
        axes.set_xticks([])
        axes.text(0.5, 0.5, "no engine was timed", ha="center", va="center", transform=axes.transAxes)
        return
    names = [name for name in MARKS if any(row["projection"] == name for row in rows)]
    names += sorted({str(row["projection"]) for row in rows} - set(MARKS))
    for index, name in enumerate(names):
        own = [row for row in rows if row["projection"] == name]
        marker, colour = MARKS.get(name, OTHER)
        places = [batches.index(_batch(row)) + 0.16 * (index - (len(names) - 1) / 2) for row in own]
        values = [kernels.number(row, "value") for row in own]
        around = [
            [value - kernels.number(row, "low") for value, row in zip(values, own, strict=True)],
            [kernels.number(row, "high") - value for value, row in zip(values, own, strict=True)],
        ]
        axes.errorbar(
            values, places, xerr=around, fmt=marker, color=colour, markersize=4, markeredgecolor=style.INK,
            markeredgewidth=0.5, ecolor=style.INK, elinewidth=0.6, zorder=3,
        )  # fmt: skip
        axes.plot(
            [], [], linestyle="none", marker=marker, color=colour, markersize=4, markeredgecolor=style.INK,
            markeredgewidth=0.5, label=name,
        )  # fmt: skip
    kernels.ratio_axis(axes, "x", *kernels.extent(rows))


def _layers(axes: Axes, rows: Table, batches: list[tuple[Any, ...]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_title("(b) Microseconds, all projections")
    looks = {
        "engine": ("v", "#c9c9c9", "the engine's"),
        "ours": ("P", "#0b4a8f", "ours"),
        "floor": ("|", "#8c3b4a", "floor"),
    }
    values = {(_batch(row), row["arm"]): kernels.number(row, "value") for row in rows}
    for arm, (marker, colour, label) in looks.items():
        found = [(values[batch, arm], place) for place, batch in enumerate(batches) if (batch, arm) in values]
        if found:
            axes.plot(
                [x for x, _ in found], [y for _, y in found], linestyle="none", marker=marker, color=colour,
                markersize=9 if marker == "|" else 5, markeredgewidth=1.6 if marker == "|" else 0.5,
                markeredgecolor=colour if marker == "|" else style.INK, label=label, zorder=3,
            )  # fmt: skip
    for place, batch in enumerate(batches):
        axes.annotate(
            f"{values[batch, 'ours']:,.0f}", (values[batch, "ours"], place), xytext=(0, 4),
            textcoords="offset points", ha="center", va="bottom", fontsize=6,
        )  # fmt: skip
    axes.set_xscale("log")
    low, high = min(values.values()), max(values.values())
    axes.set_xlim(low / 1.5, high * 1.5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,g}"))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high > 30 * low else (1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="y", labelleft=False)
    style.grid(axes, "x")
