"""The deployed arms with equal output counts, in numbers (paper, table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Table
from loraforge.evidence.targets.serving_study import Item
from loraforge.figures.serving_tables import PAGING, draw_table, table_of
from loraforge.figures.style import Context

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = PAGING


def table(records: Sequence[Item]) -> Table:
    """Averages of METRICS by case and offered rate."""
    return table_of(records, METRICS)


def draw(rows: Table, context: Context) -> Figure:
    """A block an offered rate, a line an arm."""
    return draw_table(rows, context, METRICS)
