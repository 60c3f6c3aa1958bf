"""Printed tables of serving studies: a line a case, a column a metric, mean and deviation over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.serving_study import Item, study
from loraforge.figures import style
from loraforge.figures.kernels import number
from loraforge.figures.serving import LINE_HEIGHT, caption, label_of, rows_of, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THROUGHPUT = ("requests_s", "tok_s", "ttft_p50_s", "tpot_p99_ms")
PAGING = (*THROUGHPUT, "loads", "source_gib")
HEADS = {  # metric -> two lines above its column
    "requests_s": ("Requests", "a second"),
    "tok_s": ("Tokens", "a second"),
    "output_tokens": ("Tokens", "in all"),
    "ttft_p50_s": ("TTFT P50", "s"),
    "tpot_p99_ms": ("TPOT P99", "ms"),
    "loads": ("Loads", "adapters"),
    "source_gib": ("Copied", "GiB"),
    "pool_gib": ("LoRA", "GiB"),
    "peak_gib": ("Peak", "GiB"),
    "prefill_tokens_mean": ("Prefill", "tok/step"),
    "decode_requests_peak": ("Decode", "peak batch"),
}
_LINE = 0.17  # inches of a line
_NAMES = 0.26  # part of the width that names of cases take
_SIZE = 6.5  # points
_OF_ARMS = ("pool_gib", "peak_gib")  # which an arm has at all its rates


@dataclass(frozen=True)
class Column:
    """A metric, and the fleet whose it is where it is of one."""

    metric: str
    fleet: str | None = None

    @property
    def heads(self) -> tuple[str, str, str]:
        """Lines above the column."""
        return (*HEADS[self.metric], self.fleet or "")


def table_of(records: Sequence[Item], metrics: Sequence[str]) -> Table:
    """The rows of a printed table of these metrics, as :func:`loraforge.figures.serving.table` has them."""
    return rows_of(study(records), metrics)


def draw_table(rows: Table, context: style.Context, metrics: Sequence[str], last: bool = False) -> Figure:
    """A block an offered rate. last: the highest rate alone, as most of the paper's tables have it."""
    return draw_tables({"": rows}, context, metrics, last)


def draw_tables(
    parts: Mapping[str, Table], context: style.Context, metrics: Sequence[str], last: bool = False
) -> Figure:
    """The same for several studies, one below the other under their names."""
    blocks = [
        (f"{name}, {rate:g} a second offered" if name else f"{rate:g} a second offered", rate, rows)
        for name, rows in parts.items()
        for rate in _rates(rows)[-1 if last else 0 :]
    ]
    columns = list(dict.fromkeys(column for rows in parts.values() for column in _columns(rows, metrics)))
    heads = 3 if any(column.fleet for column in columns) else 2
    lines = heads + sum(1 + len(_cases(rows, rate)) for _, rate, rows in blocks)
    small = caption(parts, context, [], spread="±")
    with style.styled():
        figure = style.new_figure(_LINE * (lines + 1) + LINE_HEIGHT * len(small))
        axes = figure.subplots()
        axes.axis("off")
        axes.set_xlim(0, 1)
        axes.set_ylim(lines + 0.2, -0.2)
        _rule(axes, 0.0)
        for place, column in enumerate(columns):
            for line, words in enumerate(column.heads[:heads]):
                _put(axes, place, len(columns), line + 0.5, words, bold=line == 0)
        at = float(heads)
        for title, rate, rows in blocks:
            _rule(axes, at)
            axes.text(0, at + 0.5, title, va="center", fontstyle="italic", fontsize=_SIZE)
            at += 1
            for case in _cases(rows, rate):
                axes.text(0.01, at + 0.5, label_of(case), va="center", fontsize=_SIZE)
                for place, column in enumerate(columns):
                    _put(axes, place, len(columns), at + 0.5, _value(rows, column, case, rate))
                at += 1
        _rule(axes, at)
        style.caption(figure, "\n".join(small))
        return figure


def _rates(rows: Table) -> list[float]:
    return sorted({number(row, "rate") for row in rows if row["panel"] == "tok_s"})


def _cases(rows: Table, rate: float) -> list[str]:
    return list(
        dict.fromkeys(str(row["arm"]) for row in rows if row["panel"] == "tok_s" and row["rate"] == rate)
    )


def _columns(rows: Table, metrics: Sequence[str]) -> list[Column]:
    """Those of the metrics that there are values of, one a fleet where a metric is of fleets."""
    return [
        Column(metric, fleet)
        for metric in metrics
        for fleet in dict.fromkeys(
            None if row["name"] is None else str(row["name"]) for row in rows if row["panel"] == metric
        )
    ]


def _value(rows: Table, column: Column, case: str, rate: float) -> str:
    """``1,234 ± 5``, or a dash where nothing counts it."""
    own, at = (case.partition(".")[0], None) if column.metric in _OF_ARMS else (case, rate)
    for row in rows:
        if (row["panel"], row["name"], row["arm"], row["rate"]) == (column.metric, column.fleet, own, at):
            spread = "" if row["std"] is None else f" ± {shown(number(row, 'std'))}"
            return shown(number(row, "value")) + spread
    return "–"


def _put(axes: Axes, place: int, places: int, at: float, words: str, bold: bool = False) -> None:
    """A word of a column, which ends at its right edge."""
    right = _NAMES + (1 - _NAMES) * (place + 1) / places
    weight = "bold" if bold else "normal"
    axes.text(right, at, words, ha="right", va="center", fontsize=_SIZE, fontweight=weight)


def _rule(axes: Axes, at: float) -> None:
    axes.axhline(at, color=style.MUTED, linewidth=0.6)


__all__ = ["PAGING", "THROUGHPUT", "draw_table", "draw_tables", "table_of"]
