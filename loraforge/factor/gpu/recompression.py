"""Time recompression of a shape fleet on one device, every method in one process, and check every result.

Protocol (after paper, section B.2): FP32 inputs and full-rank outputs are on the device before the clock starts;
passes of the methods are interleaved in a random order after warm-ups, each between two synchronisations;
allocations, eigensolver and output copies are timed, generation and checks are not. Stages are intervals between
CUDA events. Every method has the same eigensolver (see :mod:`loraforge.factor.gpu.baselines`), but for those that
work a pair at a time, whose SVD is the library's.

A method that needs minutes is timed in one pass over the whole fleet where a budget of seconds says so, or on a
sample where one is asked for. Its records say which: ``n`` is there for a sample alone, and a record ``protocol`` has
the warm-ups and passes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError, UsageError
from loraforge.factor.engine import MAX_ACTION_ERROR, MAX_SPECTRUM_ERROR
from loraforge.factor.gpu import baselines, floors
from loraforge.factor.gpu.check import group_errors, prefix_errors
from loraforge.factor.gpu.engine import FAILED, Group, GroupFactors, allocate, factorise_groups
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.gpu.synthetic import DeviceFleet, reordered, sample
from loraforge.factor.gpu.timing import EventStages
from loraforge.factor.stages import Stages
from loraforge.progress import progress

OURS = ("gram", "gram_streams", "gram_deferred", "gram_deferred_uniform", "tsqr")
METHODS = (*OURS, *baselines.METHODS)
DEFAULT_METHODS = ("gram", "gram_deferred", "gram_deferred_uniform", "tsqr", "fraq")
PILOT = 100  # matrices, at least, of the sample that warms up a method which goes over a fleet pair by pair

# of modules in the order of the fleet: (int64 [M] spectral, int64 [M] uniform) ranks, given spectra one after another
Allocate = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class Job:
    """One method over what it reads and writes: ``matrices`` of them, of a sample where ``sampled``."""

    run: Callable[[Stages | None], object]
    check: Callable[[], tuple[float, float]]
    matrices: int
    out: Sequence[GroupFactors]
    staged: bool = True
    sampled: bool = False
    pilot: Job | None = None  # the same on a sample, for a warm-up


@dataclass
class _Course:
    """What a method has done and is still to do of ``warmups`` and ``passes`` that are asked for."""

    job: Job
    warmups: int
    passes: int
    budget: float | None
    warmed: int = 0
    timed: int = 0
    estimate: float = 0.0
    cut: bool = False

    def expect(self, seconds: float) -> None:
        """Leave all but one pass out where the whole, of runs of ``seconds``, is beyond the budget."""
        self.estimate = seconds
        self.cut = self.budget is not None and (self.warmups + self.passes) * seconds > self.budget

    def takes(self, number: int) -> bool:
        """Whether the method runs in round ``number``: warm-ups have negative ones."""
        return number == 0 if self.cut else -self.warmups <= number < self.passes

    def record(self) -> dict[str, Any]:
        over = self.job if self.warmed else self.job.pilot
        stated = {} if self.budget is None else {"budget_s": self.budget}
        return {
            "record": "protocol",
            "warmups": self.warmed,
            "warmup_matrices": 0 if over is None else over.matrices,
            "passes": self.timed,
            "estimate_s": self.estimate,
            **stated,
        }


def benchmark_device(
    fleet: DeviceFleet,
    backend: Backend,
    allocate_ranks: Allocate,
    *,
    methods: Sequence[str] = DEFAULT_METHODS,
    warmups: int = 2,
    passes: int = 5,
    subset: int | None = None,
    budget: float | None = None,
    seed: int = 20261130,
) -> list[dict[str, Any]]:
    """Records of target ``recompression``, each with the name of the fleet; floors for our methods.

    A method whose warm-ups and passes would take longer than ``budget`` seconds is timed in one pass. What tells is
    its first warm-up, or for methods that work a pair at a time, which take minutes a pass, a run over a sample.
    With ``subset`` those are timed on a stratified sample of at least so many matrices alone.

    Each method is checked after its first run over all that it is timed on. Raises UsageError for an unknown method,
    LoraForgeError where a method fails acceptance.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        raise UsageError(
            f"unknown method {unknown[0]!r}" if unknown else "no method named",
            key="methods",
            remedy=f"choose from {', '.join(METHODS)}",
        )
    name, cuda = fleet.shapes.name, backend.device.type == "cuda"
    records: list[dict[str, Any]] = []
    with progress(f"recompression {name}", 1 + len(methods) * (1 + warmups + passes)) as ticker:
        jobs = _jobs(fleet, backend, allocate_ranks, methods, subset)
        ticker.advance(f"{fleet.n} matrices on {backend.device}")
        courses = {method: _Course(job, warmups, passes, budget) for method, job in jobs.items()}
        for course in courses.values():
            if course.job.pilot is not None:
                course.expect(_pilot(course.job, course.job.pilot, cuda))
        order = random.Random(seed)
        for number in range(-warmups, passes):
            for method in order.sample(list(jobs), len(jobs)):
                course = courses[method]
                if not course.takes(number):
                    continue
                seconds, stages = _timed(course.job, cuda)
                if number >= 0:
                    record = {
                        "fleet": name, "method": method, "pass": number, "seconds": seconds, "stages": stages
                    }  # fmt: skip
                    records.append(record | ({"n": course.job.matrices} if course.job.sampled else {}))
                if not course.warmed + course.timed:
                    records.append({"fleet": name, "method": method, **_checked(method, course.job, name)})
                    course.expect(seconds)
                course.warmed, course.timed = course.warmed + (number < 0), course.timed + (number >= 0)
                ticker.advance(f"{method} {seconds:.4f} s")
        records += [
            {"fleet": name, "method": method, **course.record()} for method, course in courses.items()
        ]
    if cuda:
        rates = floors.rates(backend.device)
        for method in (method for method in methods if method in OURS):
            found = floors.amounts("tsqr" if method == "tsqr" else "gram", fleet.groups, jobs[method].out)
            records += [{"fleet": name, "method": method, **f} for f in floors.records(found, rates)]
    return records


def _checked(method: str, job: Job, fleet: str) -> dict[str, Any]:
    action, spectrum = job.check()
    if not (action < MAX_ACTION_ERROR and spectrum < MAX_SPECTRUM_ERROR):
        raise LoraForgeError(
            f"fails acceptance on {fleet}: action error {action:.1e}, spectrum error {spectrum:.1e}",
            key=method,
            remedy="leave the method out; its time would mean nothing",
        )
    return {
        "record": "check",
        "max_action_error": action,
        "max_spectrum_error": spectrum,
        "n": job.matrices,
    }


def _pilot(job: Job, pilot: Job, cuda: bool) -> float:
    """Seconds that a run would take, by the second one over the sample: the first also sets the library up."""
    _timed(pilot, cuda)
    return _timed(pilot, cuda)[0] * job.matrices / pilot.matrices


def _timed(job: Job, cuda: bool) -> tuple[float, dict[str, float]]:
    stages = (EventStages() if cuda else Stages()) if job.staged else None
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    job.run(stages)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    if isinstance(stages, EventStages):
        return seconds, stages.collect()
    return seconds, {} if stages is None else stages.seconds


def _jobs(
    fleet: DeviceFleet,
    backend: Backend,
    allocate_ranks: Allocate,
    methods: Sequence[str],
    subset: int | None,
) -> dict[str, Job]:
    out = allocate(fleet.groups)
    factorise_groups(fleet.groups, backend, out=out)
    spectral, uniform = _by_group(fleet, out, allocate_ranks)
    # the order of a loader that knows the allocation; every method gets the same fleet
    fleet, spectral = reordered(fleet, spectral)
    uniform = [torch.full_like(k, int(u[0])) for k, u in zip(spectral, uniform, strict=True)]
    factorise_groups(fleet.groups, backend, out=out)
    jobs: dict[str, Job] = {}
    for method in methods:
        if method in baselines.PAIRWISE:
            part = sample(fleet, PILOT if subset is None else subset)
            pilot = _baseline(method, part, allocate(part.groups), backend)
            pilot.sampled = True
            jobs[method] = pilot if subset is not None else _baseline(method, fleet, out, backend)
            jobs[method].pilot = pilot if subset is None else None
        elif method in baselines.METHODS:
            jobs[method] = _baseline(method, fleet, out, backend)
        elif method.startswith("gram_deferred"):
            jobs[method] = _deferred(fleet, out, backend, spectral if method == "gram_deferred" else uniform)
        else:
            run = partial(_ours, method, fleet.groups, out, backend)
            jobs[method] = _job(fleet, out, backend, run)
            jobs[method].staged = method != "gram_streams"
    return jobs


def _by_group(
    fleet: DeviceFleet, results: Sequence[GroupFactors], allocate_ranks: Allocate
) -> tuple[list[Tensor], list[Tensor]]:
    """Ranks to keep, by group, from the measured spectra."""
    spectra: list[Tensor] = [torch.empty(0)] * fleet.n
    for members, result in zip(fleet.members, results, strict=True):
        for index, s in zip(members.tolist(), result.s.cpu(), strict=True):
            spectra[index] = s
    spectral, uniform = allocate_ranks(torch.cat(spectra))
    return [spectral[m] for m in fleet.members], [uniform[m] for m in fleet.members]


def _baseline(method: str, fleet: DeviceFleet, out: Sequence[GroupFactors], backend: Backend) -> Job:
    return _job(fleet, out, backend, partial(baselines.run, method, fleet.groups, out, backend))


def _job(
    fleet: DeviceFleet,
    out: Sequence[GroupFactors],
    backend: Backend,
    run: Callable[[Stages | None], object],
) -> Job:
    def check() -> tuple[float, float]:
        found = [group_errors(*each, backend) for each in zip(fleet.groups, out, strict=True)]
        return max(float(e[0].max()) for e in found), max(float(e[1].max()) for e in found)

    return Job(run, check, fleet.n, out)


def _deferred(
    fleet: DeviceFleet, full: Sequence[GroupFactors], backend: Backend, ks: Sequence[Tensor]
) -> Job:
    out = allocate(fleet.groups, ks)

    def run(stages: Stages | None) -> None:
        factorise_groups(fleet.groups, backend, out=out, clock=stages)

    def check() -> tuple[float, float]:
        """Against the prefixes of full factors, which are made anew and are themselves checked as ``gram``."""
        factorise_groups(fleet.groups, backend, out=full)
        action, spectrum = [], []
        for group, whole, part in zip(fleet.groups, full, out, strict=True):
            action.append(float(prefix_errors(whole, part, group.a.shape[2]).max()))
            spectrum.append(float(((whole.s - part.s).abs().amax(-1) / whole.s[:, 0]).max()))
            action.append(float(group_errors(group, whole, backend)[0].max()))
        return max(action), max(spectrum)

    return Job(run, check, fleet.n, out)


def _ours(
    method: str,
    groups: Sequence[Group],
    out: Sequence[GroupFactors],
    backend: Backend,
    stages: Stages | None,
) -> None:
    results = factorise_groups(
        groups,
        backend,
        method="tsqr" if method == "tsqr" else "auto",
        out=out,
        streams=2 if method == "gram_streams" else 1,
        unit=1024 if method == "gram_streams" else 8192,
        clock=stages,
    )
    if any(bool((result.path == FAILED).any()) for result in results):
        raise LoraForgeError("left matrices unfactorised", key=method)
