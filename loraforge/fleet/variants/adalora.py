"""AdaLoRA (arXiv:2303.10512): dW = alpha / (r + 1e-5) B diag(E) A, with directions that training has masked by E = 0.

E folds into A, and a masked direction is none: what is left is LoRA of the rank that training has kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from loraforge.fleet.modules import Get, LoraModule
from loraforge.fleet.variants.source import Source

_PARTS = re.compile(r"(?P<module>.+)\.(?P<part>lora_[ABE])")


@dataclass(frozen=True)
class AdaLoraBuild:
    """diag(E) A [rank, d_in] and B [d_out, rank] of the ``live`` directions."""

    a: str
    e: str
    b: str
    live: tuple[int, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return self.a, self.e, self.b

    def factors(self, get: Get) -> tuple[Tensor, Tensor]:
        live = list(self.live)
        e = get(self.e).double().reshape(-1, 1)[live]
        return e * get(self.a).double()[live], get(self.b).double()[:, live]


def adalora_modules(source: Source, get: Get) -> list[LoraModule]:
    """Every module of an AdaLoRA adapter; its vectors E are read. Raises InputError for what does not fit together."""
    modules: list[LoraModule] = []
    for name, parts in source.groups(_PARTS).items():
        a, e, b = (source.part(name, parts, part) for part in ("lora_A", "lora_E", "lora_B"))
        rank, d_in = source.matrix(a)
        d_out, b_rank = source.matrix(b)
        if not rank == b_rank == source.vector(e):
            raise source.error(f"lora_A, lora_E and lora_B of module {name} disagree in rank", a)
        kept = [index for index, value in enumerate(get(e.stored).flatten().tolist()) if value != 0.0]
        live = tuple(kept or [0])  # all masked: a zero update of rank one
        build = AdaLoraBuild(a.stored, e.stored, b.stored, live)
        shape = (len(live), d_in, d_out)
        modules.append(source.converted(name, build, parts, shape, source.config.scale(name)))
    return modules
