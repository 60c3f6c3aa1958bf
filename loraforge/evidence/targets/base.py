"""What every target has: strict records, claims that must hold, a summary and figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from loraforge.errors import InputError

R = TypeVar("R", bound=BaseModel)
Summary = dict[str, str | int | float]


class Record(BaseModel):
    """One line of records.jsonl. Unknown keys, wrong types, NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Claim(Record):
    """One line of validation.json: ``value`` is at most (or for counts, exactly) ``limit`` where ``passed``."""

    claim: str
    value: float
    limit: float
    passed: bool


def at_most(claim: str, value: float, limit: float) -> Claim:
    """The claim that ``value <= limit``."""
    return Claim(claim=claim, value=value, limit=limit, passed=value <= limit)


class Target(ABC, Generic[R]):
    """A kind of evidence. Subclasses set the class attributes and compute from records alone."""

    name: ClassVar[str]
    figures: ClassVar[tuple[str, ...]]
    sources: ClassVar[tuple[str, ...]]  # parts of the package (see loraforge.digest) that made the records
    record: ClassVar[TypeAdapter[Any]]

    def read(self, path: Path) -> list[R]:
        """Parse a JSON Lines file. Raises InputError that names the line and the key."""
        try:
            lines = Path(path).read_bytes().split(b"\n")
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})", path=path) from error
        records = self.parse(lines, path)
        self.check(records, path)
        return records

    def parse(self, lines: Iterable[bytes | str], path: str | Path) -> list[R]:
        """Parse JSON lines; blank ones are skipped. Raises InputError that names the line and the key."""
        records: list[R] = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                records.append(self.record.validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(str(part) for part in first["loc"])
                where = f"line {number}" + (f", {key}" if key else "")
                raise InputError(f"{where}: {first['msg']}", path=path) from error
        if not records:
            raise InputError("holds no records", path=path)
        return records

    @abstractmethod
    def check(self, records: Sequence[R], path: str | Path) -> None:
        """Raise InputError where records contradict each other or a kind that the summary needs is absent."""

    @abstractmethod
    def summarise(self, records: Sequence[R], fleet: str) -> Summary:
        """Flat dotted keys to numbers; ``fleet`` names the fleet in keys that carry it."""

    @abstractmethod
    def claims(self, records: Sequence[R]) -> list[Claim]:
        """What must hold for the records to be evidence; stored as validation.json."""

    @abstractmethod
    def adapters(self, records: Sequence[R]) -> list[str]:
        """Names of the adapters that the records speak of, sorted; empty where they do not name them."""

    def inputs(self, records: Sequence[R]) -> dict[str, str]:
        """Inputs beside the fleet whose SHA-256 the records state, by name."""
        return {}

    def original_hashes(self, records: Sequence[R]) -> dict[str, str]:
        """SHA-256 of the original adapter weights by adapter, where the records state them."""
        return {}
