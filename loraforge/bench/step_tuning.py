"""``loraforge bench tune-steps``: the table of engines' steps, tuned with every update in its place.

The choice that an engine would take without this table competes in every step, and stays where nothing is faster by
more than noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from loraforge.bench.cases import MAX_RANK, Case, Op, Tuned
from loraforge.bench.in_place import StepTimes
from loraforge.bench.journal import BudgetEnded, Memo
from loraforge.bench.kernels import Workbench
from loraforge.bench.mix import layer_ranks
from loraforge.bench.runs import (
    COMPILED_TOKENS,
    QUICK_LAUNCHES,
    TUNING_SEED,
    collect,
    compile_ahead,
    measured,
)
from loraforge.bench.steps import DECODE_BOUNDS, FLEETS, Ranks, mean_rank, ranks_of, steps
from loraforge.bench.timing import GraphTimer
from loraforge.bench.tune import STEP_CANDIDATES, Candidates, Measure, is_tuned, kernels_of, tune
from loraforge.dispatch.table import Table
from loraforge.files import sha256_text
from loraforge.ops.choice import Choice
from loraforge.runtime.kernels import Kernels
from loraforge.runtime.ranks import Projection

FIRST_BLOCKS, LAST_BLOCKS = 2, 9
STEP_US, STEP_LAUNCHES = 600.0, 12  # of a graph of repetitions, each of tens to hundreds of microseconds


def fleet_ranks(spectra: Path | None) -> Ranks:
    """Ranks of both models' fleets at 1/12. spectra: see :func:`~loraforge.bench.runs.measured`."""
    pool = measured(spectra)
    return {model: layer_ranks(pool, fleet.shapes) for model, fleet in FLEETS.items()}


def incumbent(table: Table, ranks: Ranks) -> Callable[[Case], Choice]:
    """What an engine that runs up to DECODE_BOUNDS' last requests takes for a case by ``table`` alone."""

    def chosen(case: Case) -> Choice:
        shape = case.projection
        told = {shape.name: mean_rank(case, ranks)}
        kernels = Kernels(table, DECODE_BOUNDS[-1], told, MAX_RANK)
        return kernels.choose(Projection(shape.name, shape.d_in, shape.channels), case.tokens)

    return chosen


def tune_steps(
    out: Path,
    device: str,
    timed: Measure,
    table: Table,
    ranks: Ranks,
    *,
    cases: Sequence[Tuned] | None = None,
    candidates: Mapping[str, Sequence[Candidates]] = STEP_CANDIDATES,
    budget_s: float | None = None,
    workers: int = 0,
    say: Callable[[str], object] = print,
) -> Table | None:
    """Tune steps and write the table ``out``, or return None where the budget ended first.

    What is finished stands in a journal beside the table, and the next run goes on from there.

    device: its name. timed: :func:`step_times` of it. table: its first one, whose choices are the incumbents. cases:
    None for all of :func:`~loraforge.bench.steps.steps`. workers: processes that compile candidates beforehand.
    """
    memo = Memo(out.with_suffix(".jsonl"), budget_s)
    setting = repr((device, TUNING_SEED, table.sha256, sha256_text(repr(ranks))))
    wanted = list(steps(ranks)) if cases is None else list(cases)
    todo = [each for each in wanted if not is_tuned(each, memo, candidates, setting=setting)]
    held = incumbent(table, ranks)
    if workers and todo:
        jobs: list[tuple[Op, Case, Choice]] = [("lora", each.case, held(each.case)) for each in todo]
        for each in todo:
            if each.case.tokens in COMPILED_TOKENS:
                jobs += [(op, each.case, choice) for op, choice in kernels_of(each, candidates)]
        compile_ahead(None, [], workers, choices=jobs)
        say("compiled what is to be tuned")
    tuned = tune(wanted, timed, candidates, memo=memo, setting=setting, incumbent=held)
    try:
        entries = collect(wanted, tuned, todo, say)
    except BudgetEnded:
        return None
    frozen = Table.freeze(
        device, f"{len(entries)} steps of seed {TUNING_SEED} against table {table.sha256[:12]}", entries
    )
    frozen.write(out)
    return frozen


def step_times(device: torch.device, ranks: Ranks) -> StepTimes:
    """What times candidates on a GPU."""
    most = max(fleet.adapters for fleet in FLEETS.values())
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    placed = GraphTimer(device, STEP_LAUNCHES, STEP_US)

    def bench(blocks: int, flushed: bool, timer: GraphTimer) -> Workbench:
        return Workbench(
            device,
            TUNING_SEED,
            adapters=most,
            ranks=lambda case: ranks_of(case, ranks),
            blocks=blocks,
            flushed=flushed,
            with_timer=timer,
        )

    return StepTimes(
        bench(FIRST_BLOCKS, True, GraphTimer(device, QUICK_LAUNCHES)),
        bench(FIRST_BLOCKS, False, placed),
        bench(LAST_BLOCKS, False, placed),
        torch.zeros(2 * cache // 4, dtype=torch.float32, device=device),
    )
