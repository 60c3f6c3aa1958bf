"""Arms of a serving experiment: which weights an engine serves, by whose kernels, with room for how many adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from loraforge.errors import UsageError

Weights = Literal["original", "uniform", "spectral"]
Execution = Literal["native", "loraforge"]

BASE_ONLY = "base_only"


@dataclass(frozen=True)
class Arm:
    """One arm. weights, execution: None for the base model alone. full: room for every adapter at once, whatever the
    fleet's budget is (paper Fig 8)."""

    weights: Weights | None
    execution: Execution | None
    full: bool = False

    @classmethod
    def parse(cls, name: str) -> Arm:
        """The arm of a name: ``base_only``, or weights, execution and perhaps ``full``, as ``spectral_loraforge`` or
        ``original_native_full``. Raises UsageError for another one."""
        for arm in _ARMS:
            if arm.name == name:
                return arm
        raise UsageError(
            f"{name!r} is no arm",
            remedy=f"write {BASE_ONLY}, or {{original|uniform|spectral}}_{{native|loraforge}}[_full]",
        )

    @property
    def name(self) -> str:
        """What :meth:`parse` takes."""
        if self.weights is None:
            return BASE_ONLY
        return f"{self.weights}_{self.execution}" + ("_full" if self.full else "")

    def __str__(self) -> str:
        return self.name


_ARMS = (
    Arm(None, None),
    *(
        Arm(weights, execution, full)
        for weights in get_args(Weights)
        for execution in get_args(Execution)
        for full in (False, True)
    ),
)
