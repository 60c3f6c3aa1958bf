"""A shape fleet on the device, for timing: right shapes and plausible spectra, no trained weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from loraforge.factor.gpu.engine import Group
from loraforge.files import write_json
from loraforge.fleet.peft_config import CONFIG_NAME, WEIGHTS_NAME
from loraforge.fleet.shapes import Floats, ShapeFleet, synthetic_spectra
from loraforge.progress import progress
from loraforge.tensor_file import write_tensors


@dataclass(frozen=True)
class DeviceFleet:
    """Groups of a shape fleet and, of each, the modules [m] (int64, CPU) it holds in its order."""

    shapes: ShapeFleet
    groups: list[Group]
    members: list[Tensor]

    @property
    def n(self) -> int:
        return sum(len(group) for group in self.groups)


def device_fleet(
    shapes: ShapeFleet, device: torch.device, seed: int, pool: Sequence[Floats] | None = None
) -> DeviceFleet:
    """FP32 factors with the scale folded in: ``B = G_B D H``, ``A = H D G_A``.

    D^2 is a synthetic spectrum (drawn from ``pool``; see :func:`synthetic_spectra`), G are Gaussian with columns
    and rows of unit expected length, and the reflection H keeps the factors from being ordered already. G are
    not orthogonal, so that the spectrum of the update is near D^2 but not it: measure it.
    """
    spectra = np.split(synthetic_spectra(shapes, seed, pool), np.cumsum(shapes.rank)[:-1])
    keys: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index, key in enumerate(
        zip(shapes.d_in.tolist(), shapes.d_out.tolist(), shapes.rank.tolist(), strict=True)
    ):
        keys[key].append(index)
    generator = torch.Generator(device).manual_seed(seed)
    groups, members = [], []
    for (d_in, d_out, rank), indices in keys.items():
        root = torch.from_numpy(np.stack([spectra[i] for i in indices])).sqrt().to(device, torch.float32)
        m = len(indices)

        def gaussian(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        direction = torch.nn.functional.normalize(gaussian(m, rank, 1), dim=1)
        a = gaussian(m, rank, d_in).mul_(root[:, :, None] / d_in**0.5)
        a.baddbmm_(direction, direction.mT @ a, alpha=-2)
        b = gaussian(m, d_out, rank).mul_(root[:, None, :] / d_out**0.5)
        b.baddbmm_(b @ direction, direction.mT, alpha=-2)
        groups.append(Group(a, b, torch.ones(m, dtype=torch.float64, device=device)))
        members.append(torch.tensor(indices))
    return DeviceFleet(shapes, groups, members)


def reordered(fleet: DeviceFleet, ks: Sequence[Tensor]) -> tuple[DeviceFleet, list[Tensor]]:
    """The same fleet with the matrices of each group ordered by rank to keep, as a loader that knows the
    allocation would read them; and the ranks in that order. The inputs are replaced group by group."""
    members, kept = [], []
    for number, group in enumerate(fleet.groups):
        order = ks[number].argsort(stable=True)
        there = order.to(group.a.device)
        fleet.groups[number] = Group(group.a[there], group.b[there], group.scale[there])
        members.append(fleet.members[number][order])
        kept.append(ks[number][order])
    return DeviceFleet(fleet.shapes, fleet.groups, members), kept


def sample(fleet: DeviceFleet, count: int) -> DeviceFleet:
    """At least ``count`` matrices, in proportion to the sizes of the groups and evenly spaced in each."""
    groups, members = [], []
    for group, inside in zip(fleet.groups, fleet.members, strict=True):
        number = min(len(group), max(1, -(-count * len(group) // fleet.n)))
        index = torch.linspace(0, len(group) - 1, number).round().long()
        there = index.to(group.a.device)
        groups.append(Group(group.a[there], group.b[there], group.scale[there]))
        members.append(inside[index])
    return DeviceFleet(fleet.shapes, groups, members)


def write_fleet(
    shapes: ShapeFleet,
    folder: Path,
    device: torch.device,
    seed: int,
    pool: Sequence[Floats] | None = None,
    *,
    writers: int = 4,
) -> list[Path]:
    """Write a shape fleet as PEFT folders ``folder/<adapter>`` with BF16 factors of scale one, and return them.

    Adapters are made on ``device`` one by one, each from its own seed, as :func:`device_fleet` makes them: no
    trained weight. At most ``writers`` of them are in the host's memory.
    """
    modules: dict[str, list[int]] = defaultdict(list)
    for index, (adapter, _) in enumerate(shapes.names):
        modules[adapter].append(index)
    pending: list[Future[None]] = []
    with progress(f"write {shapes.name}", len(modules)) as ticker, ThreadPoolExecutor(writers) as threads:
        for number, (name, indices) in enumerate(modules.items()):
            part = shapes.select(np.array(indices))
            fleet = device_fleet(part, device, seed + number, pool)
            tensors: dict[str, Tensor] = {}
            for group, members in zip(fleet.groups, fleet.members, strict=True):
                stacks = group.a.to(torch.bfloat16).cpu(), group.b.to(torch.bfloat16).cpu()
                for row, i in enumerate(members.tolist()):
                    for side, stack in zip("AB", stacks, strict=True):
                        tensors[f"base_model.model.{part.names[i][1]}.lora_{side}.weight"] = stack[row]
            if len(pending) >= writers:
                pending[-writers].result()
            pending.append(threads.submit(_write_adapter, folder / name, part, tensors))
            ticker.advance(name)
        for future in pending:
            future.result()
    return [folder / name for name in modules]


def _write_adapter(folder: Path, part: ShapeFleet, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    write_tensors(folder / WEIGHTS_NAME, tensors, {"format": "pt"})
    rank = int(part.rank[0])
    write_json(
        folder / CONFIG_NAME,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": part.base_model,
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
            "target_modules": sorted({name.rpartition(".")[2] for _, name in part.names}),
        },
    )
