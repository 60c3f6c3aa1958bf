"""Tables as CSV: the numbers a figure draws, in a form that people and auditors can both read.

A value is a string, an integer, a float (shortest text that reads back to the same bits) or nothing (an empty
cell). Columns of ``TEXT`` hold strings and the others numbers, so that a budget of ``1`` or an adapter called ``7``
reads back as the text it is.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from loraforge.errors import InputError

Value = str | int | float | None
Row = dict[str, Value]
Table = list[Row]

TEXT = frozenset(
    {
        *(
            "adapter",
            "arm",
            "budget",
            "cache",
            "kind",
            "method",
            "metric",
            "model",
            "module",
            "name",
            "panel",
        ),
        *("phase", "policy", "projection"),
    }
)

# Recomputation on another machine may sum in another order; anything above this is a different number.
RELATIVE_TOLERANCE = 1e-9
ABSOLUTE_TOLERANCE = 1e-12


def to_csv(rows: Sequence[Row]) -> str:
    """CSV text with a header, one line a row. All rows must have the columns of the first, in its order."""
    out = io.StringIO()
    columns = list(rows[0]) if rows else []
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        if list(row) != columns:
            raise ValueError(f"columns {list(row)} differ from the header {columns}")
        writer.writerow([_cell(name, row[name]) for name in columns])
    return out.getvalue()


def from_csv(text: str, path: str | Path) -> Table:
    """Parse what :func:`to_csv` wrote. Raises InputError that names the file and the line."""
    lines = list(csv.reader(io.StringIO(text)))
    if not lines:
        raise InputError("has no header line", path=path)
    header, *body = lines
    table: Table = []
    for number, cells in enumerate(body, start=2):
        if len(cells) != len(header):
            raise InputError(
                f"line {number} has {len(cells)} cells where the header has {len(header)}", path=path
            )
        table.append({name: _value(name, cell) for name, cell in zip(header, cells, strict=True)})
    return table


def read_csv(path: Path) -> Table:
    """Read a CSV file of :func:`to_csv`. Raises InputError where it cannot be read or parsed."""
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    try:
        return from_csv(text, path)
    except csv.Error as error:
        raise InputError(f"not valid CSV ({error})", path=path) from error


def same(left: object, right: object) -> bool:
    """Equal, where floats may differ by rounding (relative 1e-9)."""
    numbers = (int, float)
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, numbers) and isinstance(right, numbers):
        return math.isclose(left, right, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    return left == right


def first_difference(stated: Sequence[Row], recomputed: Sequence[Row]) -> str | None:
    """Words on the first cell where two tables differ, or None where they agree."""
    if stated and recomputed and list(stated[0]) != list(recomputed[0]):
        return f"columns are {', '.join(stated[0])}, the records give {', '.join(recomputed[0])}"
    for number, (old, new) in enumerate(zip(stated, recomputed, strict=False), start=2):
        for name, value in old.items():
            if not same(value, new[name]):
                return f"line {number}, {name}: says {_show(value)}, the records give {_show(new[name])}"
    if len(stated) != len(recomputed):
        return f"has {len(stated)} rows, the records give {len(recomputed)}"
    return None


def _cell(name: str, value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, str) != (name in TEXT) or value == "":
        raise ValueError(f"{value!r} does not belong in column {name}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot stand in a table")
        return repr(float(value))
    return str(value)


def _value(name: str, cell: str) -> Value:
    if cell == "":
        return None
    if name in TEXT:
        return cell
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def _show(value: Value) -> str:
    return "nothing" if value is None else f"{value!r}" if isinstance(value, str) else f"{value:.12g}"
