"""Figures: one module each, with ``table(records)`` for the numbers and ``draw(table, context)`` for the picture.

A picture is drawn from its table alone, so that the CSV beside it holds everything that it shows. matplotlib is
imported only to draw: tables are made and audited without it. ``schedule`` is a drawing of the docs, without numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from loraforge.errors import UsageError
from loraforge.evidence.tables import Table

SCHEMA = "loraforge.figure/1"
FORMATS = ("csv", "svg", "png")
FIGURES = (
    *("spectra", "allocation", "quality", "recompression"),
    *("selection", "retention", "regressions", "budget_share", "quality_tables"),
    *("shrink_ablation", "expand_ablation", "expand_native", "dispatch", "dispatch_map", "dispatch_layers"),
    *("cpu_ops", "scale"),
    *("mixed_serving_vllm", "mixed_serving_sglang", "mixed_serving_sglang_table"),
    *("six_cell", "six_cell_table", "fixed_work", "fixed_work_table", "residency", "stopping_contract"),
    *("single_fleet", "single_fleet_table", "adapters_500", "natural_serving", "cpu_serving"),
)


def module_of(name: str) -> ModuleType:
    """The module of a figure. Raises UsageError that lists those there are."""
    if name not in FIGURES:
        raise UsageError(f"no figure {name!r}", remedy=f"choose one of {', '.join(FIGURES)}")
    return importlib.import_module(f"loraforge.figures.{name}")


def table_of(name: str, records: Sequence[Any]) -> Table:
    """The numbers of a figure, from the validated records of a bag of its target."""
    table: Table = module_of(name).table(records)
    return table
