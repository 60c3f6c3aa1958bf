"""American to British spelling, from the word list of breame."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from loraforge.errors import InputError
from loraforge.quality.builders.common import Example, TaskSpec, prompt_of
from loraforge.quality.builders.sources import Source

_STEM = 6  # characters: inflections of a word ("bowdlerize", "bowdlerized") share them and so one split


def _us_to_uk(folders: Mapping[str, Path]) -> Iterator[Example]:
    path = folders["breame"] / "breame-0.1.2/breame/data/spelling_constants.py"
    for american, british in _dictionary(path, "AMERICAN_ENGLISH_SPELLINGS").items():
        if _inflection(american) != _inflection(british):  # the list has a few rows shifted by one
            continue
        prompt = prompt_of("Write the British spelling.", ("American", american), answer="British")
        yield Example(prompt, british, american[:_STEM])


def _inflection(word: str) -> str:
    return next((ending for ending in ("ing", "ed", "s") if word.endswith(ending)), "")


def _dictionary(path: Path, name: str) -> dict[str, str]:
    """The literal dictionary assigned to ``name`` in a Python file, read without running the file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in node.targets
        ):
            value: dict[str, str] = ast.literal_eval(node.value)
            return value
    raise InputError(
        "has no such dictionary", path=path, key=name, remedy="pin the version this builder knows"
    )


SPECS = (
    TaskSpec(
        name="us_to_uk",
        family="rewriting",
        metric="exact_match",
        max_gen_toks=16,
        title="American to British spelling",
        sources=(
            Source(
                "pypi-sdist",
                "breame",
                "0.1.2",
                "b6a2cbb390743ab0d7551a4a2ad1bcb7f3126b2d0f5bfa14ae0b4ddb990d8fa6",
                "Apache-2.0",
                "breame-*/PKG-INFO",
            ),
        ),
        licence="Apache-2.0",
        attribution="breame's list of American and British spellings",
        examples=_us_to_uk,
    ),
)
