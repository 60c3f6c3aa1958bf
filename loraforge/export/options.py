"""Option texts of ``compress`` and ``export``; no torch, so that a misspelt one is refused at once."""

from __future__ import annotations

from typing import TypeVar, get_args

from loraforge.config import Keep, Layout, Method, Policy
from loraforge.errors import UsageError

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
# name -> bytes a parameter; None for each module's own
DTYPES: dict[str, int | None] = {"bfloat16": 2, "float16": 2, "float32": 4, "source": None}

T = TypeVar("T", bound=str)


def choose(option: str, text: str, choices: tuple[T, ...], *, also: tuple[str, ...] = ()) -> T:
    """``text`` as one of ``choices``. Raises UsageError, which names them and ``also``, for another."""
    for choice in choices:
        if choice == text:
            return choice
    raise UsageError(
        f"unknown {option} {text!r}", key=f"--{option}", remedy=f"choose from {', '.join((*choices, *also))}"
    )


def parse_policy(text: str) -> Policy:
    """The policy named by ``text``. Raises UsageError for an unknown one."""
    return choose("policy", text, get_args(Policy))


def parse_layouts(text: str) -> tuple[Layout, ...]:
    """The layout named by ``text``, or all for ``both``. Raises UsageError for an unknown one."""
    return LAYOUTS if text == "both" else (choose("layout", text, LAYOUTS, also=("both",)),)


def parse_dtype(text: str) -> str:
    """``text`` if it is a key of :data:`DTYPES`. Raises UsageError for an unknown one."""
    return choose("dtype", text, tuple(DTYPES))


def parse_method(text: str) -> Method:
    """The factor method named by ``text``. Raises UsageError for an unknown one."""
    return choose("method", text, get_args(Method))


def parse_keep(text: str) -> Keep:
    """What is kept of factorised adapters. Raises UsageError for an unknown word."""
    return choose("keep", text, get_args(Keep))
