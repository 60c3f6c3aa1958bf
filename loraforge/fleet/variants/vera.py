"""VeRA (arXiv:2310.11454): dW = diag(b) B diag(d) A, with one random pair A, B for all modules, cut to each one's size.

Both vectors fold into the cut pair: LoRA of VeRA's rank, without a dense product. The file does not say how many inputs
a module has: the base model's own headers do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from loraforge.errors import InputError
from loraforge.fleet.modules import Get, LoraModule
from loraforge.fleet.tensor_header import read_header
from loraforge.fleet.variants.source import Source

_PARTS = re.compile(r"(?P<module>.+)\.(?P<part>vera_lambda_[bd])")
_SHARED = re.compile(r"(?P<module>base_model)\.(?P<part>vera_[AB])(?:\.default)?")


@dataclass(frozen=True)
class VeraBuild:
    """diag(d) A [rank, :d_in] and diag(b) B [:d_out, rank]."""

    a: str
    d: str
    b: str
    lambda_b: str
    d_in: int

    @property
    def keys(self) -> tuple[str, ...]:
        return self.d, self.a, self.b, self.lambda_b

    def factors(self, get: Get) -> tuple[Tensor, Tensor]:
        d, b = get(self.d).double().flatten(), get(self.lambda_b).double().flatten()
        a = d[:, None] * get(self.a).double()[:, : self.d_in]
        return a, b[:, None] * get(self.b).double()[: len(b)]


def vera_modules(source: Source) -> list[LoraModule]:
    """Every module of a VeRA adapter.

    Raises InputError where the projections were not saved with it, where the base model's folder is not known, or for
    what does not fit together.
    """
    shared = source.groups(_SHARED).get("base_model", {})
    if len(shared) != 2:
        raise InputError(
            "cannot be converted: the projections vera_A and vera_B are not in the file, and another version of torch "
            "draws others from the same seed",
            path=source.path,
            key="save_projection",
            remedy="save the adapter with save_projection=True",
        )
    a, b = shared["vera_A"], shared["vera_B"]
    rank, widest = source.matrix(a)
    tallest, b_rank = source.matrix(b)
    if rank != b_rank:
        raise source.error(f"vera_A has rank {rank}, vera_B {b_rank}", b)
    shapes = _base_shapes(source)
    modules: list[LoraModule] = []
    for name, parts in source.groups(_PARTS).items():
        d, lambda_b = (source.part(name, parts, part) for part in ("vera_lambda_d", "vera_lambda_b"))
        d_out = source.vector(lambda_b)
        shape = shapes.get(f"{name}.weight")
        if shape is None or d_out not in shape:
            raise source.error(
                f"the base model has no linear map {name} of {d_out} outputs", lambda_b, "name its base model"
            )
        d_in = shape[1] if shape[0] == d_out else shape[0]  # a Conv1D stores its transpose
        if source.vector(d) != rank or d_in > widest or d_out > tallest:
            raise source.error(f"module {name} does not fit into vera_A and vera_B", d)
        build = VeraBuild(a.stored, d.stored, b.stored, lambda_b.stored, d_in)
        modules.append(source.converted(name, build, {**parts, **shared}, (rank, d_in, d_out), 1.0))
    return modules


def _base_shapes(source: Source) -> dict[str, tuple[int, int]]:
    """Shapes of all matrices of the base model, by name."""
    files = [] if source.base is None else sorted(source.base.glob("*.safetensors"))
    if not files:
        raise InputError(
            "VeRA does not say how many inputs a module has",
            path=source.path,
            remedy="name the folder of the base model's safetensors files with --base",
        )
    return {
        name: (entry.shape[0], entry.shape[1])
        for file in files
        for name, entry in read_header(file).items()
        if len(entry.shape) == 2
    }
