"""Regular expressions that a stranger wrote, matched against module names in bounded time.

``adapter_config.json`` holds regular expressions, and Python's matcher backtracks: one that repeats what can itself
match in several ways takes exponential time on a name that nearly matches, and each further open-ended repetition is
another power of the name's length. What could take too many steps is refused before it is tried; no trainer needs it.
"""

from __future__ import annotations

import importlib
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from loraforge.errors import InputError

MAX_LENGTH = 20_000  # some tools list every module of a model in one expression
MAX_PATTERNS = 4096  # of one option: each is tried on every module
MAX_STEPS = 50_000_000  # about a second
_OPEN_END = 8  # choices of a repetition that count as open-ended
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")

_parser: Any = importlib.import_module("re._parser")  # no other way to see how an expression is built


def matches(pattern: str, text: str, path: Path, key: str) -> bool:
    """Whether the whole ``text`` matches.

    Raises InputError, naming the file and the key, where ``pattern`` is no regular expression, or could take more than
    :data:`MAX_STEPS` to say no.
    """
    try:
        compiled, (opens, bits) = _compiled(pattern)
        if math.comb(len(text) + opens, opens) * 2.0**bits > MAX_STEPS:
            raise _TooManyStepsError
        return compiled.fullmatch(text) is not None
    except (re.error, RecursionError) as error:
        raise InputError(
            f"{pattern[:200]!r} is not a regular expression ({error})", path=path, key=key
        ) from error
    except (_TooManyStepsError, OverflowError) as error:
        raise InputError(
            f"{pattern[:200]!r} repeats too often to be matched in bounded time",
            path=path,
            key=key,
            remedy="list the module names instead",
        ) from error


class _TooManyStepsError(Exception):
    pass


# open-ended repetitions in a row, and the logarithm (base 2) of the ways in which the rest can match
_Cost = tuple[int, float]


@lru_cache(maxsize=2 * MAX_PATTERNS)
def _compiled(pattern: str) -> tuple[re.Pattern[str], _Cost]:
    if len(pattern) > MAX_LENGTH:
        raise _TooManyStepsError
    return re.compile(pattern), _cost(_parser.parse(pattern))


def _cost(tree: Any) -> _Cost:
    opens, bits = 0, 0.0
    for operation, argument in tree:
        name = str(operation)
        if name in _REPEATS:
            more = _repeated(*argument)
        elif name == "BRANCH":
            more = _alternatives(argument[1])
        elif name == "SUBPATTERN":
            more = _cost(argument[-1])
        elif name in ("ASSERT", "ASSERT_NOT"):
            more = _cost(argument[1])
        elif name == "ATOMIC_GROUP":
            more = _cost(argument)
        elif name == "GROUPREF_EXISTS":
            more = _alternatives([branch for branch in argument[1:] if branch is not None])
        else:
            continue
        opens, bits = opens + more[0], bits + more[1]
    return opens, bits


def _repeated(least: int, most: int, tree: Any) -> _Cost:
    opens, bits = _cost(tree)
    if least == most:
        return opens * int(most), bits * int(most)
    if most == 1:
        return opens, bits + 1
    if opens or bits:
        raise _TooManyStepsError
    choices = int(most) - least + 1
    return (1, 0.0) if choices >= _OPEN_END else (0, math.log2(choices))


def _alternatives(branches: list[Any]) -> _Cost:
    """Alternatives that begin with different characters exclude each other; the parser has taken out what is common."""
    costs = [_cost(branch) for branch in branches]
    heads = [
        str(branch[0]) if len(branch) and str(branch[0][0]) == "LITERAL" else None for branch in branches
    ]
    known = [head for head in heads if head is not None]
    alike = len(branches) - len(set(known))
    return max(opens for opens, _ in costs), max(bits for _, bits in costs) + math.log2(1 + alike)
