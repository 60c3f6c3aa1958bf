"""YAML that a stranger wrote: parsed only where it is small, shallow and unambiguous.

A few bytes of aliases stand for gigabytes, of brackets for thousands of frames; of two equal keys the last counts
silently, and another reader may take the first.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from loraforge.errors import InputError
from loraforge.fleet.untrusted_json import shown

MAX_BYTES = 4 << 20
MAX_DEPTH = 32
_BRACKET = re.compile(rb"[\[{]|([\]}])")


def read_untrusted_yaml(path: Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """Parse a YAML file of at most ``max_bytes``.

    Raises InputError for what is no YAML of plain values, and for aliases, keys that are given twice in one mapping,
    and brackets within brackets deeper than :data:`MAX_DEPTH`.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(max_bytes + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    if len(data) > max_bytes:
        raise InputError(f"is larger than {max_bytes} bytes, the most that is read as YAML", path=path)
    if _deepest(data) > MAX_DEPTH:
        raise InputError(f"is nested deeper than {MAX_DEPTH} levels", path=path)
    try:
        return yaml.load(text, _Plain)
    except (
        yaml.YAMLError,
        RecursionError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:  # the last two: of an !!int, a !!bool or a !!timestamp of none
        said = shown(" ".join(str(error).split()))
        raise InputError(f"not valid YAML ({said})", path=path) from error


def _deepest(data: bytes) -> int:
    """Most brackets that are open at once, those in quotes and comments too."""
    depth = deepest = 0
    for bracket in _BRACKET.finditer(data):
        depth = max(0, depth - 1) if bracket[1] else depth + 1
        deepest = max(deepest, depth)
    return deepest


class _Plain(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*) are not read")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(set(map(str, keys))) != len(keys):
            raise yaml.YAMLError("a key is given twice in one mapping")
        return super().construct_mapping(node, deep=deep)
