"""Recompression of a shape fleet divided by adapter between devices, one process each.

Every process makes its share, checks it, and then does passes that all of them start at one agreed moment of the
host's monotonic clock; a pass ends when the slowest device is done. One device does the same alone, in the same
run, and tells what a matrix of each rank costs: shares are balanced by that.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as processes

from loraforge.errors import LoraForgeError, UsageError
from loraforge.factor.engine import MAX_ACTION_ERROR, MAX_SPECTRUM_ERROR
from loraforge.factor.gpu.check import group_errors
from loraforge.factor.gpu.engine import FAILED, allocate, factorise_groups
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.gpu.processes import backend_on, balanced
from loraforge.factor.gpu.synthetic import DeviceFleet, device_fleet
from loraforge.factor.gpu.timing import EventStages
from loraforge.factor.stages import Stages
from loraforge.fleet.shapes import Floats, ShapeFleet
from loraforge.progress import progress

METHOD = "gram"
PATIENCE_S = 300.0
HEAD_START_S = 0.005  # what a process needs to see that all have arrived


def shares(shapes: ShapeFleet, count: int, seconds: Mapping[int, float]) -> list[ShapeFleet]:
    """Divide a fleet by adapter into ``count`` parts of about equal cost; ``seconds`` a matrix, by rank.

    Raises UsageError for fewer adapters than parts.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for index, (adapter, _) in enumerate(shapes.names):
        members[adapter].append(index)
    if len(members) < count:
        raise UsageError(
            f"{len(members)} adapters cannot be divided between {count} devices",
            key="--devices",
            remedy="name fewer devices",
        )
    owned = list(members.values())
    costs = [sum(seconds[int(shapes.rank[i])] for i in inside) for inside in owned]
    parts = [[i for index in part for i in owned[index]] for part in balanced(costs, count)]
    return [shapes.select(np.array(sorted(indices), dtype=np.int64)) for indices in parts]


@dataclass(frozen=True)
class _Order:
    """One share for one process: ``barrier`` is the number of the barrier it meets the others at."""

    shapes: ShapeFleet
    barrier: int
    seed: int
    warmups: int
    passes: int
    pool: Sequence[Floats] | None
    ranks: bool


@dataclass(frozen=True)
class _Answer:
    """Seconds and stages of every timed pass, errors of the share, and seconds a matrix by rank if asked for."""

    seconds: list[float]
    stages: list[dict[str, float]]
    action: float
    spectrum: float
    ranks: dict[int, float]


def benchmark_scaling(
    shapes: ShapeFleet,
    devices: Sequence[str],
    counts: Sequence[int],
    *,
    warmups: int = 2,
    passes: int = 5,
    seed: int = 20261130,
    pool: Sequence[Floats] | None = None,
) -> list[dict[str, Any]]:
    """Records of target ``recompression`` for FP64-Gram on the first 1 and then ``counts`` of ``devices``.

    ``devices`` are torch's names; on ``cpu`` the kernels are emulated. Each pass states its ``devices``, and the
    stages of the slowest. Raises UsageError for more devices than there are, LoraForgeError where a share fails
    acceptance or a process dies.
    """
    wanted = sorted({1, *counts})
    if wanted[0] < 1 or wanted[-1] > len(devices):
        raise UsageError(
            f"{wanted[-1]} devices asked for, {len(devices)} found",
            key="--devices",
            remedy="name as many as torch sees",
        )
    context = processes.get_context("spawn")
    barriers = [context.Barrier(count) for count in wanted]
    start = context.Value("d", 0.0)
    workers, lines = [], []
    for rank in range(wanted[-1]):
        line, far = context.Pipe()
        worker = context.Process(
            target=_worker, args=(rank, devices[rank], barriers, start, far), daemon=True
        )
        worker.start()
        far.close()
        workers.append(worker)
        lines.append(line)
    records: list[dict[str, Any]] = []
    seconds = dict.fromkeys(sorted(set(shapes.rank.tolist())), 1.0)
    try:
        with progress(f"scaling {shapes.name}", len(wanted)) as ticker:
            for number, count in enumerate(wanted):
                for line, share in zip(lines, shares(shapes, count, seconds), strict=False):
                    _send(line, _Order(share, number, seed, warmups, passes, pool, ranks=count == 1))
                answers = _answers(lines[:count])
                seconds = answers[0].ranks or seconds
                records += _records(shapes, count, answers)
                ticker.advance(
                    f"{count} devices: {min(r['seconds'] for r in records[-passes - 1 : -1]):.4f} s"
                )
        for line in lines:
            _send(line, None)
        for worker in workers:
            worker.join(PATIENCE_S)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
    return records


def _records(shapes: ShapeFleet, count: int, answers: Sequence[_Answer]) -> list[dict[str, Any]]:
    named = {"fleet": shapes.name, "method": METHOD, "devices": count}
    records: list[dict[str, Any]] = []
    for number in range(len(answers[0].seconds)):
        slowest = max(answers, key=lambda answer: answer.seconds[number])
        records.append(
            {**named, "pass": number, "seconds": slowest.seconds[number], "stages": slowest.stages[number]}
        )
    action, spectrum = max(a.action for a in answers), max(a.spectrum for a in answers)
    if not (action < MAX_ACTION_ERROR and spectrum < MAX_SPECTRUM_ERROR):
        raise LoraForgeError(
            f"fails acceptance on {shapes.name}: action error {action:.1e}, spectrum error {spectrum:.1e}",
            key=f"{METHOD} on {count} devices",
        )
    errors = {"max_action_error": action, "max_spectrum_error": spectrum, "n": len(shapes.names)}
    return [*records, {"record": "check", **named, **errors}]


def _send(line: Connection, order: _Order | None) -> None:
    try:
        line.send(order)
    except BrokenPipeError as error:
        raise _died() from error


def _died() -> LoraForgeError:
    return LoraForgeError("a benchmark process died", remedy="look for its message above; it may lack memory")


def _answers(lines: Sequence[Connection]) -> list[_Answer]:
    """One answer a process. The first failure that is not the echo of another is raised."""
    found: dict[int, _Answer] = {}
    broken: list[BaseException] = []
    waiting = {id(line): number for number, line in enumerate(lines)}
    while waiting:
        for line in wait([lines[number] for number in waiting.values()]):
            assert isinstance(line, Connection)
            try:
                answer = line.recv()
            except EOFError as error:
                raise _died() from error
            number = waiting.pop(id(line))
            if isinstance(answer, BrokenBarrierError):
                broken.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[number] = answer
    if broken:
        raise LoraForgeError("processes waited for another in vain", remedy="run it again") from broken[0]
    return [found[number] for number in range(len(lines))]


def _worker(rank: int, device: str, barriers: Sequence[Any], start: Any, line: Connection) -> None:
    """Serve orders until None comes."""
    backend: Backend | None = None
    while (order := line.recv()) is not None:
        try:
            if backend is None:
                backend = backend_on(device)
            line.send(_serve(order, backend, barriers[order.barrier], start, rank == 0))
        except BaseException as error:
            barriers[order.barrier].abort()
            line.send(_sendable(error))


def _sendable(error: BaseException) -> BaseException:
    """Errors of ours, and what any other says: its class may not survive the way."""
    if isinstance(error, BrokenBarrierError):
        return error
    return LoraForgeError(f"{type(error).__name__}: {error}")


def _serve(order: _Order, backend: Backend, barrier: Any, start: Any, leads: bool) -> _Answer:
    cuda = backend.device.type == "cuda"
    fleet = device_fleet(order.shapes, backend.device, order.seed, order.pool)
    out = allocate(fleet.groups)
    factorise_groups(fleet.groups, backend, out=out)
    if any(bool((result.path == FAILED).any()) for result in out):
        raise LoraForgeError("left matrices unfactorised", key=METHOD)
    errors = [group_errors(group, result, backend) for group, result in zip(fleet.groups, out, strict=True)]
    if cuda:
        torch.cuda.empty_cache()  # what the checks took
    seconds, stages = [], []
    for number in range(-order.warmups, order.passes):
        clock = EventStages() if cuda else Stages()
        begun = _together(barrier, start, leads, cuda)
        factorise_groups(fleet.groups, backend, out=out, clock=clock)
        if cuda:
            torch.cuda.synchronize()
        taken = time.perf_counter() - begun
        if number >= 0:
            seconds.append(taken)
            stages.append(clock.collect() if isinstance(clock, EventStages) else clock.seconds)
    ranks = _by_rank(fleet, backend) if order.ranks else {}
    del fleet, out
    if cuda:
        torch.cuda.empty_cache()
    return _Answer(
        seconds,
        stages,
        max(float(action.max()) for action, _ in errors),
        max(float(spectrum.max()) for _, spectrum in errors),
        ranks,
    )


def _together(barrier: Any, start: Any, leads: bool, cuda: bool) -> float:
    """Return at one moment in all processes: that moment, by ``time.perf_counter``, which they share."""
    if cuda:
        torch.cuda.synchronize()
    barrier.wait(PATIENCE_S)
    if leads:
        start.value = time.perf_counter() + HEAD_START_S
    barrier.wait(PATIENCE_S)
    moment = float(start.value)
    while time.perf_counter() < moment:
        pass
    return moment


def _by_rank(fleet: DeviceFleet, backend: Backend) -> dict[int, float]:
    """Seconds a matrix by rank: the better of two runs over all of that rank."""
    found = {}
    for rank in sorted({group.key[2] for group in fleet.groups}):
        groups = [group for group in fleet.groups if group.key[2] == rank]
        out, times = allocate(groups), []
        for _ in range(2):
            started = time.perf_counter()
            factorise_groups(groups, backend, out=out)
            if backend.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        found[rank] = min(times) / sum(len(group) for group in groups)
    return found
