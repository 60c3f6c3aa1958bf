"""Which kernel runs, as plain data: what a dispatch table stores and what a custom op takes as a list of ints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from loraforge.errors import LoraForgeError

BACKENDS = (
    "reference",
    "cpu",
    "direct",
    "row_expand",
    "fused",
    "triton",
    "native",
)  # code = place in this list

# op -> backend -> the integers that the kernel takes, in their order, and their defaults (0: its own default)
OPTIONS: dict[str, dict[str, dict[str, int]]] = {
    "shrink": {
        "reference": {},
        "cpu": {},
        "direct": {"variant": 0},
        "triton": dict.fromkeys(
            ("block_m", "narrow", "block_n", "block_k", "columns", "warps", "stages", "registers", "early"), 0
        ),
    },
    "expand": {
        "reference": {},
        "cpu": {},
        "row_expand": {"tile_limit": 16, "staged": 1, "variant": 0},
        "triton": dict.fromkeys(("block_m", "block_n", "blocks", "warps", "registers", "early"), 0),
    },
    "lora": {"fused": {"variant": 0}, "cpu": {}},
    "native": {"native": {}},
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of one op: its backend (one of BACKENDS) and the integers that select a tile configuration."""

    backend: str
    options: Mapping[str, int] = field(default_factory=dict)

    def codes(self, op: str) -> list[int]:
        """The backend's code, then every option of ``op`` in its declared order.

        Raises LoraForgeError for a backend or an option that the op does not have.
        """
        known = OPTIONS[op].get(self.backend)
        if known is None:
            raise LoraForgeError(
                f"no backend {self.backend!r}", key=op, remedy=f"take one of {', '.join(OPTIONS[op])}"
            )
        if strange := sorted(set(self.options) - set(known)):
            raise LoraForgeError(
                f"no option {strange[0]!r}",
                key=f"{op}.{self.backend}",
                remedy=f"take one of {', '.join(known) or 'none'}",
            )
        return [
            BACKENDS.index(self.backend),
            *(self.options.get(name, value) for name, value in known.items()),
        ]


@dataclass(frozen=True)
class Choice:
    """How one projection's update is computed: a shrink and an expand, or one kernel for both.

    shrink: kernel of the first product; where ``expand`` is None, a kernel of op ``lora`` that does both, or
        ``native``: the engine's own path, which the ops of this package do not run.
    tile: rows of the plan's segments (16 decode, 64 or 128 prefill). planes: split-K partial sums in Z.
    """

    shrink: Kernel
    expand: Kernel | None = None
    tile: int = 16
    planes: int = 1

    def __post_init__(self) -> None:
        if self.tile < 1 or self.planes < 1:
            raise LoraForgeError(
                f"tile {self.tile}, planes {self.planes}", key="choice", remedy="give positive numbers"
            )
        self.codes  # noqa: B018  a choice that names no kernel is refused here, not at its first use

    @property
    def native(self) -> bool:
        """Whether the engine's own path is chosen."""
        return self.shrink.backend == "native"

    @cached_property
    def codes(self) -> tuple[list[int], list[int]]:
        """The two lists of ints that the op ``lora`` takes: shrink and expand, or one kernel and nothing."""
        if self.expand is None:
            return self.shrink.codes("native" if self.native else "lora"), []
        return self.shrink.codes("shrink"), self.expand.codes("expand")

    def to_json(self) -> dict[str, Any]:
        """Plain values, defaults left out; :meth:`from_json` reads them back."""
        return {
            "shrink": {"backend": self.shrink.backend, **self.shrink.options},
            "expand": None
            if self.expand is None
            else {"backend": self.expand.backend, **self.expand.options},
            "tile": self.tile,
            "planes": self.planes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Choice:
        """Read what :meth:`to_json` wrote. Raises LoraForgeError where it names no kernel."""
        return cls(
            _kernel(value["shrink"]),
            None if value.get("expand") is None else _kernel(value["expand"]),
            int(value.get("tile", 16)),
            int(value.get("planes", 1)),
        )


NATIVE = Choice(Kernel("native"))
REFERENCE = Choice(Kernel("reference"), Kernel("reference"))


def _kernel(value: Mapping[str, Any]) -> Kernel:
    options = {name: int(number) for name, number in value.items() if name != "backend"}
    return Kernel(str(value["backend"]), options)
