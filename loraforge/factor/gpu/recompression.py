"""Time recompression of a shape fleet on one device, every method in one process, and check every result.

Protocol (after paper, section B.2): FP32 inputs and full-rank outputs are on the device before the clock starts;
passes of the methods are interleaved in a random order after warm-ups, each between two synchronisations;
allocations, eigensolver and output copies are timed, generation and checks are not. Stages are intervals between
CUDA events. FraQ is matched: the paper's batches of 24, the same eigensolver as every other method, torch's QR.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError, UsageError
from loraforge.factor.baselines.florist import florist
from loraforge.factor.baselines.fraq import MAX_BATCH
from loraforge.factor.baselines.spectral_transform import spectral_transform
from loraforge.factor.batch import Ordered
from loraforge.factor.engine import MAX_ACTION_ERROR, MAX_SPECTRUM_ERROR
from loraforge.factor.gpu.check import group_errors, prefix_errors
from loraforge.factor.gpu.engine import FAILED, Group, GroupFactors, allocate, factorise_groups
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.gpu.synthetic import DeviceFleet, reordered, sample
from loraforge.factor.stages import Stages
from loraforge.progress import progress

METHODS = (
    "gram",
    "gram_streams",
    "gram_deferred",
    "gram_deferred_uniform",
    "tsqr",
    "fraq",
    "fraq_batched",
    "spectral_transform",
    "florist",
)
DEFAULT_METHODS = ("gram", "gram_deferred", "gram_deferred_uniform", "tsqr", "fraq")
PAIRWISE = {"spectral_transform": spectral_transform, "florist": florist}
FRAQ_BATCH = 512

# of modules in the order of the fleet: (int64 [M] spectral, int64 [M] uniform) ranks, given spectra one after another
Allocate = Callable[[Tensor], tuple[Tensor, Tensor]]


class EventStages(Stages):
    """Stages by CUDA events on the current stream; ``seconds`` is filled by :meth:`collect`."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        yield
        end.record()
        self._events.append((name, start, end))

    def collect(self) -> dict[str, float]:
        for name, start, end in self._events:
            self.seconds[name] = self.seconds.get(name, 0.0) + start.elapsed_time(end) / 1e3
        return self.seconds


@dataclass
class Job:
    """One method over what it reads and writes. ``n`` is None where that is the whole fleet."""

    run: Callable[[Stages | None], object]
    check: Callable[[], tuple[float, float]]
    staged: bool = True
    n: int | None = None
    matrices: int = 0
    written: int = 0  # directions times their parameters in the outputs


def benchmark_device(
    fleet: DeviceFleet,
    backend: Backend,
    allocate_ranks: Allocate,
    *,
    methods: Sequence[str] = DEFAULT_METHODS,
    warmups: int = 2,
    passes: int = 5,
    subset: int | None = None,
    seed: int = 20261130,
) -> list[dict[str, Any]]:
    """Records of target ``recompression``, each with the name of the fleet; floors for our methods.

    The pair-at-a-time baselines take minutes a pass: with ``subset`` they run on a stratified sample of at least
    so many matrices, and their records say so in ``n``. Raises UsageError for an unknown method, LoraForgeError
    where a method fails acceptance.
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
        for method, job in jobs.items():
            job.run(None)
            action, spectrum = job.check()
            if not (action < MAX_ACTION_ERROR and spectrum < MAX_SPECTRUM_ERROR):
                raise LoraForgeError(
                    f"fails acceptance on {name}: action error {action:.1e}, spectrum error {spectrum:.1e}",
                    key=method,
                    remedy="leave the method out; its time would mean nothing",
                )
            records.append(
                {
                    "record": "check",
                    "fleet": name,
                    "method": method,
                    "max_action_error": action,
                    "max_spectrum_error": spectrum,
                    "n": job.matrices,
                }
            )
            ticker.advance(f"{method} checked: {action:.1e}, {spectrum:.1e}")
        order = random.Random(seed)
        for number in range(-warmups, passes):
            for method in order.sample(list(jobs), len(jobs)):
                seconds, stages = _timed(jobs[method], cuda)
                if number >= 0:
                    record = {
                        "fleet": name, "method": method, "pass": number, "seconds": seconds, "stages": stages
                    }  # fmt: skip
                    records.append(record if jobs[method].n is None else record | {"n": jobs[method].n})
                ticker.advance(f"{method} {seconds:.4f} s")
    if cuda:
        records += [
            {"record": "floor", "fleet": name, "method": method, **floor}
            for method, floors in _floors(fleet, jobs, backend).items()
            for floor in floors
        ]
    return records


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
        if method in PAIRWISE:
            part = fleet if subset is None else sample(fleet, subset)
            target = out if subset is None else allocate(part.groups)
            run = partial(_pairwise, method, part.groups, target)
            jobs[method] = _job(part.groups, target, backend, run)
            jobs[method].n = None if subset is None else part.n
        elif method.startswith("fraq"):
            batch = MAX_BATCH if method == "fraq" else FRAQ_BATCH
            jobs[method] = _job(fleet.groups, out, backend, partial(fraq, fleet.groups, out, backend, batch))
        elif method.startswith("gram_deferred"):
            ks = spectral if method == "gram_deferred" else uniform
            jobs[method] = _deferred_job(fleet, out, backend, ks)
        else:
            jobs[method] = _job(
                fleet.groups, out, backend, partial(_ours, method, fleet.groups, out, backend)
            )
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


def _job(
    groups: Sequence[Group],
    out: Sequence[GroupFactors],
    backend: Backend,
    run: Callable[[Stages | None], object],
) -> Job:
    def check() -> tuple[float, float]:
        found = [group_errors(group, result, backend) for group, result in zip(groups, out, strict=True)]
        return max(float(e[0].max()) for e in found), max(float(e[1].max()) for e in found)

    return Job(run, check, matrices=sum(len(group) for group in groups), written=_written(out))


def _deferred_job(
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

    return Job(run, check, matrices=fleet.n, written=_written(out))


def _written(out: Sequence[GroupFactors]) -> int:
    return sum(part.a.numel() + part.b.numel() for result in out for part in result.parts)


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


def _pairwise(
    method: str, groups: Sequence[Group], out: Sequence[GroupFactors], stages: Stages | None
) -> None:
    for group, result in zip(groups, out, strict=True):
        for index in range(len(group)):
            rows = slice(index, index + 1)
            _store(result, rows, PAIRWISE[method](group.a[rows], group.b[rows], stages or Stages()))


def fraq(
    groups: Sequence[Group],
    out: Sequence[GroupFactors],
    backend: Backend,
    batch: int,
    stages: Stages | None,
) -> None:
    """Matched FraQ over whole groups in batches of at most ``batch``."""
    clock = stages or Stages()
    for group, result in zip(groups, out, strict=True):
        for start in range(0, len(group), batch):
            rows = slice(start, min(len(group), start + batch))
            _store(result, rows, _fraq_batch(group.a[rows], group.b[rows], backend, clock))


def _fraq_batch(a: Tensor, b: Tensor, backend: Backend, stages: Stages) -> Ordered:
    """As :mod:`loraforge.factor.baselines.fraq`, with the batched eigensolver."""
    transposed = b.shape[1] > a.shape[2]
    x, y = (a.mT, b.mT) if transposed else (b, a)
    with stages("qr"):
        q, r = torch.linalg.qr(x)
    with stages("gram"):
        h = r.to(torch.float64) @ y.to(torch.float64)
        gram = h @ h.mT
    with stages("evd"):
        w, rows = backend.eigh(gram)
    with stages("apply"):
        s = w.clamp_min(0.0).sqrt()
        live = s > s[:, :1] * torch.finfo(torch.float64).eps ** 0.5
        inverse = torch.where(live, torch.where(live, s, 1.0).rsqrt(), 0.0)
        left = (q.to(torch.float64) @ (rows.mT * s.sqrt()[:, None, :])).to(torch.float32)
        right = ((inverse[:, :, None] * rows) @ h).to(torch.float32)
        return Ordered(s, left.mT, right.mT) if transposed else Ordered(s, right, left)


def _store(result: GroupFactors, rows: slice, ordered: Ordered) -> None:
    (part,) = result.parts
    result.s[rows] = ordered.s
    part.a[rows] = ordered.a
    part.b[rows] = ordered.b


def _floors(fleet: DeviceFleet, jobs: dict[str, Job], backend: Backend) -> dict[str, list[dict[str, Any]]]:
    """Least seconds of the stages of our methods: bytes that must move, and FP64 operations, at measured rates."""
    copy, fp64 = copy_rate(backend.device), fp64_rate(backend.device)
    x = y = products = applied = 0.0
    for group in fleet.groups:
        d_in, d_out, rank = group.key
        m, small, large = len(group), min(d_in, d_out), max(d_in, d_out)
        x, y = x + 4.0 * m * rank * small, y + 4.0 * m * rank * large
        products += float(m) * rank * (rank + 1) * (small + large)
        applied += 2.0 * m * rank * rank * (small + large)

    def floor(stage: str, bound: str, amount: float) -> dict[str, Any]:
        rate = copy if bound == "bytes" else fp64
        return {
            "stage": stage,
            "bound": bound,
            "amount": amount,
            "rate": rate,
            "seconds": amount / rate,
        }

    found = {}
    for method, job in jobs.items():
        # reflectors are as large as X: written by the factorisation, read by the product
        if method == "tsqr":
            first = [floor("qr", "bytes", 2 * x), floor("gram", "bytes", y)]
        elif method.startswith("gram"):
            first = [floor("gram", "bytes", x + y), floor("gram", "flops", products)]
        else:
            continue
        share = job.written * 4 / (x + y)
        apply = [floor("apply", "bytes", x + y + 4.0 * job.written)]
        if method != "tsqr":
            apply.append(floor("apply", "flops", applied * share))
        found[method] = first + apply
    return found


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy on the device: the best of five."""
    source = torch.empty(1 << 30, dtype=torch.float32, device=device).zero_()
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / _best(lambda: target.copy_(source))


def fp64_rate(device: torch.device) -> float:
    """FP64 operations a second of a large matrix product of random numbers: the best of five."""
    n = 8192
    left = torch.randn(n, n, dtype=torch.float64, device=device)
    out = torch.empty_like(left)
    return 2.0 * n**3 / _best(lambda: torch.mm(left, left, out=out))


def _best(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(5):
        stages = EventStages()
        with stages("work"):
            work()
        torch.cuda.synchronize()
        times.append(stages.collect()["work"])
    return min(times)
