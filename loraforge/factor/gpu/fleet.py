"""Adapters together on a GPU, checked as on the CPU; what is not accepted is left for the CPU.

Matrices of one shape are one group whichever adapter they belong to. What a matrix gives does not depend on the
others beyond rounding of FP64 library calls, whose choice of algorithm may depend on the size of a batch: FP32 factors
agree to 1e-6 of the largest, and repeat bit for bit for the same adapters on one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loraforge.factor.engine import MAX_ACTION_ERROR, MAX_SPECTRUM_ERROR, ModuleFactors, Path
from loraforge.factor.gpu.check import group_errors
from loraforge.factor.gpu.engine import (
    FAILED,
    GRAM,
    TSQR,
    GroupFactors,
    Method,
    NotFiniteError,
    factorise_groups,
)
from loraforge.factor.gpu.loader import LoadedFleet, load_fleet
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.stages import Stages
from loraforge.fleet.peft_io import Adapter

PATHS: dict[int, Path] = {GRAM: "gram", TSQR: "tsqr"}


def factorise_together(
    adapters: Sequence[Adapter], backend: Backend, method: Method, stages: Stages
) -> list[dict[str, ModuleFactors]]:
    """Accepted factors of every adapter by module name, in the order of ``adapters``: ``s`` on the CPU, ``a`` and
    ``b`` on the device. FP64 factors are not taken: the kernels read no FP64.

    Stages ``load``, ``hash``, ``device``, ``verify``. Raises InputError that names file and tensor for NaN or
    infinite values.
    """
    loaded = load_fleet(adapters, backend.device, stages)
    with stages("device"):
        results = factorise_loaded(loaded, backend, method)
        spectra = [result.s.cpu() for result in results]
    done: list[dict[str, ModuleFactors]] = [{} for _ in adapters]
    owner = [number for number, adapter in enumerate(adapters) for _ in adapter.modules]
    for group, members, result, s in zip(loaded.groups, loaded.members, results, spectra, strict=True):
        with stages("verify"):
            action, spectrum = (errors.tolist() for errors in group_errors(group, result, backend))
        (part,) = result.parts
        rows = zip(members.tolist(), result.path.tolist(), s, part.a, part.b, action, spectrum, strict=True)
        for index, path, s_, a, b, action_error, spectrum_error in rows:
            if path != FAILED and action_error < MAX_ACTION_ERROR and spectrum_error < MAX_SPECTRUM_ERROR:
                factors = ModuleFactors(s_, a, b, PATHS[path], action_error, spectrum_error)
                done[owner[index]][loaded.modules[index][1].name] = factors
    return done


def factorise_loaded(
    loaded: LoadedFleet,
    backend: Backend,
    method: Method = "auto",
    *,
    ks: Sequence[torch.Tensor] | None = None,
) -> list[GroupFactors]:
    """:func:`~loraforge.factor.gpu.engine.factorise_groups`, with an error of NaN that names file and tensor."""
    try:
        return factorise_groups(loaded.groups, backend, method=method, ks=ks)
    except NotFiniteError as error:
        adapter, module = loaded.modules[int(loaded.members[error.group][error.row])]
        adapter.factors(module)  # names the tensor, as it does where there is no GPU
        raise
