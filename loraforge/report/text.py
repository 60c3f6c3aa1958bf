"""Strangers' words in a page: as text that is shown, whatever they hold, and never as markup or script."""

from __future__ import annotations

import base64
import json
from html import escape
from typing import Any

from numpy.typing import NDArray

from loraforge.errors import one_line


def shown(text: str) -> str:
    """``text`` for the inside of an element or of a quoted attribute."""
    return escape(one_line(text), quote=True)


def name(text: str) -> str:
    """``text`` as an element that keeps its direction from what is around it."""
    return f"<bdi>{shown(text)}</bdi>"


def data_block(value: Any) -> str:
    """JSON for the inside of a script element that is not run: ASCII, and nothing that could end the element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def packed(values: NDArray[Any]) -> dict[str, str]:
    """A column of numbers: its little-endian type (``u1``, ``u2``, ``u4`` or ``f4``) and its bytes in base64.

    Integers take the narrowest type that holds them all. Raises ValueError for one beyond 32 bits.
    """
    if values.dtype.kind in "iu":
        most = int(values.max(initial=0))
        if most >= 1 << 32 or int(values.min(initial=0)) < 0:
            raise ValueError("a count beyond 32 bits")
        kind = "u1" if most < 1 << 8 else "u2" if most < 1 << 16 else "u4"
    else:
        kind = "f4"
    return {"type": kind, "data": base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()}
