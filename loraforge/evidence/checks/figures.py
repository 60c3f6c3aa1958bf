"""A drawn figure shows the numbers of a bag, and its files are those that were drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from loraforge.evidence.bag import open_bag
from loraforge.evidence.checks.base import Check, Failure, Scope, guarded
from loraforge.evidence.tables import first_difference, from_csv, read_csv, to_csv
from loraforge.figures import FORMATS, SCHEMA, table_of
from loraforge.files import read_json, sha256_file


class FigureCheck(Check):
    """Every NAME.csv, .svg and .png has a NAME.json that ties it to a bag, by hashes, and its numbers recompute."""

    title: ClassVar = "drawn figures"

    def count(self, scope: Scope) -> int:
        return sum(len(_names(folder)) for folder in scope.figures) or len(scope.figures)

    def run(self, scope: Scope) -> Iterator[Failure]:
        for folder in scope.figures:
            if not _names(folder):
                yield Failure(folder, "holds no figure")
            for name in _names(folder):
                path = folder / f"{name}.json"
                yield from guarded(path, lambda folder=folder, name=name: _look(folder, name))  # type: ignore[misc]


def _names(folder: Path) -> list[str]:
    endings = {f".{ending}" for ending in (*FORMATS, "json")}
    return sorted({path.stem for path in folder.glob("*") if path.suffix in endings and path.is_file()})


def _look(folder: Path, name: str) -> Iterator[Failure]:
    path = folder / f"{name}.json"
    if not path.is_file():
        yield Failure(path, "figure has no provenance")
        return
    stated: Any = read_json(path)
    if not isinstance(stated, dict) or stated.get("schema") != SCHEMA:
        yield Failure(path, f"not a provenance of schema {SCHEMA}")
        return
    files = stated.get("files")
    for ending in FORMATS:
        file = folder / f"{name}.{ending}"
        digest = files.get(file.name) if isinstance(files, dict) else None
        if not file.is_file():
            yield Failure(file, "file of a figure is missing")
        elif digest != (found := sha256_file(file)):
            yield Failure(file, f"SHA-256 is {found[:12]}…, {path.name} says {str(digest)[:12]}…")
    place = stated.get("bag")
    if not isinstance(place, str):
        yield Failure(path, "names no bag")
        return
    bag = open_bag(folder / place)
    if bag.manifest_sha256 != stated.get("bag_tagmanifest_sha256"):
        yield Failure(path, f"was drawn from other bytes than those of the bag {bag.run.name}")
    if name not in bag.target.figures:
        yield Failure(path, f"{name} is not a figure of a {bag.run.target} bag")
        return
    table = folder / f"{name}.csv"
    recomputed = from_csv(to_csv(table_of(name, bag.records)), table)
    if difference := first_difference(read_csv(table), recomputed):
        yield Failure(table, difference)
