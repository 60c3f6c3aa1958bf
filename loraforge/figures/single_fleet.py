"""Each fleet alone: throughput and latencies over the offered rate (paper, figure 19)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.serving_study import Item
from loraforge.figures.serving import SHOWN, draw_curves_of
from loraforge.figures.serving_fleets import by_fleet, table_by_fleet
from loraforge.figures.style import Context

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(records: Sequence[Item]) -> Table:
    """Averages by fleet, arm and offered rate."""
    return table_by_fleet(records, SHOWN)


def draw(rows: Table, context: Context) -> Figure:
    """A row of panels a fleet."""
    return draw_curves_of(by_fleet(rows), context)
