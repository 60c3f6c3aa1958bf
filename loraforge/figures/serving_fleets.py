"""Figures of studies that serve each fleet alone: their rows side by side, told apart by the panel's prefix."""

from __future__ import annotations

from collections.abc import Sequence

from loraforge.evidence.tables import Row, Table
from loraforge.evidence.targets.serving import fleet_of
from loraforge.evidence.targets.serving_study import Item, studies
from loraforge.figures.serving import rows_of

_BETWEEN = "/"  # fleet/panel


def table_by_fleet(records: Sequence[Item], metrics: Sequence[str]) -> Table:
    """The rows of each fleet's study, ``panel`` preceded by the fleet."""
    return [
        row | {"panel": f"{fleet_of(found)}{_BETWEEN}{row['panel']}"}
        for found in studies(records)
        for row in rows_of(found, metrics)
    ]


def by_fleet(rows: Table) -> dict[str, Table]:
    """The rows of each fleet, as its own study has them."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        fleet, _, panel = str(row["panel"]).partition(_BETWEEN)
        found.setdefault(fleet, []).append(row | {"panel": panel})
    return dict(found)
