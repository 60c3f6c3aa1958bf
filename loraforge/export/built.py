"""Directions that are kept, built on a GPU from the original factors of many adapters together, and certified there.

The certificate of :func:`loraforge.export.certificate.action_error`, batched; what the device does not vouch for is
left to the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraforge.allocate.problem import Floats
from loraforge.export.certificate import leading_right_directions, probes
from loraforge.export.directions import Directions, Kept, Ranks, accepted_error
from loraforge.factor.engine import MAX_ACTION_ERROR, MAX_SPECTRUM_ERROR, relative, spectrum_errors
from loraforge.factor.gpu.check import chunks
from loraforge.factor.gpu.drain import Drain
from loraforge.factor.gpu.engine import FAILED, Group, GroupFactors, Method, Part
from loraforge.factor.gpu.fleet import factorise_loaded
from loraforge.factor.gpu.loader import LoadedFleet
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.stages import Stages
from loraforge.fleet.peft_io import Adapter, LoraModule


@dataclass(frozen=True)
class Measured:
    """Spectra of one adapter, the path of each module, and the key that the cache has, or would have, for it."""

    adapter: str
    factor_key: str
    modules: Mapping[str, LoraModule]
    sigma: Mapping[str, Floats]
    paths: Mapping[str, str]

    def spectrum(self, name: str) -> Floats:
        return self.sigma[name]


def build_kept(
    loaded: LoadedFleet,
    measured: Mapping[str, Measured],
    ranks: Ranks,
    dtype: torch.dtype | None,
    backend: Backend,
    stages: Stages,
    *,
    method: Method = "auto",
) -> dict[tuple[str, str], Kept]:
    """The kept directions, by adapter and module, of what is accepted; views on the device. Uses up ``loaded``.

    Accepted is what has the spectrum in ``measured`` and, in its action, what the cache would take and ``dtype`` holds.
    ``stages`` gets ``factor``. Raises OutOfMemoryError where the device has no room.
    """
    k = torch.tensor(
        [
            ranks[adapter.name][module.name] if adapter.name in measured else 1
            for adapter, module in loaded.modules
        ]
    )
    with timed(stages, backend.device):
        ordered, kept = _ordered_by(loaded, k)
        results = factorise_loaded(ordered, backend, method, ks=kept)
    found: dict[tuple[str, str], Kept] = {}
    for group, members, result, ks in zip(ordered.groups, ordered.members, results, kept, strict=True):
        same = _same_spectra([loaded.modules[index] for index in members.tolist()], measured, result)
        target = dtype or torch.promote_types(group.a.dtype, group.b.dtype)
        for part in result.parts:
            exported = Part(part.start, part.stop, part.a.to(target), part.b.to(target))
            exact, rounded = _action_errors(group, part, exported, ks[part.start : part.stop])
            good = (exact < MAX_ACTION_ERROR) & (rounded <= accepted_error(target))
            good &= same[part.start : part.stop]
            rows = zip(
                members[part.start : part.stop].tolist(),
                _pairs(exported, ks[part.start : part.stop]),
                rounded.tolist(),
                good.tolist(),
                strict=True,
            )
            for index, (a, b), error, accepted in rows:
                adapter, module = loaded.modules[index]
                if accepted and adapter.name in measured:
                    spectra = measured[adapter.name]
                    found[adapter.name, module.name] = Kept(
                        a, b, error, spectra.sigma[module.name], spectra.paths[module.name]
                    )
    return found


def whole_adapters(
    adapters: Iterable[Adapter],
    kept: Mapping[tuple[str, str], Kept],
    measured: Mapping[str, Measured],
    device: torch.device,
) -> Iterator[Directions]:
    """The adapters whose every module is in ``kept``, whose tensors are on ``device``."""
    drain = Drain(device)
    for adapter in adapters:
        modules = {
            module.name: kept[adapter.name, module.name]
            for module in adapter.modules
            if (adapter.name, module.name) in kept
        }
        if len(modules) == len(adapter.modules):
            yield Directions(adapter, measured[adapter.name].factor_key, modules, drain, drain.here)


@contextmanager
def timed(stages: Stages, device: torch.device) -> Iterator[None]:
    """Stage ``factor``, which ends when the device has done its work."""
    with stages("factor"):
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _same_spectra(
    modules: Sequence[tuple[Adapter, LoraModule]], measured: Mapping[str, Measured], result: GroupFactors
) -> Tensor:
    """Whether the factors [m] (bool, CPU) of a group are good, and of the spectra that ranks were chosen by."""
    s = result.s.cpu()
    known = [
        measured[adapter.name].sigma[module.name] if adapter.name in measured else own
        for (adapter, module), own in zip(modules, s.numpy(), strict=True)
    ]
    errors = spectrum_errors(torch.from_numpy(np.stack(known)), s)
    return (errors < MAX_SPECTRUM_ERROR) & (result.path != FAILED)


def _ordered_by(loaded: LoadedFleet, k: Tensor) -> tuple[LoadedFleet, list[Tensor]]:
    """The same fleet, the rows of each group ordered by rank to keep; and those ranks. Replaces group by group."""
    members, kept = [], []
    for number, group in enumerate(loaded.groups):
        ks = k[loaded.members[number]]
        order = ks.argsort(stable=True)
        there = order.to(group.a.device)
        names = group.names and [group.names[index] for index in order.tolist()]
        loaded.groups[number] = Group(group.a[there], group.b[there], group.scale[there], names)
        members.append(loaded.members[number][order])
        kept.append(ks[order])
    return LoadedFleet(loaded.modules, loaded.groups, members, loaded.nbytes), kept


def _pairs(part: Part, ks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A [k, d_in] and B [d_out, k] of each matrix of a part that is ordered by k [n], both contiguous.

    Matrices of one k are cut to it together: a kernel for each would cost more than all else in an export.
    """
    start = 0
    for k, count in zip(
        *(found.tolist() for found in torch.unique_consecutive(ks, return_counts=True)), strict=True
    ):
        rows = slice(start, start + count)
        yield from zip(
            part.a[rows, :k].contiguous().unbind(), part.b[rows, :, :k].contiguous().unbind(), strict=True
        )
        start += count


def _action_errors(group: Group, ordered: Part, exported: Part, ks: Tensor) -> tuple[Tensor, Tensor]:
    """Action errors [n] of a part, as built and as exported, on the CPU:
    :func:`loraforge.export.certificate.action_error`, batched."""
    device = group.a.device
    x = probes(group.a.shape[2]).to(device)
    width = torch.arange(ordered.a.shape[1], device=device)
    found = []
    for chunk in chunks(group):
        start, stop = max(chunk.start, ordered.start), min(chunk.stop, ordered.stop)
        if start >= stop:
            continue
        rows, mine = slice(start, stop), slice(start - ordered.start, stop - ordered.start)
        live = (width < ks[mine].to(device)[:, None])[:, :, None]
        directions = leading_right_directions(ordered.a[mine].flatten(0, 1)).view_as(ordered.a[mine]) * live
        inside = group.a[rows].double() @ (directions.mT @ (directions @ x))
        wanted = group.scale[rows, None, None] * (group.b[rows].double() @ inside)
        norm = torch.linalg.vector_norm(wanted, dim=(1, 2))
        errors = []
        for part in (ordered, exported):
            got = part.b[mine].double() @ (live * (part.a[mine].double() @ x))
            errors.append(relative(torch.linalg.vector_norm(got - wanted, dim=(1, 2)), norm))
        found.append(torch.stack(errors))
    exact, rounded = torch.cat(found, dim=1).cpu()
    return exact, rounded
