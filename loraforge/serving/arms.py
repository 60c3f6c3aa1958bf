"""Arms of a serving experiment: which weights an engine serves, by whose kernels, with room for how many adapters."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from loraforge.errors import UsageError

Weights = Literal["original", "uniform", "spectral"]
Execution = Literal["native", "loraforge"]

BASE_ONLY = "base_only"
_NAME = re.compile(
    rf"(?P<weights>{'|'.join(get_args(Weights))})_(?P<execution>{'|'.join(get_args(Execution))})"
    r"(?P<full>_full)?(?:_x(?P<copies>[2-9]|[1-9]\d{1,3}))?"
)


@dataclass(frozen=True)
class Arm:
    """One arm. weights, execution: None for the base model alone. full: room for every adapter at once, whatever the
    fleet's budget is (paper Fig 8). copies: names under which each adapter is loaded, each taking room of its own."""

    weights: Weights | None
    execution: Execution | None
    full: bool = False
    copies: int = 1

    @classmethod
    def parse(cls, name: str) -> Arm:
        """The arm of a name: ``base_only``, or weights, execution and perhaps ``full`` and copies, as
        ``spectral_loraforge``, ``original_native_full`` or ``spectral_loraforge_x10``. Raises UsageError for another
        one."""
        if name == BASE_ONLY:
            return cls(None, None)
        if (match := _NAME.fullmatch(name)) is None:
            raise UsageError(
                f"{name!r} is no arm",
                remedy=f"write {BASE_ONLY}, or {{original|uniform|spectral}}_{{native|loraforge}}[_full][_xCOPIES]",
            )
        weights = next(kind for kind in get_args(Weights) if kind == match["weights"])
        execution = next(kind for kind in get_args(Execution) if kind == match["execution"])
        return cls(weights, execution, match["full"] is not None, int(match["copies"] or 1))

    @property
    def name(self) -> str:
        """What :meth:`parse` takes."""
        if self.weights is None:
            return BASE_ONLY
        copies = f"_x{self.copies}" if self.copies > 1 else ""
        return f"{self.weights}_{self.execution}" + ("_full" if self.full else "") + copies

    @property
    def limited(self) -> Arm:
        """The same arm with room for as many adapters as the budget pays for."""
        return replace(self, full=False)

    @property
    def single(self) -> Arm:
        """The same arm with one name an adapter."""
        return replace(self, copies=1)

    def __str__(self) -> str:
        return self.name
