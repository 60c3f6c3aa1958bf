"""What was reported on test splits was chosen on validation splits, and that choice is among the evidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from loraforge.evidence.bag import Bag
from loraforge.evidence.checks.base import Check, Failure, Scope, guarded
from loraforge.evidence.targets.study import (
    QualitySelectionTarget,
    QualityStudyTarget,
    scores_of,
    selection_of,
)


class SelectionCheck(Check):
    """Every report of the quality study obeys a selection whose validation scores are a bag of the same root.

    A lone bag has no neighbours, and is not asked.
    """

    title: ClassVar = "selections"

    def count(self, scope: Scope) -> int:
        return len(_reports(scope)) if scope.root else 0

    def run(self, scope: Scope) -> Iterator[Failure]:
        if scope.root is None:
            return
        for bag in _reports(scope):
            yield from guarded(bag.path, lambda bag=bag: _look(bag, scope))  # type: ignore[misc]


def _reports(scope: Scope) -> list[Bag]:
    return [bag for bag in scope.bags if bag.path.parent.name == QualityStudyTarget.name]


def _look(bag: Bag, scope: Scope) -> Iterator[Failure]:
    records = bag.data / "records.jsonl"
    wanted = selection_of(bag.records)
    for other in scope.bags:
        if other.path.parent.name != QualitySelectionTarget.name:
            continue
        if selection_of(other.records).sha256 == wanted.sha256:
            break
    else:
        yield Failure(
            records, f"obeys selection {wanted.sha256[:12]}…, of which there are no validation scores"
        )
        return
    here, there = (
        {item.adapter: item.adapter_sha256 for item in scores_of(one.records) if item.arm == "original"}
        for one in (bag, other)
    )
    models = {item.model_sha256 for one in (bag, other) for item in scores_of(one.records)}
    if here != there or len(models) != 1:
        yield Failure(
            records, f"is of other adapters or another base than {other.run.name}, where it was chosen"
        )
