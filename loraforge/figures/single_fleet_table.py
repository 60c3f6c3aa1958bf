"""Each fleet alone at the highest offered rate, in numbers (paper, table 9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.serving_study import Item
from loraforge.figures.serving_fleets import by_fleet, table_by_fleet
from loraforge.figures.serving_tables import THROUGHPUT, draw_tables
from loraforge.figures.style import Context

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = ("output_tokens", *THROUGHPUT)


def table(records: Sequence[Item]) -> Table:
    """Averages of METRICS by fleet, arm and offered rate."""
    return table_by_fleet(records, METRICS)


def draw(rows: Table, context: Context) -> Figure:
    """A block a fleet, a line an arm."""
    return draw_tables(by_fleet(rows), context, METRICS, last=True)
