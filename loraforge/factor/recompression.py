"""Time every recompression method on one fleet, in one process, and check every result.

Protocol (after paper, section B.2): FP32 factors with the scale folded in are in memory before the clock
starts; whole-fleet passes of the methods are interleaved in a randomised order after warm-ups; matrices of
equal shape are grouped across adapters. All methods take the same batches on the same worker threads, so
that a method which works a pair at a time still keeps every core busy. Loading, grouping and checks are not timed.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError, UsageError
from loraforge.factor.baselines.florist import florist
from loraforge.factor.baselines.fraq import MAX_BATCH, fraq
from loraforge.factor.baselines.spectral_transform import spectral_transform
from loraforge.factor.batch import Batch, Ordered
from loraforge.factor.engine import (
    MAX_ACTION_ERROR,
    MAX_SPECTRUM_ERROR,
    action_errors,
    construct,
    group_by_shape,
    spectrum_errors,
)
from loraforge.factor.pool import Pool, worker_pool
from loraforge.factor.reference import reference_spectrum
from loraforge.factor.stages import Stages
from loraforge.fleet.peft_io import Adapter
from loraforge.progress import progress

Recompress = Callable[[Tensor, Tensor, Stages], Ordered]


def _gram(a: Tensor, b: Tensor, stages: Stages) -> Ordered:
    """The path ``auto`` without its checks: FP64-Gram, and TSQR for the matrices that it flags."""
    with stages("load"):
        batch = Batch.of(a, b, torch.ones(len(a), dtype=torch.float64))
    ordered, index = construct(batch, "gram", stages)
    if len(index) == len(batch):
        return ordered
    flagged = torch.ones(len(batch), dtype=torch.bool)
    flagged[index] = False
    fallback, rest = construct(batch.select(flagged.nonzero().squeeze(-1)), "tsqr", stages)
    order = torch.cat([index, flagged.nonzero().squeeze(-1)[rest]]).argsort()
    return Ordered(*(torch.cat([getattr(ordered, n), getattr(fallback, n)])[order] for n in ("s", "a", "b")))


def _tsqr(a: Tensor, b: Tensor, stages: Stages) -> Ordered:
    with stages("load"):
        batch = Batch.of(a, b, torch.ones(len(a), dtype=torch.float64))
    return construct(batch, "tsqr", stages)[0]


METHODS: Mapping[str, Recompress] = {
    "florist": florist,
    "florist_batched": partial(florist, batched=True),
    "spectral_transform": spectral_transform,
    "spectral_transform_batched": partial(spectral_transform, batched=True),
    "fraq": fraq,
    "tsqr": _tsqr,
    "gram": _gram,
}
DEFAULT_METHODS = ("florist", "spectral_transform", "fraq", "tsqr", "gram")


@dataclass(frozen=True)
class ScaledBatch:
    """Factors of equal shape with the scale folded into B: ``a`` [m, r, d_in], ``b`` [m, d_out, r], FP32."""

    a: Tensor
    b: Tensor


def load_scaled(adapters: Sequence[Adapter], *, max_batch: int = MAX_BATCH) -> list[ScaledBatch]:
    """Read a fleet into batches of at most ``max_batch`` matrices, grouped by shape across adapters."""
    modules = {(adapter.name, module.name): module for adapter in adapters for module in adapter.modules}
    pairs: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
    for adapter in adapters:
        with adapter.reader() as reader:
            for module in adapter.modules:
                a, b = reader.factors(module)
                scaled = (b.to(torch.float64) * module.scale).to(torch.float32)
                pairs[adapter.name, module.name] = a.to(torch.float32), scaled
    groups = group_by_shape(
        ((key, m.d_in, m.d_out, m.rank) for key, m in modules.items()), max_batch=max_batch
    )
    return [
        ScaledBatch(
            torch.stack([pairs[key][0] for key in keys]), torch.stack([pairs[key][1] for key in keys])
        )
        for keys in groups
    ]


def benchmark(
    adapters: Sequence[Adapter],
    *,
    methods: Sequence[str] = DEFAULT_METHODS,
    warmups: int = 1,
    passes: int = 3,
    workers: int | None = None,
    seed: int = 20261130,
) -> list[dict[str, Any]]:
    """Time and check ``methods`` on the whole fleet; the records of target ``recompression``.

    One record a method and pass: ``{"method", "pass", "seconds", "stages"}``; ``stages`` are seconds by stage
    averaged over the worker threads, and sum to less than ``seconds`` by what threads wait. One a method:
    ``{"record": "check", "method", "max_action_error", "max_spectrum_error", "n"}`` over all n matrices, in
    FP64 and against the FP64 reference spectrum.
    Raises UsageError for an unknown method, LoraForgeError where a method fails acceptance.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        raise UsageError(
            f"unknown method {unknown[0]!r}" if unknown else "no method named",
            key="methods",
            remedy=f"choose from {', '.join(METHODS)}",
        )
    batches = load_scaled(adapters)
    order = random.Random(seed)
    records: list[dict[str, Any]] = []
    with (
        worker_pool(workers) as pool,
        progress("recompression", len(methods) * (1 + warmups + passes)) as ticker,
    ):
        for method in methods:
            records.append(_check(method, batches, pool))
            ticker.advance(f"{method} checked")
        for number in range(-warmups, passes):
            for method in order.sample(list(methods), len(methods)):
                seconds, stages = _timed_pass(METHODS[method], batches, pool)
                if number >= 0:
                    records.append({"method": method, "pass": number, "seconds": seconds, "stages": stages})
                ticker.advance(f"{method} {seconds:.2f} s")
    return records


def _timed_pass(
    recompress: Recompress, batches: Sequence[ScaledBatch], pool: Pool
) -> tuple[float, dict[str, float]]:
    def run(batch: ScaledBatch) -> tuple[Ordered, Stages]:
        stages = Stages()
        return recompress(batch.a, batch.b, stages), stages

    gc.collect()
    started = time.perf_counter()
    results = pool.map(run, batches)
    seconds = time.perf_counter() - started
    total = Stages()
    for _, stages in results:
        total.merge(stages)
    return seconds, {name: value / pool.workers for name, value in total.seconds.items()}


def _check(method: str, batches: Sequence[ScaledBatch], pool: Pool) -> dict[str, Any]:
    def errors(batch: ScaledBatch) -> tuple[float, float]:
        ordered = METHODS[method](batch.a, batch.b, Stages())
        truth = Batch.of(batch.a, batch.b, torch.ones(len(batch.a), dtype=torch.float64))
        spectrum = spectrum_errors(reference_spectrum(truth), ordered.s)
        return float(action_errors(truth, ordered).max()), float(spectrum.max())

    found = pool.map(errors, batches)
    action, spectrum = max(error[0] for error in found), max(error[1] for error in found)
    if not (action < MAX_ACTION_ERROR and spectrum < MAX_SPECTRUM_ERROR):
        raise LoraForgeError(
            f"fails acceptance on this fleet: action error {action:.1e}, spectrum error {spectrum:.1e}",
            key=method,
            remedy="leave the method out; its time would mean nothing",
        )
    return {
        "record": "check",
        "method": method,
        "max_action_error": action,
        "max_spectrum_error": spectrum,
        "n": sum(len(batch.a) for batch in batches),
    }
