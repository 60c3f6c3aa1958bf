"""All tasks by name. A builder module has a tuple ``SPECS`` and is listed here."""

from __future__ import annotations

from types import ModuleType

from loraforge.errors import UsageError
from loraforge.quality.builders import (
    bible,
    docstrings,
    extraction,
    icd,
    languages,
    morphology,
    phrases,
    places,
    sentiment,
    spelling,
    wordforms,
    wordnet,
)
from loraforge.quality.builders.common import TaskSpec

_MODULES: tuple[ModuleType, ...] = (
    bible,
    docstrings,
    extraction,
    icd,
    languages,
    morphology,
    phrases,
    places,
    sentiment,
    spelling,
    wordforms,
    wordnet,
)

TASKS: dict[str, TaskSpec] = {spec.name: spec for module in _MODULES for spec in module.SPECS}


def task(name: str) -> TaskSpec:
    """The task of that name. Raises UsageError that lists the names there are."""
    if name not in TASKS:
        raise UsageError("no such task", key=name, remedy=f"choose from {', '.join(sorted(TASKS))}")
    return TASKS[name]
