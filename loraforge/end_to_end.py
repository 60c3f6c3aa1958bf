"""Folders of adapters in, folders of compressed adapters out, with the whole fleet on one device in between.

The chain of :mod:`loraforge.compress` for a fleet that fits the device: the same adapters are accepted, the same
policy chooses the ranks, the ragged layout is the same, every exported module is certified against its original.
What it leaves out is the factor cache (spectra first, then only the directions that are kept) and the manifest.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraforge.allocate.budget import Budget
from loraforge.allocate.policy import allocate as choose_ranks
from loraforge.allocate.problem import Problem
from loraforge.config import Policy
from loraforge.errors import InputError, LoraForgeError
from loraforge.export.certificate import leading_right_directions, probes
from loraforge.export.layouts import adapter_config
from loraforge.export.writer import accepted_error, write_weights
from loraforge.factor.gpu.check import chunks
from loraforge.factor.gpu.engine import FAILED, Group, GroupFactors, Part, factorise_groups
from loraforge.factor.gpu.loader import LoadedFleet, load_fleet
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.stages import Stages
from loraforge.files import atomic_folder, refuse_to_replace, write_json
from loraforge.fleet.peft_config import CONFIG_NAME, WEIGHTS_NAME
from loraforge.fleet.peft_io import Adapter, open_fleet
from loraforge.progress import progress

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Outcome:
    """What :func:`compress_on_device` did.

    ``ranks`` by adapter and module; ``seconds`` by stage; bytes of factors to the device and of weights written;
    ``max_action_error`` over all exported modules, as :mod:`loraforge.export.certificate` defines it.
    """

    ranks: dict[str, dict[str, int]]
    seconds: dict[str, float]
    bytes_in: int
    bytes_out: int
    max_action_error: float


def compress_on_device(
    source: Sequence[Path], budget: Budget, out: Path, backend: Backend, *, policy: Policy = "spectral"
) -> Outcome:
    """Compress adapter folders under ``budget`` into ``out/ragged/<adapter>`` (BF16), which appears whole.

    Raises InputError as the stages of :func:`loraforge.compress.compress` do, and LoraForgeError for a matrix
    that neither GPU path vouches for, or a fleet that does not fit the device.
    """
    stages = _Synchronised(backend.device)
    refuse_to_replace(out, source)
    try:
        with stages("load"):
            fleet = open_fleet(source)
            loaded = load_fleet(fleet, backend.device)
        with stages("factor"):
            sigma = _spectra(fleet, loaded, backend)
        with stages("allocate"):
            problem = _problem(fleet, sigma)
            chosen = choose_ranks(problem, policy, budget, bytes_per_parameter=DTYPE.itemsize)
            k = torch.from_numpy(chosen.k)
        with stages("factor"):
            loaded, kept = _ordered_by(loaded, k)
            factors = factorise_groups(loaded.groups, backend, ks=kept)
            _require_all(loaded.groups, factors)
        with stages("export"):
            error, written = _export(fleet, loaded, factors, kept, out)
    except torch.OutOfMemoryError as error_:
        raise LoraForgeError(
            "the fleet does not fit the GPU's memory",
            remedy="use loraforge compress, which takes one adapter at a time",
        ) from error_
    ranks: dict[str, dict[str, int]] = {adapter.name: {} for adapter in fleet}
    for (adapter, module), value in zip(problem.names, k.tolist(), strict=True):
        ranks[adapter][module] = value
    return Outcome(ranks, dict(stages.seconds), loaded.nbytes, written, error)


class _Synchronised(Stages):
    """Stages that end when the device has done their work."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with super().__call__(name):
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)


def _spectra(fleet: Sequence[Adapter], loaded: LoadedFleet, backend: Backend) -> list[Tensor]:
    """Effective spectra of all modules in the order of the fleet, FP64 on the CPU, at the price of one direction."""
    one = [torch.ones(len(group), dtype=torch.int64) for group in loaded.groups]
    results = factorise_groups(loaded.groups, backend, ks=one)
    _require_all(loaded.groups, results)
    found: list[Tensor] = [torch.empty(0)] * sum(len(adapter.modules) for adapter in fleet)
    for members, result in zip(loaded.members, results, strict=True):
        for index, s in zip(members.tolist(), result.s.cpu(), strict=True):
            found[index] = s
    return found


def _problem(fleet: Sequence[Adapter], sigma: Sequence[Tensor]) -> Problem:
    modules = [(adapter.name, module) for adapter in fleet for module in adapter.modules]
    return Problem(
        [(name, module.name) for name, module in modules],
        np.array([module.rank for _, module in modules], dtype=np.int64),
        np.array([module.d_in + module.d_out for _, module in modules], dtype=np.int64),
        torch.cat(list(sigma)).numpy(),
    )


def _require_all(groups: Sequence[Group], results: Sequence[GroupFactors]) -> None:
    for group, result in zip(groups, results, strict=True):
        for index in (result.path == FAILED).nonzero().squeeze(-1).tolist()[:1]:
            raise LoraForgeError(
                "no GPU path vouches for its factors",
                key=group.names[index] if group.names else None,
                remedy="use loraforge compress, which takes such matrices to the CPU's reference path",
            )


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
    return LoadedFleet(loaded.groups, members, loaded.nbytes), kept


def _export(
    fleet: Sequence[Adapter],
    loaded: LoadedFleet,
    factors: Sequence[GroupFactors],
    kept: Sequence[Tensor],
    out: Path,
) -> tuple[float, int]:
    """Write the ragged layout; the largest action error and the bytes written.

    Adapter by adapter, tensors are packed on the device and sent in one copy, while threads serialise and write
    those before.
    """
    modules = [(adapter, module) for adapter in fleet for module in adapter.modules]
    place: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(modules)
    worst = torch.zeros(len(modules), dtype=torch.float64)
    for group, members, result, ks in zip(loaded.groups, loaded.members, factors, kept, strict=True):
        for part in result.parts:
            rows = slice(part.start, part.stop)
            exported = Part(part.start, part.stop, part.a.to(DTYPE), part.b.to(DTYPE))
            worst[members[rows]] = _action_errors(group, part, exported, ks[rows])
            a, b = exported.a.unbind(), exported.b.unbind()
            for row, (index, k) in enumerate(zip(members[rows].tolist(), ks[rows].tolist(), strict=True)):
                place[index] = a[row][:k], b[row][:, :k]
    limit = accepted_error(DTYPE)
    error = float(worst.max())
    if not error <= limit:
        adapter, module = modules[int(worst.nan_to_num(float("inf")).argmax())]
        raise InputError(
            f"bfloat16 cannot hold these factors (action error {error:.1e})",
            path=adapter.path,
            key=module.name,
            remedy="compress it with --dtype float32",
        )
    workers = min(8, len(os.sched_getaffinity(0)))
    with atomic_folder(out) as temporary, ThreadPoolExecutor(workers) as pool:
        pending, start = [], 0
        for adapter in fleet:
            pairs = place[start : start + len(adapter.modules)]
            start += len(adapter.modules)
            host, copied = _to_host(torch.cat([factor.reshape(-1) for pair in pairs for factor in pair]))
            shapes = [factor.shape for pair in pairs for factor in pair]
            folder = temporary / "ragged" / adapter.name
            pending.append(pool.submit(_write, adapter, folder, host, copied, shapes))
        written = sum(future.result() for future in pending)
    return error, written


def _to_host(flat: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on its way to pinned memory, and the event after it; at once on a CPU."""
    if flat.device.type != "cuda":
        return flat, None
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    host.copy_(flat, non_blocking=True)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(flat.device))
    return host, event


def _write(
    adapter: Adapter, folder: Path, host: Tensor, copied: torch.cuda.Event | None, shapes: list[torch.Size]
) -> int:
    if copied is not None:
        copied.synchronize()
    pieces = torch.split(host, [shape.numel() for shape in shapes])
    views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    with adapter.reader() as reader:
        tensors = {key: reader.tensor(key) for key in adapter.passthrough}
    for number, module in enumerate(adapter.modules):
        tensors[module.a_key], tensors[module.b_key] = views[2 * number], views[2 * number + 1]
    ranks = {module.name: len(views[2 * number]) for number, module in enumerate(adapter.modules)}
    config = adapter_config(adapter.config, "ragged", ranks)
    folder.mkdir(parents=True)
    write_json(folder / CONFIG_NAME, config)
    return write_weights(folder / WEIGHTS_NAME, tensors, config["r"]).bytes


def _action_errors(group: Group, ordered: Part, exported: Part, ks: Tensor) -> Tensor:
    """Action errors [n] of a part on the CPU: :func:`loraforge.export.certificate.action_error`, batched."""
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
        got = exported.b[mine].double() @ (live * (exported.a[mine].double() @ x))
        difference = torch.linalg.vector_norm(got - wanted, dim=(1, 2))
        norm = torch.linalg.vector_norm(wanted, dim=(1, 2))
        exact = torch.where(difference == 0, 0.0, torch.inf)
        found.append(torch.where(norm > 0, difference / norm, exact))
    return torch.cat(found).cpu()


def benchmark(
    name: str,
    source: Sequence[Path],
    budget: Budget,
    out: Path,
    backend: Backend,
    *,
    warmups: int = 1,
    passes: int = 3,
) -> list[dict[str, Any]]:
    """Time the chain on a fleet; the records of target ``end_to_end_compression``.

    Every pass starts from files (which the system may hold in memory) and ends with files; the output of the one
    before is removed in between, untimed. Pinned memory and kernels are there after a warm-up. The last output
    stays in ``out``.
    """
    records: list[dict[str, Any]] = []
    error, n = 0.0, 0
    with progress(f"end to end {name}", warmups + passes) as ticker:
        for number in range(-warmups, passes):
            shutil.rmtree(out, ignore_errors=True)
            started = time.perf_counter()
            outcome = compress_on_device(source, budget, out, backend)
            seconds = time.perf_counter() - started
            error, n = max(error, outcome.max_action_error), sum(len(r) for r in outcome.ranks.values())
            if number >= 0:
                records.append(
                    {
                        "fleet": name, "pass": number, "seconds": seconds, "stages": outcome.seconds,
                        "budget": budget.value, "bytes_in": outcome.bytes_in, "bytes_out": outcome.bytes_out,
                    }
                )  # fmt: skip
            ticker.advance(f"{seconds:.2f} s")
    records.append({"record": "check", "fleet": name, "max_action_error": error, "n": n})
    if backend.device.type == "cuda":
        rate = host_copy_rate(backend.device)
        records.append({"record": "floor", "fleet": name, "rate": rate})
    return records


def host_copy_rate(device: torch.device) -> float:
    """Bytes a second of a large copy from pinned memory to the device: the best of five."""
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    times = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return source.numel() / min(times)
