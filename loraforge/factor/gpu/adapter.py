"""The modules of one adapter on a GPU, checked as on the CPU; what is not accepted is left for the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loraforge.factor.engine import (
    MAX_ACTION_ERROR,
    MAX_SPECTRUM_ERROR,
    ModuleFactors,
    Path,
    group_by_shape,
)
from loraforge.factor.gpu.check import group_errors
from loraforge.factor.gpu.engine import FAILED, GRAM, TSQR, Group, Method, factorise_groups
from loraforge.factor.gpu.ops import DTYPES, Backend
from loraforge.factor.stages import Stages
from loraforge.fleet.peft_io import LoraModule

_PATHS: dict[int, Path] = {GRAM: "gram", TSQR: "tsqr"}


def factorise_modules(
    modules: Sequence[LoraModule],
    factors: Mapping[str, tuple[Tensor, Tensor]],
    backend: Backend,
    method: Method,
    stages: Stages,
) -> dict[str, ModuleFactors]:
    """Accepted factors by module name, on the CPU. FP64 factors are not taken: the kernels read no FP64."""
    by_name = {
        module.name: module for module in modules if all(x.dtype in DTYPES for x in factors[module.name])
    }
    names = group_by_shape(
        ((name, module.d_in, module.d_out, module.rank) for name, module in by_name.items()),
        max_batch=max(1, len(by_name)),
    )
    with stages("load"):
        groups = []
        for members in names:
            a, b = (torch.stack([factors[n][side].to(torch.float32) for n in members]) for side in (0, 1))
            scale = torch.tensor([by_name[name].scale for name in members], dtype=torch.float64)
            on = backend.device
            groups.append(Group(a.to(on), b.to(on), scale.to(on), members))
    with stages("device"):
        results = factorise_groups(groups, backend, method=method)
        spectra = [result.s.cpu() for result in results]
    done: dict[str, ModuleFactors] = {}
    for group, result, spectrum in zip(groups, results, spectra, strict=True):
        with stages("verify"):
            action, error = (errors.tolist() for errors in group_errors(group, result, backend))
        with stages("load"):
            a, b = result.parts[0].a.cpu(), result.parts[0].b.cpu()
        for j, name in enumerate(group.names or ()):
            path = int(result.path[j])
            if path != FAILED and action[j] < MAX_ACTION_ERROR and error[j] < MAX_SPECTRUM_ERROR:
                done[name] = ModuleFactors(spectrum[j], a[j], b[j], _PATHS[path], action[j], error[j])
    return done
