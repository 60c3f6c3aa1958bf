"""What a bag derives from its records comes out again when it is derived anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from loraforge.evidence.bag import Bag
from loraforge.evidence.checks.base import Check, Failure, Scope, guarded
from loraforge.evidence.tables import first_difference, from_csv, read_csv, same, to_csv
from loraforge.figures import table_of
from loraforge.files import read_json


class ValidationCheck(Check):
    """validation.json is what the records give, and every claim in it holds."""

    title: ClassVar = "validation claims"

    def count(self, scope: Scope) -> int:
        return len(scope.bags)

    def run(self, scope: Scope) -> Iterator[Failure]:
        for bag in scope.bags:
            yield from guarded(bag.data / "validation.json", lambda bag=bag: self._look(bag))  # type: ignore[misc]

    def _look(self, bag: Bag) -> Iterator[Failure]:
        path = bag.data / "validation.json"
        claims = bag.claims()
        stated = read_json(path)
        recomputed = [claim.model_dump() for claim in claims]
        if not isinstance(stated, list) or len(stated) != len(recomputed):
            yield Failure(path, "does not list the claims that the records give")
            return
        for old, new in zip(stated, recomputed, strict=True):
            if (
                not isinstance(old, dict)
                or old.keys() != new.keys()
                or not all(same(old[key], new[key]) for key in new)
            ):
                yield Failure(path, f"{new['claim']}: differs from what the records give")
        for claim in claims:
            if not claim.passed:
                yield Failure(
                    bag.data / "records.jsonl", f"{claim.claim} is {claim.value:.4g}, limit {claim.limit:.4g}"
                )


class SummaryCheck(Check):
    """summary.json holds the numbers that the records give, and no other."""

    title: ClassVar = "summaries"

    def count(self, scope: Scope) -> int:
        return len(scope.bags)

    def run(self, scope: Scope) -> Iterator[Failure]:
        for bag in scope.bags:
            yield from guarded(bag.data / "summary.json", lambda bag=bag: self._look(bag))  # type: ignore[misc]

    def _look(self, bag: Bag) -> Iterator[Failure]:
        path = bag.data / "summary.json"
        stated: Any = read_json(path)
        if not isinstance(stated, dict):
            yield Failure(path, "not a JSON object")
            return
        recomputed = bag.summary()
        for key in sorted(stated.keys() | recomputed.keys()):
            if key not in recomputed:
                yield Failure(path, f"{key}: the records give no such number")
            elif key not in stated:
                yield Failure(path, f"{key}: is missing, the records give {recomputed[key]!r}")
            elif not same(stated[key], recomputed[key]):
                yield Failure(path, f"{key}: says {stated[key]!r}, the records give {recomputed[key]!r}")


class TableCheck(Check):
    """figures/NAME.csv in a bag holds the numbers that the records give."""

    title: ClassVar = "figure tables"

    def count(self, scope: Scope) -> int:
        return len(scope.bags)

    def run(self, scope: Scope) -> Iterator[Failure]:
        for bag in scope.bags:
            yield from guarded(bag.path, lambda bag=bag: self._look(bag))  # type: ignore[misc]

    def _look(self, bag: Bag) -> Iterator[Failure]:
        for name in bag.target.figures:
            path = bag.data / "figures" / f"{name}.csv"
            recomputed = from_csv(to_csv(table_of(name, bag.records)), path)
            if difference := first_difference(read_csv(path), recomputed):
                yield Failure(path, difference)
