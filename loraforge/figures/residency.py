"""Weights by execution by room for some or all adapters: throughput and loads (paper, figure 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.figures.serving import draw_bars, table
from loraforge.figures.style import Context

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = ("tok_s", "tpot_p99_ms", "loads", "pool_gib")


def draw(rows: Table, context: Context) -> Figure:
    """A panel a metric and offered rate, a bar an arm."""
    return draw_bars(rows, context, METRICS)


__all__ = ["draw", "table"]
