"""A search for inputs that make a reader of strangers' files fail: how long, how many, and that none did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from loraforge.errors import InputError
from loraforge.evidence.targets.base import Claim, Record, Summary, Target, at_most

MIN_SECONDS = 600.0  # of all readers together
MAX_INPUT_SECONDS = 2.0  # of the processor, for one input


class Search(Record):
    """The search over one reader.

    ``seconds`` of wall-clock time, ``cpu_s`` of the processor, as is ``slowest_s``, of one input.
    ``taken`` inputs were read, ``refused`` ones gave its one error, ``failed`` ones anything else; ``lines`` of the
    readers' source were reached, and ``kept`` inputs reached some first.
    """

    reader: Literal["headers", "configs", "indexes", "locks"]
    seconds: float = Field(gt=0)
    cpu_s: float = Field(gt=0)
    taken: int = Field(ge=0)
    refused: int = Field(ge=0)
    failed: int = Field(ge=0)
    slowest_s: float = Field(ge=0)
    lines: int = Field(ge=1)
    kept: int = Field(ge=0)


class ReaderFuzzTarget(Target[Search]):
    """``reader_fuzz``: one record a reader, as ``tests/fleet/test_fuzz_readers.py`` writes them."""

    name: ClassVar = "reader_fuzz"
    figures: ClassVar = ()
    sources: ClassVar = ("fleet", "errors.py", "files.py")
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(Search)

    def check(self, records: Sequence[Search], path: Any) -> None:
        readers = [record.reader for record in records]
        if len(set(readers)) != len(readers):
            raise InputError("states a reader twice", path=path)

    def summarise(self, records: Sequence[Search], fleet: str) -> Summary:
        summary: Summary = {
            "seconds": sum(record.seconds for record in records),
            "cpu_s": sum(record.cpu_s for record in records),
            "inputs": sum(record.taken + record.refused + record.failed for record in records),
            "failed": sum(record.failed for record in records),
            "kept": sum(record.kept for record in records),
        }
        for record in records:
            for key in ("seconds", "cpu_s", "taken", "refused", "slowest_s", "lines", "kept"):
                summary[f"{record.reader}.{key}"] = getattr(record, key)
        return summary

    def claims(self, records: Sequence[Search]) -> list[Claim]:
        seconds = sum(record.seconds for record in records)
        return [
            at_most("inputs that failed", sum(record.failed for record in records), 0),
            at_most("seconds of the slowest input", max(r.slowest_s for r in records), MAX_INPUT_SECONDS),
            at_most("seconds short of ten minutes", max(0.0, MIN_SECONDS - seconds), 0),
        ]

    def adapters(self, records: Sequence[Search]) -> list[str]:
        return []
