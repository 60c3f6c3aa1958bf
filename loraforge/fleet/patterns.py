"""Regular expressions that a stranger wrote, matched against module names in bounded time.

``adapter_config.json`` holds regular expressions, and Python's matcher backtracks: one that repeats a repetition takes
exponential time on a name that nearly matches. Such expressions are refused; no trainer needs them.
"""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from loraforge.errors import InputError

MAX_LENGTH = 20_000  # some tools list every module of a model in one expression
MAX_REPEATS = 6  # open-ended ones in a row: each is another power of a name's length
_OPEN_END = 64  # repetitions that count as open-ended

_parser: Any = importlib.import_module("re._parser")  # no other way to see how an expression is built


def matches(pattern: str, text: str, path: Path, key: str) -> bool:
    """Whether the whole ``text`` matches.

    Raises InputError, naming the file and the key, where ``pattern`` is no regular expression or a dangerous one.
    """
    try:
        return _compiled(pattern).fullmatch(text) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(
            f"{pattern[:200]!r} is not a regular expression ({error})", path=path, key=key
        ) from error
    except _DangerousError as error:
        raise InputError(
            f"{pattern[:200]!r} {error}", path=path, key=key, remedy="list the module names instead"
        ) from error


class _DangerousError(Exception):
    pass


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > MAX_LENGTH:
        raise _DangerousError(f"has more than {MAX_LENGTH} characters")
    if _open_repeats(_parser.parse(pattern)) > MAX_REPEATS:
        raise _DangerousError("repeats too often to be matched in bounded time")
    return re.compile(pattern)


def _open_repeats(tree: Any) -> int:
    """Open-ended repetitions that one match may go through in a row; one inside another counts as too many."""
    total = 0
    for operation, argument in tree:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, inner = argument
            found = _open_repeats(inner)
            if most >= _OPEN_END:
                found = MAX_REPEATS + 1 if found or _branches(inner) else 1
            total += found
        elif name == "BRANCH":
            total += max(_open_repeats(branch) for branch in argument[1])
        elif name == "SUBPATTERN":
            total += _open_repeats(argument[-1])
        elif name in ("ASSERT", "ASSERT_NOT"):
            total += _open_repeats(argument[1])
        elif name == "ATOMIC_GROUP":
            total += _open_repeats(argument)
        elif name == "GROUPREF_EXISTS":
            total += max(_open_repeats(branch) for branch in argument[1:] if branch is not None)
    return total


def _branches(tree: Any) -> bool:
    """Whether something repeated can be matched in several ways: alternatives that begin alike, say."""
    return any(
        str(operation) == "BRANCH" or (str(operation) == "SUBPATTERN" and _branches(argument[-1]))
        for operation, argument in tree
    )
