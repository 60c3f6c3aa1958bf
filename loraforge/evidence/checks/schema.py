"""A bag holds the files it must, each of the right form, and lies where its description says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from loraforge.evidence.bag import PAYLOAD, Bag
from loraforge.evidence.checks.base import Check, Failure, Scope, guarded
from loraforge.files import read_json


class SchemaCheck(Check):
    """Files of the payload, records, inputs, system and description of the run."""

    title: ClassVar = "schemas"

    def count(self, scope: Scope) -> int:
        return len(scope.bags)

    def run(self, scope: Scope) -> Iterator[Failure]:
        for bag in scope.bags:
            for look in (_place, _payload, _records, _system, _inputs, _objects):
                yield from guarded(bag.path, lambda bag=bag, look=look: look(bag))  # type: ignore[misc]


def _place(bag: Bag) -> Iterator[Failure]:
    place = f"{bag.path.resolve().parent.name}/{bag.path.resolve().name}"
    if place != bag.run.name:
        yield Failure(bag.path / "bag-info.txt", f"describes {bag.run.name}, but the bag lies at {place}")


def _payload(bag: Bag) -> Iterator[Failure]:
    wanted = {bag.data / name for name in PAYLOAD}
    wanted |= {bag.data / "figures" / f"{name}.csv" for name in bag.target.figures}
    there = {path for path in bag.data.rglob("*") if path.is_file()}
    for path in sorted(wanted - there):
        yield Failure(path, "file that every bag of this target has is missing")
    for path in sorted(there - wanted):
        yield Failure(path, "file does not belong in a bag of this target")


def _records(bag: Bag) -> Iterator[Failure]:
    if not bag.records:
        yield Failure(bag.data / "records.jsonl", "holds no records")


def _system(bag: Bag) -> Iterator[Failure]:
    if not bag.system.cpu:
        yield Failure(bag.data / "system.json", "names no CPU")


def _inputs(bag: Bag) -> Iterator[Failure]:
    stated = bag.target.inputs(bag.records)
    for name, digest in stated.items():
        if bag.inputs.get(name) != digest:
            yield Failure(bag.data / "inputs.json", f"{name} is not the input that the records state")


def _objects(bag: Bag) -> Iterator[Failure]:
    for name in ("config.json", "source.json"):
        if not isinstance(read_json(bag.data / name), dict):
            yield Failure(bag.data / name, "not a JSON object")
