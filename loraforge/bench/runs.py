"""Whole runs: the reported kernel benchmark, and tuning. Needs a GPU, Triton, and the engines' kernels."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from loraforge.bench import cases as grids
from loraforge.bench.arms import Arm, Ours
from loraforge.bench.cases import SPECTRAL12, Case, Op, Tuned, Work
from loraforge.bench.journal import BudgetEnded, Memo
from loraforge.bench.kernels import Journal, Ranks, Workbench, describe, floor_us, run_works, uniform_ranks
from loraforge.bench.mix import layer_ranks
from loraforge.bench.native import sglang_csgmv, sglang_triton_v2, vllm_ops
from loraforge.bench.native.sglang_csgmv import Csgmv
from loraforge.bench.native.sglang_triton_v2 import TritonV2
from loraforge.bench.native.tiles import TunedTiles, lookup, read_tiles, write_tiles
from loraforge.bench.native.vllm_ops import VllmOps
from loraforge.bench.operands import Operands
from loraforge.bench.timing import Floors, measure_floors
from loraforge.bench.tune import NATIVE_NAME, are_tuned, is_tuned, kernels_of, tune, tune_tiles
from loraforge.dispatch import Entry, Table, choose
from loraforge.errors import LoraForgeError, MissingDependencyError
from loraforge.evidence.targets.expand_ablation import DIRECT, LIMITS, STAGED, arm
from loraforge.files import read_jsonl
from loraforge.jit import load
from loraforge.ops.choice import Choice, Kernel
from loraforge.ops.slots import bucket
from loraforge.progress import Pace

SEED = 20261130
TUNING_SEED = 20261201  # other operands than the reported run's
TARGET: dict[Op, str] = {"shrink": "shrink_ablation", "expand": "expand_ablation", "lora": "dispatch"}
GROUPS = ("layer", "sweep", "ablation")

QUICK_LAUNCHES = 8  # of a graph, where single products are sampled quickly
RUNTIME_OPTIONS = ("blocks", "columns")  # of our Triton kernels: nothing is compiled anew for them

TUNED = "_tuned"
SHIPPED_RANKS = (8, 64)  # of the sweep, where kernels run by their shipped tiles beside the tuned ones
COMPILED_TOKENS = (120, 1920)  # of tuned cases: with these, every kernel that Triton compiles is met

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

    def arms(self, ranks: Ranks) -> list[Arm]:
        """All of them: native ones, ours by force, and the automatic choice, which is told the ranks of a case."""
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
                    automatic(self.table, ranks),
                    next(n for n in reversed(natives) if n.name.startswith("csgmv")),
                )
            )
        return found


def automatic(table: Table, ranks: Ranks) -> Callable[[Op, Case], Choice]:
    """The table's choice for a case; its pair where one product is asked for alone."""

    def chosen(op: Op, case: Case) -> Choice:
        shape, greatest = case.projection, [max(mine) for mine in ranks(case)]
        mean = math.ceil(statistics.fmean(greatest))
        batch = (case.tokens, mean, case.adapters, max(greatest))
        return choose(table, case.phase, shape.d_in, shape.channels, *batch, pair=op != "lora")

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
    warps = torch.cuda.get_device_properties(gpu()).max_threads_per_multi_processor // 32
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
    device = gpu()
    mixed = layer_ranks(measured(spectra))
    layers = list(grids.layers({name: max(map(max, ranks)) for name, ranks in mixed.items()}))

    def ranks(case: Case) -> list[list[int]]:
        return mixed[case.projection.name] if case.mix == SPECTRAL12 else uniform_ranks(case)

    journals = {op: Journal(Path(out) / f"{target}.jsonl", budget_s) for op, target in TARGET.items()}
    if workers:
        wanted = _missing(layers, groups, journals)
        ops: tuple[Op, ...] = ("shrink", "expand", "lora")
        choices: list[tuple[Op, Case, Choice]] = [("lora", case, PREFILL) for case in wanted]
        if setup.table is not None:
            chosen = automatic(setup.table, ranks)
            choices += [(op, case, chosen(op, case)) for case in wanted for op in ops]
        compile_ahead(setup, wanted, workers, choices=choices)
    bench = Workbench(device, SEED, ranks=ranks, flushed=flushed)
    floors = measure_floors(bench.timer, device)
    for journal in journals.values():
        setting = _setting(setup, device, floors)
        if not journal.has(setting):
            journal.add(setting)
    arms = setup.arms(ranks)
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


def _missing(
    layers: Sequence[grids.Layer], groups: Sequence[str], journals: Mapping[Op, Journal]
) -> list[Case]:
    """Cases of the layers and the sweep that the journals lack, by the last operation of each."""
    found: list[Case] = []
    for layer in layers if "layer" in groups else ():
        note: dict[str, Any] = {"group": "layer", "layer": layer.name}
        found += [case for case in layer.cases if not journals["lora"].has(describe(case, "lora") | note)]
    for work in grids.sweep() if "sweep" in groups else ():
        note = {"group": "sweep", "layer": None}
        if not journals[work.ops[-1]].has(describe(work.case, work.ops[-1]) | note):
            found.append(work.case)
    return found


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
    budget_s: float | None = None,
    workers: int = 0,
    say: Callable[[str], object] = print,
) -> Table | None:
    """Tune the engines' tiles, then our kernels against them; write both files, or None where the budget ended first.

    What is finished stands in a journal beside the table, and the next run goes on from there.

    Whole updates by three blocks, warm and flushed, of which the geometric mean counts; single products, of which
    there are many, by two warm ones. The native path that a table may choose is CSGMV, tuned.
    """
    device = gpu()
    memo = Memo(table.with_suffix(".jsonl"), budget_s)
    names = [sglang_csgmv.DISTRIBUTION, sglang_triton_v2.DISTRIBUTION, vllm_ops.DISTRIBUTION]
    setting = repr((torch.cuda.get_device_name(device), TUNING_SEED, names))
    bench = Workbench(device, TUNING_SEED, ranks=_spread, blocks=3)
    quick = Workbench(device, TUNING_SEED, ranks=_spread, blocks=2, flushed=False, launches=QUICK_LAUNCHES)
    try:
        found = _tune_engines(setup, quick, memo, setting, workers, say)
        write_tiles(tiles, found)
        tuned = Setup(setup.engines, None, tiles)
        native = next(each for each in tuned.natives() if each.name == f"csgmv{TUNED}")
        setting = repr((setting, found))
        cases = list(grids.tuning())
        todo = [each for each in cases if not is_tuned(each, memo, setting=setting)]
        if workers and todo:
            shapes = [each for each in todo if each.case.tokens in COMPILED_TOKENS]
            jobs = [(op, each.case, choice) for each in shapes for op, choice in kernels_of(each)]
            compile_ahead(tuned, [each.case for each in todo], workers, choices=jobs, only=[native.name])
            say("compiled what is to be tuned")

        def compare(op: Op, case: Case, choices: Mapping[str, Choice]) -> dict[str, float]:
            ours = [Ours.of(name, choice) for name, choice in choices.items()]
            if op != "lora":
                return times(quick, op, quick.operands(case), ours)
            found = times(bench, op, bench.operands(case), [native, *ours])
            return found | ({NATIVE_NAME: found.pop(native.name)} if native.name in found else {})

        entries = collect(cases, tune(cases, compare, memo=memo, setting=setting), todo, say)
    except BudgetEnded:
        return None
    frozen = Table.freeze(
        torch.cuda.get_device_name(device),
        f"{len(entries)} cases of seed {TUNING_SEED} against {', '.join(names)}, default and tuned",
        entries,
    )
    frozen.write(table)
    return frozen


def collect(
    cases: Iterable[Tuned], tuned: Iterable[Entry], todo: Collection[Tuned], say: Callable[[str], object]
) -> list[Entry]:
    """The entries of ``cases`` as they are tuned, telling of those that were still ``todo``."""
    entries = []
    pace = Pace(len(todo))
    for each, entry in zip(cases, tuned, strict=True):
        entries.append(entry)
        if each in todo:
            say(f"{pace.step()} {each.case.key} {entry.choice} {entry.speedup}")
    return entries


def _spread(case: Case) -> list[list[int]]:
    """Ranks of a tuned case: those of :func:`~loraforge.bench.cases.spread_ranks` where it has a mix."""
    if case.mix is None:
        return uniform_ranks(case)
    drawn = grids.spread_ranks(int(case.mix.removeprefix(grids.SPREAD)), case.adapters)
    return [[rank] * len(case.projection.channels) for rank in drawn]


def _tune_engines(
    setup: Setup, bench: Workbench, memo: Memo, setting: str, workers: int, say: Callable[[str], object]
) -> list[TunedTiles]:
    """The tiles of ``setup``, where it has some; else those that are the fastest."""
    if setup.tiles is not None:
        return read_tiles(setup.tiles)
    cases = list(grids.native_tuning())
    engines: dict[Literal["csgmv", "vllm"], tuple[Any, Mapping[Any, Any]]] = {
        "csgmv": (Csgmv, sglang_csgmv.TILES),
        "vllm": (VllmOps, vllm_ops.TILES),
    }
    todo = [
        case
        for case in cases
        if not all(
            are_tuned(engine, case, tried, memo, setting=setting) for engine, (_, tried) in engines.items()
        )
    ]
    if workers and todo:
        compile_ahead(setup, todo, workers, tuning=True)
    found: list[TunedTiles] = []
    for engine, (kind, tried) in engines.items():

        def measure(
            op: Op, case: Case, options: Sequence[Mapping[str, int] | None], kind: Any = kind
        ) -> list[float | None]:
            arms = [
                kind(setup.engines, str(index), lambda op, case, tiles=option: tiles)
                for index, option in enumerate(options)
            ]
            taken = times(bench, op, bench.operands(case), arms)
            return [taken.get(str(index)) for index in range(len(options))]

        found += tune_tiles(engine, cases, tried, measure, memo=memo, setting=setting)
        say(f"{engine}: tiles of {sum(item.engine == engine for item in found)} kernels")
    return found


def times(bench: Workbench, op: Op, operands: Operands, arms: Sequence[Arm]) -> dict[str, float]:
    """The geometric mean of warm and, where there are some, flushed medians, of the arms that pass their check."""
    return {
        record["arm"]: math.sqrt(
            statistics.median(record["warm_us"])
            * statistics.median(record["flushed_us" if "flushed_us" in record else "warm_us"])
        )
        for record in bench.cell(op, operands, arms)
        if record["passed"]
    }


def compile_ahead(
    setup: Setup | None,
    cases: Sequence[Case],
    workers: int,
    *,
    tuning: bool = False,
    choices: Sequence[tuple[Op, Case, Choice]] = (),
    only: Sequence[str] = (),
) -> None:
    """Compile kernels into Triton's cache, in processes of their own: the engines' for ``cases``, ours of ``choices``.

    setup: None where ``cases`` is empty, which needs no engine. tuning: with every tile that is tried. only: names of
    the engines' arms, all of them where there are none.
    """
    alike: dict[tuple[object, int], list[Case]] = {}
    for case in cases:  # those that share kernels go to one process, which compiles each once
        alike.setdefault((case.projection, case.capacity), []).append(case)
    groups, jobs = list(alike.values()), _distinct(choices)
    parts = [
        (
            setup,
            [case for group in groups[index::workers] for case in group],
            tuning,
            jobs[index::workers],
            only,
        )
        for index in range(workers)
    ]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(_compile, parts)


def _distinct(choices: Sequence[tuple[Op, Case, Choice]]) -> list[tuple[Op, Case, Choice]]:
    """Products, each of which has Triton compile something else: of shrinks a number of slices matters, of expands
    one of planes."""
    found: dict[str, tuple[Op, Case, Choice]] = {}
    for op, case, choice in choices:
        products: tuple[Op, ...] = ("shrink", "expand") if op == "lora" else (op,)
        for product in products:
            kernel = choice.shrink if product == "shrink" else choice.expand
            if kernel is None or kernel.backend != "triton":
                continue
            options = {name: value for name, value in kernel.options.items() if name not in RUNTIME_OPTIONS}
            more = len(case.projection.channels) if product == "shrink" else choice.planes
            shape = (product, bucket(case.capacity), choice.tile, more, sorted(options.items()))
            found.setdefault(repr(shape), (product, case, choice))
    return list(found.values())


def _compile(
    setup: Setup | None,
    cases: Sequence[Case],
    tuning: bool,
    choices: Sequence[tuple[Op, Case, Choice]],
    only: Sequence[str],
) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bench = Workbench(gpu(), SEED)
    natives = [] if setup is None else setup.natives()
    arms = [each for each in natives if not only or each.name in only]
    if setup is not None and tuning:
        for (op, phase), tried in sglang_csgmv.TILES.items():
            arms += [Csgmv(setup.engines, "", _for(op, phase, option)) for option in tried]
        for (op, phase), tried in vllm_ops.TILES.items():
            arms += [VllmOps(setup.engines, "", _for(op, phase, option)) for option in tried]
    jobs: list[tuple[Op, Case, Arm]] = [("lora", case, each) for case in cases for each in arms]
    for op, case, choice in choices:
        jobs.append((op, case, Ours.of("", choice)))
    for op, case, each in jobs:
        try:
            each.prepare(op, bench.operands(case)).run()
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


def gpu() -> torch.device:
    """The device that kernels are timed on. Raises MissingDependencyError where there is none."""
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            "serving kernels are timed on a GPU, and there is none that works here",
            remedy="run loraforge doctor",
        )
    return torch.device("cuda", torch.cuda.current_device())


def measured(spectra: Path | None) -> list[Any] | None:
    """The spectra in records of ``loraforge factor``; None where no file is given."""
    if spectra is None:
        return None
    pool = [np.array(record["sigma"]) for record in read_jsonl(spectra) if "sigma" in record]
    if not pool:
        raise LoraForgeError(
            "holds no record with sigma", path=spectra, remedy="give records of loraforge factor"
        )
    return pool
