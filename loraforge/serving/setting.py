"""Whether two folders of records are of one experiment."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import ValidationError

from loraforge.serving.experiment import Experiment
from loraforge.serving.points import SettingRecord


class Difference(NamedTuple):
    """What differs first between two settings. one, other: its values, made short to be told."""

    key: str
    one: str
    other: str


def difference(one: SettingRecord, other: SettingRecord) -> Difference | None:
    """What differs between two settings, or the kinds of machine that they are of; None where nothing does."""
    for key in SettingRecord.model_fields:
        first, second = getattr(one, key), getattr(other, key)
        if key == "host":
            first, second = first.device(one.protocol), second.device(other.protocol)
        elif key == "config":
            first, second = _completed(first), _completed(second)
        if first != second:
            while isinstance(first, dict) and isinstance(second, dict):
                inner = next(
                    part for part in {**first, **second} if first.get(part, ...) != second.get(part, ...)
                )
                key, first, second = f"{key}.{inner}", first.get(inner), second.get(inner)
            return Difference(key, _short(first), _short(second))
    return None


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """An experiment as it would be recorded today: what could not be declared then has its default."""
    try:
        return Experiment.model_validate(config).model_dump(mode="json", exclude={"python"})
    except ValidationError:  # what cannot be declared any more differs
        return config


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
