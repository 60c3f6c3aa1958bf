"""Seconds and peak memory of planning a fleet, over its number of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Row, Table
from loraforge.evidence.targets.scale import STEPS, Item, by_size, run_of
from loraforge.figures import kernels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# step -> label, colour, marker, line
LOOKS: dict[str, tuple[str, str, str, str | tuple[int, tuple[float, ...]]]] = {
    "factor": ("factorise all", "#0b4a8f", "o", "-"),
    "add": ("add one", "#8c3b4a", "^", (0, (4.0, 1.5))),
    "rebudget": ("another budget", "#e08a1e", "s", (0, (1.0, 1.0))),
    "remove": ("remove one", "#35a39a", "D", (0, (5.0, 1.2, 1.0, 1.2))),
}
MEMORY = {"factor": "factorise", "allocate": "allocate"}


def table(records: Sequence[Item]) -> Table:
    """A row a step: adapters of the fleet, adapters planned and factorised, seconds and GiB; and one of the run, whose
    ``name`` says what the adapters are."""
    run = run_of(records)
    columns = (
        *("panel", "name", "adapters", "planned", "factorised"),
        *("seconds", "cpu_s", "peak_gib", "baseline_gib"),
    )
    empty: Row = dict.fromkeys(columns)
    words = f"{run.modules} modules of rank {run.rank} on {run.base_model}"
    rows: Table = [empty | {"panel": "run", "name": words, "planned": run.threads}]
    for size, steps in by_size(records).items():
        for name in STEPS:
            item = steps[name]
            rows.append(
                {
                    "panel": "step",
                    "name": name,
                    "adapters": size,
                    "planned": item.fleet,
                    "factorised": item.factorised,
                    "seconds": item.seconds,
                    "cpu_s": item.cpu_s,
                    "peak_gib": item.peak_gib,
                    "baseline_gib": item.baseline_gib,
                }
            )
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """(a) seconds by step, (b) peak memory with that of an idle process, over adapters."""
    run = next(row for row in rows if row["panel"] == "run")
    steps = [row for row in rows if row["panel"] == "step"]
    with style.styled():
        figure = style.new_figure(2.8)
        left, right = figure.subplots(1, 2)
        _seconds(left, steps)
        _memory(right, steps)
        for axes in (left, right):
            axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.12), ncols=2, borderaxespad=0)
        threads = style.plural(int(kernels.number(run, "planned")), "thread")
        kernels.caption(
            figure,
            context.line(f"{run['name']}, {threads}", "Synthetic adapters"),
            "Every step is a process of its own, timed from imported modules to results. Spectra are kept alone.",
            "Adding one adapter factorises one; removing one and another budget factorise none.",
        )
        return figure


def _series(rows: Table, name: str, column: str) -> tuple[list[float], list[float]]:
    own = [row for row in rows if row["name"] == name]
    return [kernels.number(row, "adapters") for row in own], [kernels.number(row, column) for row in own]


def _seconds(axes: Axes, rows: Table) -> None:
    beside = {"factor": 0, "add": 5, "rebudget": -5}  # removing one takes what another budget takes
    for name, (label, colour, marker, line) in LOOKS.items():
        x, y = _series(rows, name, "seconds")
        axes.plot(x, y, color=colour, marker=marker, linestyle=line, label=label)
        if name in beside:
            axes.annotate(
                f"{y[-1]:.3g} s", (x[-1], y[-1]), xytext=(5, beside[name]), textcoords="offset points",
                va="center", fontsize=6.5, color=colour,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.set_title("(a) Time")
    axes.set_ylabel("Seconds")
    _adapters(axes, rows)


def _memory(axes: Axes, rows: Table) -> None:
    for name, label in MEMORY.items():
        _, colour, marker, line = LOOKS["factor" if name == "factor" else "rebudget"]
        x, y = _series(rows, name, "peak_gib")
        axes.plot(x, y, color=colour, marker=marker, linestyle=line, label=f"{label}, peak")
    x, y = _series(rows, "factor", "baseline_gib")
    axes.plot(x, y, color=style.MUTED, linestyle=(0, (1.0, 1.5)), label="before any work")
    axes.set_ylim(0, 1.1 * max(kernels.number(row, "peak_gib") for row in rows))
    axes.set_title("(b) Peak memory")
    axes.set_ylabel("GiB of a process")
    _adapters(axes, rows)


def _adapters(axes: Axes, rows: Table) -> None:
    from matplotlib.ticker import NullLocator

    sizes = sorted({int(kernels.number(row, "adapters")) for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 2.0)
    axes.set_xlabel("Adapters in the fleet")
    style.grid(axes, "both")
