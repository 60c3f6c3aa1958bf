"""Weights by execution on one fleet: throughput, latencies and memory (paper, figure 7 and table 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.figures.serving import draw_bars, table
from loraforge.figures.style import Context

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = ("tok_s", "ttft_p50_s", "tpot_p99_ms", "peak_gib")


def draw(rows: Table, context: Context) -> Figure:
    """A panel a metric and offered rate, a bar an arm."""
    return draw_bars(rows, context, METRICS)


__all__ = ["draw", "table"]
