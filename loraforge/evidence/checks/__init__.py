"""Checks of the audit, one class a concern, in the order in which they are reported."""

from __future__ import annotations

from loraforge.evidence.checks.base import Check, Failure, Scope
from loraforge.evidence.checks.figures import FigureCheck
from loraforge.evidence.checks.fleet import FleetCheck
from loraforge.evidence.checks.index import IndexCheck
from loraforge.evidence.checks.integrity import IntegrityCheck
from loraforge.evidence.checks.recompute import SummaryCheck, TableCheck, ValidationCheck
from loraforge.evidence.checks.schema import SchemaCheck
from loraforge.evidence.checks.selection import SelectionCheck

# What must hold of a bag wherever it lies.
BAG_CHECKS: tuple[Check, ...] = (
    IntegrityCheck(),
    SchemaCheck(),
    ValidationCheck(),
    SummaryCheck(),
    TableCheck(),
)
CHECKS: tuple[Check, ...] = (IndexCheck(), *BAG_CHECKS, SelectionCheck(), FleetCheck(), FigureCheck())

__all__ = ["BAG_CHECKS", "CHECKS", "Check", "Failure", "Scope"]
