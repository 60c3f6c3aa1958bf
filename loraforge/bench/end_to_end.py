"""The product's chain timed from files to files, with and without keeping its factor cache."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from loraforge.allocate.budget import Budget
from loraforge.compress import Compressed, compress
from loraforge.factor.gpu.ops import Backend
from loraforge.progress import progress

Arm = Literal["deferred", "cached"]
ARMS: tuple[Arm, ...] = get_args(Arm)


def benchmark(
    name: str,
    source: Sequence[Path],
    budget: Budget,
    out: Path,
    backend: Backend,
    *,
    warmups: int = 1,
    passes: int = 3,
    arms: Sequence[Arm] = ARMS,
) -> list[dict[str, Any]]:
    """Time :func:`loraforge.compress.compress` (spectral policy, ragged layout, BF16) on a fleet; the records of target
    ``end_to_end_compression``.

    Arm ``deferred`` keeps no cache, and builds only the directions that ``budget`` keeps; ``cached`` starts from an
    empty cache beside ``out`` and fills it. Every pass starts from files (which the system may hold in memory) and ends
    with files, manifest and hashes included; what the one before wrote is removed in between, untimed. Pinned memory
    and kernels are there after a warm-up. The last output stays in ``out``. ``backend`` is the one that compress finds
    here: on it the floor is measured, the rate of a copy to the device, which all bytes of the weights must take once.
    """
    records: list[dict[str, Any]] = []
    cache = out.with_name(f"{out.name}.cache")
    error, n = 0.0, 0
    with progress(f"end to end {name}", len(arms) * (warmups + passes)) as ticker:
        for arm in arms:
            for number in range(-warmups, passes):
                for folder in (out, cache):
                    shutil.rmtree(folder, ignore_errors=True)
                started = time.perf_counter()
                kept = cache if arm == "cached" else None
                done = compress(source, budget, out, cache=kept, policy="spectral", layouts=("ragged",))
                seconds = time.perf_counter() - started
                entries = [m for a in done.manifest.adapters.values() for m in a.modules.values()]
                error = max(error, *(entry.certificate.action_error for entry in entries))
                n = len(entries)
                if number >= 0:
                    records.append(_pass(name, arm, number, seconds, budget, done))
                ticker.advance(f"{arm} {seconds:.2f} s")
            shutil.rmtree(cache, ignore_errors=True)
    records.append({"record": "check", "fleet": name, "max_action_error": error, "n": n})
    if backend.device.type == "cuda":
        rate = host_copy_rate(backend.device)
        records.append({"record": "floor", "fleet": name, "rate": rate})
    return records


def _pass(
    name: str, arm: Arm, number: int, seconds: float, budget: Budget, done: Compressed
) -> dict[str, Any]:
    stages = dict(done.seconds)
    stages["load"] = stages.get("load", 0.0) + stages.pop("verify")  # opening is part of loading
    adapters = done.manifest.adapters.values()
    return {
        "fleet": name,
        "arm": arm,
        "pass": number,
        "seconds": seconds,
        "stages": stages,
        "budget": budget.value,
        "bytes_in": sum(adapter.original_bytes for adapter in adapters),
        "bytes_out": sum(adapter.layouts["ragged"].bytes for adapter in adapters),
    }


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
