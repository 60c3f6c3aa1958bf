"""What a shell offers for the values of options. Paths need nothing here: the shell completes those itself."""

from __future__ import annotations

from typing import get_args


def policies() -> list[str]:
    """Names that ``--policy`` takes."""
    from loraforge.config import Policy

    return [*get_args(Policy)]


def budgets() -> list[str]:
    """Fractions that are asked for often; any other is taken too."""
    return ["1/2", "1/4", "1/8", "1/12", "1/16"]


def layouts() -> list[str]:
    """Names that ``--layout`` takes."""
    from loraforge.config import Layout

    return [*get_args(Layout), "both"]


def dtypes() -> list[str]:
    """Names that ``--dtype`` takes."""
    from loraforge.export.options import DTYPES

    return [*DTYPES]
