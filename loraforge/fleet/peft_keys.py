"""The names of tensors in adapter files, by whatever trainer, brought to the one form in which PEFT saves them.

Trainers leave out PEFT's prefix, keep the adapter's name (``lora_A.default.weight``), or both. What is exported has
the prefix and no name, which every loader takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = "base_model.model."
_NAMED = re.compile(
    r"(?P<stem>.+\.(?:lora_[A-Z]|lora_embedding_[AB]|lora_magnitude_vector|modules_to_save|hada_\w+|lokr_\w+"
    r"|vera_\w+|trainable_tokens_delta))\.default(?P<leaf>\..+)?"
)
_WRAPPED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<leaf>[^.]+)")


@dataclass(frozen=True)
class Key:
    """One tensor: its key in the file, and the part of its canonical key that follows the prefix."""

    stored: str
    name: str

    @property
    def canonical(self) -> str:
        """As PEFT saves it."""
        return PREFIX + self.name


def parse_key(stored: str) -> Key:
    """Bring a stored key to PEFT's form: no prefix, no adapter name, no wrapper of a module saved whole."""
    name = stored.removeprefix(PREFIX)
    if ".default" in name and (found := _NAMED.fullmatch(name)):
        name = found["stem"] + (found["leaf"] or "")
    if ".modules_to_save." in name and (found := _WRAPPED.fullmatch(name)):
        name = f"{found['module']}.{found['leaf']}"
    return Key(stored, name)
