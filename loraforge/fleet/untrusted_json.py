"""JSON that a stranger wrote: parsed only where it is small, shallow and unambiguous.

Python's own parser takes NaN, Infinity and numbers that overflow to it, and of two equal keys silently the last, which
another reader may not; a few bytes of brackets cost it thousands of frames.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from loraforge.errors import InputError
from loraforge.files import half_character

MAX_BYTES = 8 << 20  # a configuration that names every expert of a large model has 3 MB
MAX_DEPTH = 32
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def read_untrusted_json(path: Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """Parse a JSON file of at most ``max_bytes``.

    Raises InputError, before the file is read where that suffices, for whatever :func:`parse_untrusted_json` refuses.
    """
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data = stream.read(size) if size <= max_bytes else None
    except FileNotFoundError as error:
        raise InputError("file not found", path=path) from error
    except OSError as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    if data is None:
        raise InputError(f"is larger than {max_bytes} bytes, the most that is read as JSON", path=path)
    return parse_untrusted_json(data, path)


def parse_untrusted_json(data: bytes, path: Path) -> Any:
    """Parse UTF-8 JSON that came from ``path``.

    Raises InputError for what is no JSON, for nesting deeper than :data:`MAX_DEPTH`, a key given twice in one object,
    NaN, infinity and numbers that no double holds, and half characters (lone surrogates).
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON at line {error.lineno}: {error.msg}", path=path) from error
    except _RefusedError as error:
        raise InputError(error.problem, path=path, key=error.key, remedy="save it with PEFT again") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # an integer of thousands of digits, nesting of thousands of levels
        raise InputError(f"not JSON that can be read ({error})", path=path) from error
    _check_depth(value, path)
    if _ESCAPED_HALF.search(data) and (key := half_character(value)) is not None:
        raise InputError(
            "holds half a character (a lone surrogate)",
            path=path,
            key=shown(key) or None,
            remedy="write that text anew",
        )
    return value


def shown(text: str) -> str:
    """The beginning of a stranger's text as an error may show it: on one line, without commands to a terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[:200]
    )


class _RefusedError(Exception):
    def __init__(self, problem: str, key: str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.key = problem, key


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _RefusedError("is given twice in one object", shown(twice))
    return value


def _no_constant(text: str) -> Any:
    raise _RefusedError(f"holds {text}, which is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _RefusedError(f"holds the number {text[:40]}, which no double holds")
    return value


def _check_depth(value: Any, path: Path) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise InputError(f"is nested deeper than {MAX_DEPTH} levels", path=path)
