"""How time and memory grow with the number of adapters: the records of target ``scale``.

Fleets of adapters alike, of a small rank on every module of Qwen3-4B, each with factors of its own; the smaller fleets
are the first adapters of the largest. Every step is a process of its own, so that its peak is its own. Of factors only
spectra are kept: those of 1,000 adapters would take 4 bytes a parameter in the cache, and nothing here reads them.
"""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from loraforge.allocate.allocation import allocation_file, save_allocation
from loraforge.allocate.budget import parse_budget
from loraforge.allocate.policy import allocate, problem_of
from loraforge.errors import LoraForgeError, OutputError
from loraforge.factor.gpu.synthetic import write_fleet
from loraforge.factor.known import SETTLED_S
from loraforge.factor.stages import Stages
from loraforge.factor.streaming import Streamed, stream_source
from loraforge.files import scratch_folder
from loraforge.fleet.shapes import ShapeFleet, repeated_fleet
from loraforge.garbage import uncollected
from loraforge.progress import say
from loraforge.threads import available_cpus

FLEET = "qwen50"  # whose base model the adapters are of
SEED = 20261130
# Parameters that are kept, in eighths of all. (Of rank 2, every fraction below 1 keeps rank 1: no choice at all.)
BUDGET, OTHER_BUDGET = 6, 5
LOST = 20  # one entry in so many is lost before a run that resumes
_GIB = 1 << 30
_CACHE_BYTES = 1 << 17  # an adapter's spectra and what is remembered of it, with room to spare


@dataclass(frozen=True)
class Step:
    """What one process does: over which adapters, with which cache, in how many threads; then under which budget, in
    eighths of the parameters, ranks are chosen for the file ``out`` (None: only factorise)."""

    source: tuple[Path, ...]
    cache: Path
    workers: int
    out: Path
    eighths: int | None


def benchmark(
    sizes: Sequence[int],
    rank: int,
    work: Path,
    *,
    workers: int | None = None,
    shapes: ShapeFleet | None = None,
) -> list[dict[str, Any]]:
    """Records of ``scale`` for fleets of ``sizes`` adapters, each at least 2.

    Steps over each fleet, in this order: ``factor``; ``allocate``; ``rebudget``, under another budget; ``add``, with
    one adapter more; ``remove``, with one less; ``resume``, after a twentieth of the entries were lost and the process
    that built them anew was killed half-way. Adapters and caches lie beside ``work`` and are removed. ``shapes``: those
    of one adapter more than the largest fleet has, by default of rank ``rank`` on all of Qwen3-4B. Raises OutputError
    where the disk has no room for them, LoraForgeError where a step fails.
    """
    most = max(sizes)
    threads = available_cpus() if workers is None else workers
    shapes = repeated_fleet(FLEET, most + 1, rank) if shapes is None else shapes
    each = shapes.n_parameters // (most + 1)
    _require_room(work, (most + 1) * (2 * each + 2 * _CACHE_BYTES))
    records: list[dict[str, Any]] = [
        {
            "record": "run",
            "base_model": shapes.base_model,
            "rank": rank,
            "modules": len(shapes.names) // (most + 1),
            "parameters": each,
            "threads": threads,
        }
    ]
    with scratch_folder(work) as scratch:
        folders = write_fleet(shapes, scratch / "adapters", torch.device("cpu"), SEED)
        time.sleep(SETTLED_S)  # what was written just now is not remembered
        for size in sorted(set(sizes)):
            with scratch_folder(scratch / f"fleet{size}") as place:
                place.mkdir(exist_ok=True)
                records += _measure(size, folders, place, threads)
    return records


def _require_room(work: Path, needed: int) -> None:
    place = next(folder for folder in work.absolute().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OutputError(
            f"the adapters take {needed / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB are free",
            path=place,
            remedy="name another folder with --work, or fewer adapters",
        )


def _measure(size: int, folders: Sequence[Path], place: Path, threads: int) -> list[dict[str, Any]]:
    cache, out = place / "cache", place / "allocation.json"

    def step(first: int, stop: int, eighths: int | None) -> Step:
        return Step(tuple(folders[first:stop]), cache, threads, out, eighths)

    def record(name: str, found: dict[str, Any]) -> dict[str, Any]:
        say(f"{size} adapters, {name}: {found['seconds']:.2f} s, {found['peak_gib']:.3f} GiB")
        return {"adapters": size, "step": name, **found}

    return [
        record("factor", _run(step(0, size, None))),
        record("resume", _resume(step(0, size, None))),
        record("allocate", _run(step(0, size, BUDGET))),
        record("rebudget", _run(step(0, size, OTHER_BUDGET))),
        record("add", _run(step(0, size + 1, BUDGET))),
        record("remove", _run(step(1, size, BUDGET))),
    ]


def _resume(step: Step) -> dict[str, Any]:
    folder = step.cache / "spectra"
    entries = _entries(folder)
    lost = entries[: max(2, len(entries) // LOST)]
    for entry in lost:
        entry.unlink()
    kept = len(entries) - len(lost)
    process, line = _start(step)
    try:
        while process.is_alive() and len(_entries(folder)) < kept + (len(lost) + 1) // 2:
            time.sleep(0.01)
        process.kill()
    finally:
        _end(process, line)
    done = len(_entries(folder)) - kept
    return {"lost": len(lost), "done_when_killed": done, **_run(step)}


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _run(step: Step) -> dict[str, Any]:
    """What a process of its own says of a step."""
    process, line = _start(step)
    try:
        message = line.recv()
    except EOFError as error:
        raise LoraForgeError(
            "the process of a step died",
            key=f"{len(step.source)} adapters",
            remedy="look for its message above; it may lack memory",
        ) from error
    finally:
        _end(process, line)
    if isinstance(message, LoraForgeError):
        raise message
    found: dict[str, Any] = message
    return found


def _start(step: Step) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    line, far = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(step, far), daemon=True)
    process.start()
    far.close()
    return process, line


def _end(process: BaseProcess, line: Connection) -> None:
    process.terminate()
    process.join()
    line.close()


def _work(step: Step, line: Connection) -> None:
    """What the process of a step does. It leaves an interrupt to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        line.send(_take(step))
    except LoraForgeError as error:
        line.send(error)


def _take(step: Step) -> dict[str, Any]:
    """What ``loraforge factor --keep spectra``, or ``loraforge allocate`` by the spectral policy, does once its modules
    are imported."""
    baseline, before = _peak_gib(), time.process_time()
    stages = Stages()
    with uncollected():
        with stages("spectra"):
            found = stream_source(
                step.source, step.cache, need="spectra", keep="spectra", workers=step.workers
            )
        record = _stated(found)
        if step.eighths is not None:
            with stages("allocate"):
                problem = problem_of(found.entries)
                budget = parse_budget(params=problem.parameters(problem.rank) * step.eighths // 8)
                chosen = allocate(problem, "spectral", budget)
            with stages("write"):
                save_allocation(allocation_file("scale", problem, chosen), step.out)
            record |= {"ceiling": chosen.ceiling.params, "spent": chosen.spent}
    return record | {
        "seconds": sum(stages.seconds.values()),
        "cpu_s": time.process_time() - before,
        "stages": stages.seconds,
        "baseline_gib": baseline,
        "peak_gib": _peak_gib(),
    }


def _stated(found: Streamed) -> dict[str, Any]:
    def worst(name: str) -> float:
        return max(float(entry.modules.columns[name].max()) for entry in found.entries)

    return {
        "fleet": len(found.entries),
        "read": found.read,
        "factorised": found.factorised,
        "max_action_error": worst("action_error"),
        "max_spectrum_error": worst("spectrum_error"),
    }


def _peak_gib() -> float:
    """The most memory that this process has had. Linux's ``ru_maxrss`` is that of its parent too."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / _GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB
