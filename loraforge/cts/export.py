"""Fit shared bases to a fleet, and write every adapter as an equivalent independent one (section B.10).

JD-Full becomes A'_i = (A_i V) V^T and B'_i = U (U^T B_i), of the original ranks; JD-Diag A'_i = V^T and
B'_i = U diag(s_i), of the shared rank. Such folders show quality: they do not have the storage that the report counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from loraforge.allocate.budget import Budget, ceiling
from loraforge.cts.accounting import Variant, shared_rank, sharing_of
from loraforge.cts.diagonal import joint_diagonal
from loraforge.cts.factors import Stack, stack
from loraforge.cts.full import ITERATIONS, SEEDS, joint_full
from loraforge.cts.report import CtsReport, SharedModule, save_report
from loraforge.errors import InputError
from loraforge.export.certificate import probes, relative_error
from loraforge.export.directions import cast_factors
from loraforge.export.layouts import adapter_config
from loraforge.files import atomic_folder, refuse_to_replace, write_json
from loraforge.fleet.peft_config import CONFIG_NAME, WEIGHTS_NAME
from loraforge.fleet.peft_io import Adapter, FactorReader, LoraModule
from loraforge.progress import progress
from loraforge.tensor_file import write_tensors

Precision = Literal["float32", "float64"]
_BATCH_BYTES = 1 << 28  # stacked factors of modules that are fitted together

Pair = tuple[Tensor, Tensor]


class Target(NamedTuple):
    """One adapter's module that takes part in a fit."""

    adapter: Adapter
    module: LoraModule


def compress_jointly(
    fleet: Sequence[Adapter],
    name: str,
    budget: Budget,
    out: Path,
    *,
    variant: Variant = "full",
    iterations: int = ITERATIONS,
    seeds: Sequence[int] = SEEDS,
    power: bool = False,
    precision: Precision = "float32",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    force: bool = False,
) -> CtsReport:
    """Fit, export to ``out/<adapter>/`` and report in ``out/cts.json``; ``out`` appears whole or not at all.

    The shared rank is the largest common one within what uniform ranks at ``budget`` cost. Peak memory is that of
    the exported factors of the whole fleet. Raises BudgetError where rank 1 does not fit, InputError for modules of one
    name and two shapes or factors that ``dtype`` cannot hold, OutputError as writing does.
    """
    refuse_to_replace(out, [adapter.path for adapter in fleet])
    targets: dict[str, list[Target]] = defaultdict(list)
    for adapter in fleet:
        for module in adapter.modules:
            targets[module.name].append(Target(adapter, module))
    modules = [module for adapter in fleet for module in adapter.modules]
    try:
        sharing = sharing_of([(module.name, module.d_in, module.d_out) for module in modules])
    except ValueError as error:
        raise InputError(str(error), remedy="share bases between adapters of one base model") from error
    limit = ceiling(
        budget, np.array([module.rank for module in modules]), np.array([m.d_in + m.d_out for m in modules])
    ).params
    rank = shared_rank(sharing, limit, variant)
    made: dict[str, dict[str, Pair]] = {adapter.name: {} for adapter in fleet}
    fits: dict[str, SharedModule] = {}
    rounding = 0.0
    with ExitStack() as opened, progress("cts", len(targets)) as ticker:
        readers = {adapter.name: opened.enter_context(adapter.reader()) for adapter in fleet}
        for batch in _batches(targets):
            updates = _stack(batch, readers, getattr(torch, precision), device)
            one = batch[0][0].module
            module_rank = min(rank, one.d_in, one.d_out)
            fit = _fit(updates, module_rank, variant, iterations, seeds, power)
            for g, group in enumerate(batch):
                for i, target in enumerate(group):
                    exact = fit.factors(g, i, target.module.rank)
                    pair = cast_factors(target.adapter, target.module.name, exact, dtype)
                    x = probes(target.module.d_in)
                    wanted = exact[1].double() @ (exact[0].double() @ x)
                    rounding = max(
                        rounding, relative_error(pair[1].double() @ (pair[0].double() @ x), wanted)
                    )
                    made[target.adapter.name][target.module.name] = pair
                fits[group[0].module.name] = SharedModule(
                    adapters=len(group), rank=module_rank, error=float(fit.error[g]), seed=int(fit.seed[g])
                )
                ticker.advance(group[0].module.name)
    report = CtsReport(
        fleet=name,
        variant=variant,
        budget=budget.value,
        ceiling=limit,
        rank=rank,
        spent=sharing.parameters(rank, variant),
        iterations=iterations,
        seeds=tuple(seeds),
        steps="power" if power else "exact",
        precision=precision,
        rounding_error=rounding,
        modules={module: fits[module] for module in sharing.names},
    )
    with atomic_folder(out, force=force) as temporary:
        for adapter in fleet:
            _write(temporary / adapter.name, adapter, made[adapter.name])
        save_report(temporary, report)
    return report


@dataclass(frozen=True)
class _Fit:
    """Shared bases of a batch; see the module's docstring. ``scales`` are those of diagonal cores."""

    updates: Stack
    left: Tensor
    right: Tensor
    scales: Tensor | None
    error: Tensor
    seed: Tensor

    def factors(self, g: int, i: int, rank: int) -> Pair:
        """A' and B' of adapter i's module g, on the CPU, before rounding. ``rank``: of the original."""
        left, right = self.left[g], self.right[g]
        if self.scales is not None:
            a, b = right.mT, left * self.scales[g, i]
        else:
            a = (self.updates.a[g, i, :rank] @ right) @ right.mT
            b = left @ (left.mT @ self.updates.b[g, i, :, :rank])
        return a.cpu(), b.cpu()


def _fit(
    updates: Stack, rank: int, variant: Variant, iterations: int, seeds: Sequence[int], power: bool
) -> _Fit:
    if variant == "diagonal":
        free = joint_diagonal(updates, rank, iterations=iterations, seeds=seeds)
        return _Fit(updates, free.left, free.right, free.scales, free.error, free.seed)
    weighted = variant == "weighted"
    full = joint_full(updates, rank, weighted=weighted, iterations=iterations, seeds=seeds, power=power)
    return _Fit(updates, full.left, full.right, None, full.error, full.seed)


def _batches(targets: Mapping[str, Sequence[Target]]) -> Iterator[list[Sequence[Target]]]:
    """Modules of one shape and number of adapters together, as many as ``_BATCH_BYTES`` hold."""
    alike: dict[tuple[int, int, int], list[Sequence[Target]]] = defaultdict(list)
    for group in targets.values():
        alike[group[0].module.d_in, group[0].module.d_out, len(group)].append(group)
    for (d_in, d_out, adapters), groups in alike.items():
        rank = max(target.module.rank for group in groups for target in group)
        size = max(1, _BATCH_BYTES // (8 * adapters * rank * (d_in + d_out)))
        for start in range(0, len(groups), size):
            yield groups[start : start + size]


def _stack(
    batch: Sequence[Sequence[Target]], readers: Mapping[str, FactorReader], dtype: torch.dtype, device: str
) -> Stack:
    modules = []
    for group in batch:
        pairs = []
        for adapter, module in group:
            a, b = readers[adapter.name].factors(module)
            pairs.append((a.to(dtype), module.scale * b.to(dtype)))
        modules.append(pairs)
    return stack(modules, dtype, device)


def _write(folder: Path, adapter: Adapter, pairs: Mapping[str, Pair]) -> None:
    tensors: dict[str, Tensor] = {}
    if adapter.passthrough:
        with adapter.reader() as reader:
            tensors = {key: reader.tensor(key) for key in adapter.passthrough}
    for module in adapter.modules:
        tensors[module.a_key], tensors[module.b_key] = pairs[module.name]
    ranks = {module.name: pairs[module.name][0].shape[0] for module in adapter.modules}
    folder.mkdir(parents=True)
    write_tensors(folder / WEIGHTS_NAME, tensors, {"format": "pt"})
    write_json(folder / CONFIG_NAME, adapter_config(adapter.config, "ragged", ranks))
