"""Budgets: a fraction of the nominal ranks, a number of parameters, or a number of bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from loraforge.allocate.problem import Ints
from loraforge.allocate.uniform import largest_fraction, uniform
from loraforge.errors import BudgetError, UsageError


@dataclass(frozen=True)
class Budget:
    """A budget as it was asked for. ``value`` is its text; ``amount`` is the number it means."""

    kind: Literal["fraction", "params", "bytes"]
    value: str
    amount: Fraction

    def __str__(self) -> str:
        return self.value if self.kind == "fraction" else f"{self.value} {self.kind}"


@dataclass(frozen=True)
class Ceiling:
    """What a budget means for one fleet.

    Parameters
    ----------
    params: most compact parameters that the fleet may have.
    fraction: the common fraction of nominal rank behind ``uniform``.
    uniform: int64 [M], uniform ranks at that fraction; the rank floor derives from them.
    """

    params: int
    fraction: Fraction
    uniform: Ints


def parse_budget(
    fraction: str | None = None, *, params: int | None = None, bytes_: int | None = None
) -> Budget:
    """Make a budget of ``"1/12"`` or ``"0.25"``, of a parameter count, or of a byte count.

    Raises UsageError unless exactly one is given, BudgetError for one that is not a positive number, or a
    fraction above 1.
    """
    if sum(given is not None for given in (fraction, params, bytes_)) != 1:
        raise UsageError("one budget is needed", remedy="pass one of --budget, --params and --bytes")
    if fraction is not None:
        return Budget("fraction", fraction.strip(), _fraction(fraction.strip()))
    kind: Literal["params", "bytes"] = "params" if params is not None else "bytes"
    amount = params if params is not None else bytes_
    if amount is None or amount <= 0:
        raise BudgetError(f"{amount} is not a budget", key=f"--{kind}", remedy="pass a positive number")
    return Budget(kind, str(amount), Fraction(amount))


def ceiling(budget: Budget, rank: Ints, cost: Ints, *, bytes_per_parameter: int = 2) -> Ceiling:
    """Apply a budget to modules of nominal ``rank`` and direction ``cost`` (both int64 [M]).

    A fraction 1/d means its uniform cost C(d). Parameters and bytes are ceilings themselves, with the largest
    common fraction whose uniform cost fits under them. ``bytes_per_parameter`` is that of the exported tensors.
    Raises BudgetError where rank 1 in every module already costs more; it names the least that would do.
    """
    if budget.kind == "fraction":
        kept = uniform(rank, budget.amount)
        return Ceiling(int(kept @ cost), budget.amount, kept)
    unit = bytes_per_parameter if budget.kind == "bytes" else 1
    params = int(budget.amount) // unit
    fraction = largest_fraction(rank, cost, params)
    if fraction is None:
        least = int(cost.sum()) * unit
        raise BudgetError(
            f"{budget.value} {budget.kind} is below the rank floor: rank 1 in all {len(rank)} modules takes {least}",
            key=f"--{budget.kind}",
            remedy=f"allow at least {least} {budget.kind}",
        )
    return Ceiling(params, fraction, uniform(rank, fraction))


def floor_warning(budget: Budget, limit: Ceiling, rank: Ints, cost: Ints) -> str | None:
    """One line where the floor of one direction a module keeps over 10 % more than the fraction asked for.

    C(d) = sum of max(1, floor(r d)) c exceeds d sum of r c only by that floor; parameters and bytes are ceilings
    that hold. ``limit`` is that of ``budget`` for these modules (int64 [M] both).
    """
    whole = int(rank @ cost)
    asked = budget.amount * whole
    if budget.kind != "fraction" or limit.params * 10 <= asked * 11:
        return None
    return (
        f"warning: --budget {budget.value} of {whole:,} parameters is {int(asked):,} ({float(budget.amount):.2%}), but "
        f"one direction in each module is the least: up to {limit.params:,} ({limit.params / whole:.2%}) are kept"
    )


def _fraction(text: str) -> Fraction:
    try:
        if re.search(r"[eE][-+]?[\d_]{5}", text):  # a number of so many digits would be made of it
            raise ValueError("an exponent of five digits")
        value = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise BudgetError(
            f"{text!r} is not a number", key="--budget", remedy="write a fraction such as 1/12 or 0.25"
        ) from error
    if not 0 < value <= 1:
        raise BudgetError(
            f"{text} is not above 0 and at most 1",
            key="--budget",
            remedy="write a fraction such as 1/12, or pass --params or --bytes",
        )
    return value
