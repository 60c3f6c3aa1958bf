"""What a user may ask of a policy besides its name and a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from loraforge.allocate.costs import CostModel, bucketed_bytes, load_microseconds
from loraforge.errors import BudgetError, InputError, UsageError
from loraforge.files import read_json


@dataclass(frozen=True)
class Options:
    """What narrows or weighs the choice of the policies that choose (all but ``uniform`` and those with a threshold).

    Parameters
    ----------
    k_max: cap on every rank.
    adapter_floor: least share of its own uniform cost that an adapter gets, 0 to 1.
    adapter_ceiling: most that an adapter gets, as a multiple of its uniform cost, at least 1.
    traffic: share of requests by adapter; weighs the energy of objectives that add energies up.
    fused: equal ranks for projections of one adapter that an engine runs as one.
    cost: a second ceiling besides parameters; see :mod:`loraforge.allocate.costs`.
    """

    k_max: int | None = None
    adapter_floor: Fraction | None = None
    adapter_ceiling: Fraction | None = None
    traffic: Mapping[str, float] | None = None
    fused: bool = False
    cost: CostModel | None = None


DEFAULTS = Options()


def load_traffic(path: Path) -> dict[str, float]:
    """Shares of requests by adapter, a JSON object; they need not add up to one. Raises InputError."""
    value = read_json(path)
    try:
        shares = {str(name): float(share) for name, share in value.items()}
        usable = bool(shares) and np.isfinite(list(shares.values())).all() and min(shares.values()) >= 0
    except (AttributeError, TypeError, ValueError):
        usable = False
    if not usable or not any(shares.values()):
        raise InputError("not a table of traffic", path=path, remedy='write {"adapter": share, ...}')
    return shares


def parse_cost(text: str, bytes_per_parameter: int) -> CostModel | None:
    """``parameters`` (None), ``bytes:8,16,32`` for ranks padded to these, or a JSON file of microseconds.

    Raises UsageError for what is none of these, InputError for a file that is no table of times.
    """
    if text == "parameters":
        return None
    kind, _, rest = text.partition(":")
    if kind == "bytes":
        try:
            return bucketed_bytes([int(part) for part in rest.split(",")], bytes_per_parameter)
        except ValueError as error:
            raise UsageError(
                f"{rest!r} is no list of ranks", key="--cost", remedy="write bytes:8,16,32,64"
            ) from error
    if text.endswith(".json"):
        return load_microseconds(Path(text))
    raise UsageError(
        f"unknown cost {text!r}",
        key="--cost",
        remedy="choose parameters, bytes:8,16,32 or a JSON file of times",
    )


def parse_share(text: str, option: str) -> Fraction:
    """A non-negative number such as 1/2 or 1.5. Raises BudgetError that names ``option``."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise BudgetError(f"{text!r} is not a number", key=option, remedy="write 1/2 or 1.5") from error
    return value
