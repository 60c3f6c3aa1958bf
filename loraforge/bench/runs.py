"""Whole runs: the reported kernel benchmark, and tuning. Needs a GPU, Triton, and the engines' kernels."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loraforge.bench import cases as grids
from loraforge.bench.arms import Arm, Ours
from loraforge.bench.cases import SPECTRAL12, Case, Op, Work
from loraforge.bench.kernels import Journal, Workbench, describe, floor_us, run_works, uniform_ranks
from loraforge.bench.mix import layer_ranks
from loraforge.bench.native import sglang_csgmv, sglang_triton_v2, vllm_ops
from loraforge.bench.native.sglang_csgmv import Csgmv
from loraforge.bench.native.sglang_triton_v2 import TritonV2
from loraforge.bench.native.tiles import TunedTiles, lookup, read_tiles, write_tiles
from loraforge.bench.native.vllm_ops import VllmOps
from loraforge.bench.timing import Floors, measure_floors
from loraforge.bench.tune import NATIVE_NAME, kernels_of, tune, tune_tiles
from loraforge.dispatch import Table, choose, choose_pair
from loraforge.errors import LoraForgeError, MissingDependencyError
from loraforge.evidence.targets.expand_ablation import DIRECT, LIMITS, STAGED, arm
from loraforge.files import read_jsonl
from loraforge.jit import load
from loraforge.ops.choice import Choice, Kernel

SEED = 20261130
TUNING_SEED = 20261201  # other operands than the reported run's
TARGET: dict[Op, str] = {"shrink": "shrink_ablation", "expand": "expand_ablation", "lora": "dispatch"}
GROUPS = ("layer", "sweep", "ablation")

TUNED = "_tuned"
SHIPPED_RANKS = (8, 64)  # of the sweep, where kernels run by their shipped tiles beside the tuned ones
COMPILED_RANKS, COMPILED_TOKENS = (
    (8, 64, 128),
    (96, 1536),
)  # tuned cases that meet every kernel Triton compiles

DECODE = Choice(Kernel("direct"), Kernel("row_expand"))
PREFILL = Choice(Kernel("triton"), Kernel("triton"), tile=64)
FUSED = Choice(Kernel("fused"))


@dataclass(frozen=True)
class Setup:
    """Where engines and tuned tiles are, and the dispatch table that ``auto`` follows."""

    engines: Path
    table: Table | None = None
    tiles: Path | None = None

    def natives(self) -> list[Arm]:
        """The engines' kernels; tuned ones where there are tiles."""
        found: list[Arm] = [Csgmv(self.engines), TritonV2(self.engines), VllmOps(self.engines)]
        if self.tiles is not None:
            tuned = read_tiles(self.tiles)
            found.append(Csgmv(self.engines, f"csgmv{TUNED}", lookup(tuned, "csgmv")))
            found.append(VllmOps(self.engines, f"vllm{TUNED}", lookup(tuned, "vllm")))
        return found

    def arms(self) -> list[Arm]:
        """All of them: native ones, ours by force, and the automatic choice."""
        natives = self.natives()
        found: list[Arm] = [
            *natives,
            Ours("custom", lambda op, case: DECODE),
            Ours("segmented", lambda op, case: PREFILL),
            Ours("fused", lambda op, case: FUSED if op == "lora" and case.phase == "decode" else None),
        ]
        if self.table is not None:
            found.append(
                Ours(
                    "auto",
                    automatic(self.table),
                    next(n for n in reversed(natives) if n.name.startswith("csgmv")),
                )
            )
        return found


def automatic(table: Table) -> Callable[[Op, Case], Choice]:
    """The table's choice for a case; its pair where one product is asked for alone."""

    def chosen(op: Op, case: Case) -> Choice:
        select = choose if op == "lora" else choose_pair
        shape = case.projection
        return select(table, case.phase, shape.d_in, shape.channels, case.tokens, case.rank)

    return chosen


ABLATED_VARIANT = 3  # of RowExpand: the paper's, 256 threads that keep rows of every bucket in registers
ABLATED_THREADS = 256


def ablated() -> list[Arm]:
    """RowExpand at every tile limit, with Z staged in shared memory and not, and as it is by default."""

    def limited(limit: int, staged: int) -> Arm:
        options = {"tile_limit": limit, "staged": staged, "variant": ABLATED_VARIANT}
        choice = Choice(DECODE.shrink, Kernel("row_expand", options))
        return Ours(arm(STAGED if staged else DIRECT, limit), lambda op, case: choice)

    return [
        *(limited(limit, staged) for staged in (1, 0) for limit in LIMITS),
        Ours("production", lambda op, case: DECODE),
    ]


def resources() -> list[dict[str, Any]]:
    """Records of what the compiler made of the ablated kernels, by the runtime's own account."""
    attributes = load("lora", kind="nvcc" if torch.version.cuda else "hipcc").lf_lora_row_expand_attributes
    warps = torch.cuda.get_device_properties(_device()).max_threads_per_multi_processor // 32
    found = []
    for staged in (1, 0):
        for width in (1, 2, 4, 8, 16, 32, 64):
            values = [ctypes.c_int() for _ in range(4)]
            if attributes(width, staged, ABLATED_VARIANT, *map(ctypes.byref, values)) != 0:
                raise LoraForgeError("has no attributes", key=f"RowExpand variant {ABLATED_VARIANT}")
            registers, shared, local, blocks = (value.value for value in values)
            found.append(
                {
                    "record": "resources",
                    "staged": bool(staged),
                    "width": width,
                    "threads": ABLATED_THREADS,
                    "registers": registers,
                    "local_bytes": local,
                    "shared_bytes": shared,
                    "blocks_per_sm": blocks,
                    "occupancy": round(blocks * (ABLATED_THREADS // 32) / warps, 4),
                }
            )
    return found


def run_kernels(
    setup: Setup,
    out: Path,
    *,
    groups: Sequence[str] = GROUPS,
    spectra: Path | None = None,
    budget_s: float | None = None,
    workers: int = 0,
    flushed: bool = True,
    say: Callable[[str], object] = print,
) -> bool:
    """Write ``out``/<target>.jsonl for the three targets, or go on with them; False where the budget ended first.

    groups: of GROUPS. spectra: measured spectra that mixed ranks come from. workers: processes that compile what the
    engines' kernels need beforehand.
    """
    device = _device()
    mixed = layer_ranks(_pool(spectra))
    layers = list(grids.layers({name: max(map(max, ranks)) for name, ranks in mixed.items()}))

    def ranks(case: Case) -> list[list[int]]:
        return mixed[case.projection.name] if case.mix == SPECTRAL12 else uniform_ranks(case)

    if workers:
        wanted = [case for layer in layers for case in layer.cases] if "layer" in groups else []
        wanted += [work.case for work in grids.sweep()] if "sweep" in groups else []
        compile_ahead(setup, wanted, workers)
        if setup.table is not None:
            chosen = automatic(setup.table)
            ops: tuple[Op, ...] = ("shrink", "expand", "lora")
            compile_choices([(op, case, chosen(op, case)) for case in wanted for op in ops], workers)
    bench = Workbench(device, SEED, ranks=ranks, flushed=flushed)
    journals = {op: Journal(Path(out) / f"{target}.jsonl", budget_s) for op, target in TARGET.items()}
    floors = measure_floors(bench.timer, device)
    for journal in journals.values():
        setting = _setting(setup, device, floors)
        if not journal.has(setting):
            journal.add(setting)
    arms = setup.arms()
    whole = True
    if "layer" in groups:
        for layer in layers:
            note: dict[str, Any] = {"group": "layer", "layer": layer.name}
            works = [Work(case, ("shrink", "expand", "lora")) for case in layer.cases]
            whole &= run_works(bench, works, arms, floors, journals, note=note, keep=4, say=say)
            if whole:
                _sequence(bench, layer.cases, arms, floors, journals["lora"], note, say)
    if "sweep" in groups and whole:
        note = {"group": "sweep", "layer": None}
        tuned = {each.name for each in arms if each.name.endswith(TUNED)}

        def untuned(each: Arm, case: Case) -> bool:
            return each.name + TUNED in tuned and case.rank not in SHIPPED_RANKS

        whole &= run_works(bench, grids.sweep(), arms, floors, journals, note=note, skip=untuned, say=say)
    if "ablation" in groups and whole:
        competing = [each for each in arms if each.name.startswith("csgmv")] + ablated()
        note = {"group": "ablation", "layer": None}
        works = [Work(case, ("expand",)) for case in grids.expand_ablation()]
        for record in resources():
            if not journals["expand"].has(record):
                journals["expand"].add(record)
        whole &= run_works(bench, works, competing, floors, journals, note=note, say=say)
    return whole


def _sequence(
    bench: Workbench,
    cases: Sequence[Case],
    arms: Sequence[Arm],
    floors: Floors,
    journal: Journal,
    note: Mapping[str, Any],
    say: Callable[[str], object],
) -> None:
    """The four projections one after another, as a layer of a captured step runs them."""
    record = describe(cases[0], "lora") | dict(note) | {"projection": "layer"}
    if journal.has(record):
        return
    operands = [bench.operands(case, keep=len(cases)) for case in cases]
    prepared = {}
    for each in arms:
        if not all(each.supports("lora", case) for case in cases):
            continue
        try:
            launches = [each.prepare("lora", item) for item in operands]
            for launch in launches:
                launch.run()
            torch.cuda.synchronize()
        except Exception as error:  # its own cells say so already
            say(f"layer {note['layer']}: {each.name} fails ({error})")
            continue
        prepared[each.name] = launches
    found = bench.sequence(prepared)
    floor = sum(floor_us("lora", item, floors) for item in operands)
    journal.add(record | {"floor_us": round(floor, 3), "arms": found})
    say(
        f"layer {note['layer']} {cases[0].phase} "
        + " ".join(f"{item['arm']}={statistics.median(item['warm_us']):.1f}" for item in found)
    )


def run_tuning(
    setup: Setup,
    table: Path,
    tiles: Path,
    *,
    workers: int = 0,
    say: Callable[[str], object] = print,
) -> Table:
    """Tune the engines' tiles, then our kernels against them; write both files.

    Whole updates by three blocks, warm and flushed, of which the geometric mean counts; single products, of which
    there are many, by two warm ones. The native path that a table may choose is CSGMV, tuned.
    """
    device = _device()
    bench = Workbench(device, TUNING_SEED, blocks=3)
    quick = Workbench(device, TUNING_SEED, blocks=2, flushed=False)
    engines: dict[str, tuple[Any, Mapping[Any, Any]]] = {
        "csgmv": (Csgmv, sglang_csgmv.TILES),
        "vllm": (VllmOps, vllm_ops.TILES),
    }
    if workers:
        compile_ahead(setup, list(grids.native_tuning()), workers, tuning=True)
        shapes = [
            case for case in grids.tuning() if case.rank in COMPILED_RANKS and case.tokens in COMPILED_TOKENS
        ]
        compile_choices(
            [(op, case, choice) for case in shapes for op, choice in kernels_of(case.phase)], workers
        )
    found: list[TunedTiles] = []
    for engine, (kind, tried) in engines.items():

        def measure(
            op: Op, case: Case, options: Sequence[Mapping[str, int] | None], kind: Any = kind
        ) -> list[float | None]:
            arms = [
                kind(setup.engines, str(index), lambda op, case, tiles=option: tiles)
                for index, option in enumerate(options)
            ]
            times = _times(quick, op, case, arms)
            return [times.get(str(index)) for index in range(len(options))]

        found += tune_tiles(engine, grids.native_tuning(), tried, measure)
        say(f"{engine}: tiles of {sum(item.engine == engine for item in found)} kernels")
    write_tiles(tiles, found)
    native = next(
        each for each in Setup(setup.engines, None, tiles).natives() if each.name == f"csgmv{TUNED}"
    )

    def compare(op: Op, case: Case, choices: Mapping[str, Choice]) -> dict[str, float]:
        ours: list[Arm] = [
            Ours(name, lambda op, case, choice=choice: choice)  # type: ignore[misc]
            for name, choice in choices.items()
        ]
        if op != "lora":
            return _times(quick, op, case, ours)
        times = _times(bench, op, case, [native, *ours])
        return times | ({NATIVE_NAME: times.pop(native.name)} if native.name in times else {})

    entries = []
    for case in grids.tuning():
        entries += tune([case], compare)
        say(f"{case.key} {entries[-1].choice} {entries[-1].speedup}")
    names = f"{sglang_csgmv.DISTRIBUTION}, {sglang_triton_v2.DISTRIBUTION}, {vllm_ops.DISTRIBUTION}"
    frozen = Table.freeze(
        torch.cuda.get_device_name(device),
        f"{len(entries)} cases of seed {TUNING_SEED} against {names}, default and tuned",
        entries,
    )
    frozen.write(table)
    return frozen


def _times(bench: Workbench, op: Op, case: Case, arms: Sequence[Arm]) -> dict[str, float]:
    """The geometric mean of warm and, where there are some, flushed medians, of the arms that pass their check."""
    return {
        record["arm"]: math.sqrt(
            statistics.median(record["warm_us"])
            * statistics.median(record["flushed_us" if "flushed_us" in record else "warm_us"])
        )
        for record in bench.cell(op, bench.operands(case), arms)
        if record["passed"]
    }


def compile_ahead(setup: Setup, cases: Sequence[Case], workers: int, *, tuning: bool = False) -> None:
    """Compile the engines' kernels for cases into Triton's cache, in processes of their own."""
    parts = [(setup, list(cases[index::workers]), tuning) for index in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(_compile, parts)


def _compile(setup: Setup, cases: Sequence[Case], tuning: bool) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bench = Workbench(_device(), SEED)
    arms = setup.natives()
    if tuning:
        for (op, phase), tried in sglang_csgmv.TILES.items():
            arms += [Csgmv(setup.engines, "", _for(op, phase, option)) for option in tried]
        for (op, phase), tried in vllm_ops.TILES.items():
            arms += [VllmOps(setup.engines, "", _for(op, phase, option)) for option in tried]
    for case in cases:
        if case.mix is not None:
            continue
        operands = bench.operands(case)
        for each in arms:
            try:
                each.prepare("lora", operands).run()
                torch.cuda.synchronize()
            except Exception:  # the benchmark itself records what fails
                continue


def compile_choices(jobs: Sequence[tuple[Op, Case, Choice]], workers: int) -> None:
    """Compile our Triton kernels likewise, each once a number of slices and a capacity."""
    distinct: dict[str, tuple[Op, Case, Choice]] = {}
    for op, case, choice in jobs:
        kernels = (choice.shrink, choice.expand)
        if case.mix is None and any(kernel is not None and kernel.backend == "triton" for kernel in kernels):
            shape = f"{len(case.projection.channels)} {case.capacity}"
            distinct.setdefault(f"{op} {shape} {choice.to_json()}", (op, case, choice))
    parts = [list(distinct.values())[index::workers] for index in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(_compile_choices, parts)


def _compile_choices(jobs: Sequence[tuple[Op, Case, Choice]]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bench = Workbench(_device(), SEED)
    for op, case, choice in jobs:
        arm: Arm = Ours("", lambda op, case, choice=choice: choice)  # type: ignore[misc]
        try:
            arm.prepare(op, bench.operands(case)).run()
            torch.cuda.synchronize()
        except Exception:  # the benchmark itself records what fails
            continue


def _for(op: Op, phase: str, tiles: Mapping[str, int]) -> Callable[[Op, Case], Mapping[str, int] | None]:
    return lambda asked, case: tiles if (asked, case.phase) == (op, phase) else None


def _setting(setup: Setup, device: torch.device, floors: Floors) -> dict[str, Any]:
    return {
        "record": "setting",
        "device": torch.cuda.get_device_name(device),
        "seed": SEED,
        "bytes_per_us": round(floors.bytes_per_us, 1),
        "launch_us": round(floors.launch_us, 3),
        "flushed_us": round(floors.flushed_us, 3),
        "table_sha256": None if setup.table is None else setup.table.sha256,
        "engines": [sglang_csgmv.DISTRIBUTION, sglang_triton_v2.DISTRIBUTION, vllm_ops.DISTRIBUTION],
    }


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            "serving kernels are timed on a GPU, and there is none that works here",
            remedy="run loraforge doctor",
        )
    return torch.device("cuda", torch.cuda.current_device())


def _pool(spectra: Path | None) -> list[Any] | None:
    if spectra is None:
        return None
    pool = [np.array(record["sigma"]) for record in read_jsonl(spectra) if "sigma" in record]
    if not pool:
        raise LoraForgeError(
            "holds no record with sigma", path=spectra, remedy="give records of loraforge factor"
        )
    return pool
