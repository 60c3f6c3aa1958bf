"""Steps as engines run them: the cases, and their tuner on a CPU, with a timer that runs what it is to time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loraforge.bench.arms import Ours
from loraforge.bench.cases import LLAMA, QWEN, Case, Projection, Tuned, sweep
from loraforge.bench.check import errors
from loraforge.bench.in_place import BASE, BaseProduct, InPlace, StepTimes, differences, finalists
from loraforge.bench.kernels import Workbench, reference
from loraforge.bench.operands import Operands, masters, routing
from loraforge.bench.step_tuning import fleet_ranks, incumbent, tune_steps
from loraforge.bench.steps import DECODE_BOUNDS, FLEETS, MIXED_BOUNDS, RANK, mean_rank, ranks_of, steps
from loraforge.bench.timing import Samples, Subject
from loraforge.bench.tune import (
    INCUMBENT,
    STEP_CANDIDATES,
    Candidates,
    kernels_of,
    tune,
)
from loraforge.cli import main
from loraforge.dispatch.table import Entry, Table, load_table
from loraforge.errors import LoraForgeError, MissingDependencyError
from loraforge.ops.choice import REFERENCE, Choice, Kernel

RANKS = fleet_ranks(None)
STEPS = list(steps(RANKS))


def test_every_projection_has_each_bound_once_and_is_measured_close_below() -> None:
    assert (
        len({each.case.key for each in STEPS}) == len(STEPS) == 8 * (len(DECODE_BOUNDS) + len(MIXED_BOUNDS))
    )
    for each in STEPS:
        bounds = DECODE_BOUNDS if each.case.phase == "decode" else MIXED_BOUNDS
        below = max((bound for bound in bounds if bound < each.tokens), default=0)
        assert below < each.case.tokens < each.tokens
        assert each.tokens - each.case.tokens <= max(1, each.tokens / 16 + 1)
        assert (each.rank, each.adapters, each.even) == (RANK, None, False)
    reported = {(work.case.projection, work.case.phase, work.case.tokens) for work in sweep()}
    assert not reported & {(each.case.projection, each.case.phase, each.case.tokens) for each in STEPS}


def test_ranks_are_those_of_the_fleets_from_all_over_them() -> None:
    for each in STEPS:
        case = each.case
        mine, whole = ranks_of(case, RANKS), RANKS[case.projection.model][case.projection.name]
        assert len(mine) == case.adapters <= FLEETS[case.projection.model].adapters
        assert {len(of) for of in mine} == {len(case.projection.channels)}
        assert case.rank == max(map(max, whole)) <= case.capacity
        assert case.capacity == {QWEN: 64, LLAMA: 128}[case.projection.model]
        assert 1 < mean_rank(case, RANKS) <= RANK
        means = [sum(map(max, ranks)) / len(ranks) for ranks in (mine, whole)]
        if case.adapters >= 22:
            assert means[0] == pytest.approx(means[1], rel=0.35)


@pytest.mark.parametrize("each", STEPS[:21], ids=lambda each: each.case.key)
def test_rows_are_of_as_many_adapters_as_there_are(each: Tuned) -> None:
    case = each.case
    slots = routing(case, 7)
    counts = torch.bincount(slots, minlength=case.adapters)
    assert (slots.dtype, len(slots)) == (torch.int32, case.tokens)
    if case.phase == "decode":
        assert case.adapters == min(case.tokens, 50)
        assert counts.max() - counts.min() <= 1
        return
    assert case.decodes == len(set(slots[: case.decodes].tolist())) == 48
    assert sum(case.prompts) == case.tokens - case.decodes
    assert all(190 <= prompt <= 320 for prompt in case.prompts)
    owners = [part.unique().tolist() for part in slots[case.decodes :].split(case.prompts)]
    assert all(len(mine) == 1 for mine in owners)
    assert len({mine[0] for mine in owners}) == len(case.prompts)


def test_the_incumbent_is_what_the_engines_plugin_takes_today() -> None:
    table = load_table("NVIDIA H200")
    held = incumbent(table, RANKS)
    choices = [held(each.case) for each in STEPS]
    assert not any(choice.native for choice in choices)
    assert {choice.tile for choice in choices} == {16, 64}
    for each in STEPS:
        assert kernels_of(each, STEP_CANDIDATES)


# --- timing, on a CPU ------------------------------------------------------------------------------------------------

TOY = Projection(QWEN, "qkv", 32, (16, 8, 8))
TOY_RANKS = {QWEN: {"qkv": [[7, 2, 0], [1, 3, 5], [4, 4, 4]]}}
DECODE = Case(TOY, "decode", 7, 3, 7, 8, "toy")
MIXED = Case(TOY, "prefill", 40, 3, 7, 8, "toy", decodes=3)
CASES = [Tuned(DECODE, 8, None, RANK), Tuned(MIXED, 64, None, RANK)]
SLOW, FAST = REFERENCE, Choice(Kernel("reference"), Kernel("reference"), planes=2)
OTHER = Choice(Kernel("reference"), Kernel("reference"), planes=3)
TOY_CANDIDATES = {
    phase: (Candidates(16, ((Kernel("reference"), 1), (Kernel("reference"), 2)), (Kernel("reference"),)),)
    for phase in ("decode", "prefill")
}


class RunsAndInvents:
    """Runs a subject as a timer does; its times are ``us`` of the subject's name, beside 100 of the base product."""

    def __init__(self, us: Callable[[str], float]) -> None:
        self.us = us
        self.measured: list[list[str]] = []

    def capture(self, subject: Subject, before: Callable[[], object] = lambda: None) -> Subject:
        subject.run()
        subject.reset()
        subject.run()
        before()
        subject.run()
        return subject

    def measure(
        self, captured: Mapping[str, Subject], seed: int, *, blocks: int, flushed: bool
    ) -> dict[str, Samples]:
        self.measured.append(list(captured))
        drift = [0.0, 7.0, -3.0, 2.0][:blocks]  # of a device's clock, which a block has in common
        return {
            name: Samples([100.0 + at + (0.0 if name == BASE else self.us(name)) for at in drift])
            for name in captured
        }


def step_times(us: Callable[[str], float]) -> tuple[StepTimes, RunsAndInvents]:
    timer = RunsAndInvents(us)

    def bench(blocks: int) -> Workbench:
        ranks = lambda case: ranks_of(case, TOY_RANKS)  # noqa: E731
        return Workbench(torch.device("cpu"), 5, adapters=3, ranks=ranks, blocks=blocks, with_timer=timer)  # type: ignore[arg-type]

    return StepTimes(bench(2), bench(2), bench(4), torch.ones(64)), timer


@pytest.fixture(scope="module")
def given() -> tuple[Operands, BaseProduct]:
    drawn = masters(TOY, adapters=3, tokens=64, seed=3, device=torch.device("cpu"))
    found = Operands(MIXED, drawn, ranks_of(MIXED, TOY_RANKS), 11)
    weight = torch.randn(TOY.d_out, TOY.d_in, generator=torch.Generator().manual_seed(0)).bfloat16() / 6
    product = BaseProduct(weight, torch.ones(64))
    found.base = torch.mm(found.x, weight.t())
    return found, product


def test_an_update_in_its_place_comes_upon_the_base_product_once_however_often_it_runs(given: Any) -> None:
    operands, product = given
    launch = InPlace(Ours("ours", lambda op, case: SLOW), product).prepare("lora", operands)
    rows = torch.arange(MIXED.tokens)
    for _ in range(3):
        launch.poison()
        launch.output().fill_(float("nan"))  # all of it is written
        launch.run()
        launch.reset()
        assert errors(launch.output(), reference("lora", operands, rows)).passed
        assert not errors(launch.output(), operands.base).passed
    assert not InPlace(Ours("ours", lambda op, case: SLOW), product).supports("shrink", MIXED)


def test_the_difference_within_a_block_is_the_time_of_an_update() -> None:
    times, timer = step_times({"slow": 9.0, "fast": 4.0, INCUMBENT: 5.0}.__getitem__)
    found = times("lora", MIXED, {"slow": SLOW, "fast": FAST, INCUMBENT: SLOW})
    assert found == pytest.approx({"slow": 9.0, "fast": 4.0, INCUMBENT: 5.0})
    assert [BASE in names for names in timer.measured] == [True, True]
    records = [
        {"arm": BASE, "passed": True, "warm_us": [5.0]},
        {"arm": "x", "passed": True, "warm_us": [4.0]},
    ]
    assert 0 < differences(records)["x"] < 0.1, "noise makes no time negative"


def test_those_that_did_best_are_measured_again_with_the_incumbent_and_a_pair() -> None:
    both = Choice(Kernel("fused"))
    choices = {f"both {index}": both for index in range(9)} | {"pair": SLOW, "pair 2": SLOW, INCUMBENT: SLOW}
    found = {name: float(index) for index, name in enumerate(choices)}
    assert finalists(found, choices) == {*(f"both {index}" for index in range(5)), "pair", INCUMBENT}


def test_products_alone_are_timed_by_themselves_and_operands_are_made_once_a_case() -> None:
    times, timer = step_times(lambda name: 3.0)
    assert times("shrink", DECODE, {"a": SLOW}) == pytest.approx({"a": 105.0}, rel=0.05)
    first = times._operands
    times("lora", DECODE, {"a": SLOW})
    assert timer.measured[0] == ["a"]
    assert times._operands is first
    times("expand", MIXED, {"a": SLOW})
    assert times._operands is not first


def test_what_does_not_run_or_gives_other_sums_has_no_time() -> None:
    times, _ = step_times(lambda name: 3.0)
    unknown = Choice(Kernel("fused"))  # no such kernel on a CPU
    assert set(times("lora", DECODE, {"good": SLOW, "bad": unknown})) == {"good"}
    assert times._operands is not None
    times._operands.base = times._operands.base + 1  # what the sums are held against
    assert times("lora", DECODE, {"good": SLOW}) == {}


# --- the incumbent, and the table ------------------------------------------------------------------------------------


def _toy_table() -> Table:
    entries = [
        Entry(
            phase=phase,
            d_in=TOY.d_in,
            channels=TOY.channels,
            tokens=4096,
            rank=16,
            choice=SLOW.to_json(),
            pair=SLOW.to_json(),
        )
        for phase in ("decode", "prefill")
    ]
    return Table.freeze("toy", "", entries)


@pytest.mark.parametrize(("held", "stays"), [(4.05, True), (4.2, False)])
def test_the_incumbent_stays_where_another_is_faster_by_no_more_than_noise(held: float, stays: bool) -> None:
    def measure(op: str, case: Case, choices: Mapping[str, Choice]) -> dict[str, float]:
        return {name: held if name == INCUMBENT else 4.0 for name in choices}

    (entry,) = tune(CASES[:1], measure, TOY_CANDIDATES, incumbent=lambda case: OTHER)
    assert (Choice.from_json(entry.choice) == OTHER) == stays
    assert entry.speedup == (1.0 if stays else 1.05)
    assert not Choice.from_json(entry.pair).native


def test_a_table_of_steps_is_written_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "tuned" / "toy-steps.json"
    times, timer = step_times(lambda name: 9.0 if name == INCUMBENT else 4.0)
    lines: list[str] = []
    more: dict[str, Any] = {"cases": CASES, "candidates": TOY_CANDIDATES, "say": lines.append}
    assert tune_steps(out, "toy", times, _toy_table(), TOY_RANKS, budget_s=-1.0, **more) is None
    assert not out.exists()
    found = tune_steps(out, "toy", times, _toy_table(), TOY_RANKS, **more)
    assert found == load_table("", out)
    assert [(entry.phase, entry.tokens, entry.rank, entry.speedup) for entry in found.entries] == [
        ("decode", 8, RANK, 2.25),
        ("prefill", 64, RANK, 2.25),
    ]
    assert len(lines) == 2
    taken = len(timer.measured)
    again = tune_steps(out, "toy", times, _toy_table(), TOY_RANKS, budget_s=-1.0, **more)
    assert (again, len(timer.measured)) == (found, taken), "from the journal alone"


def test_where_nothing_passes_no_table_is_written(tmp_path: Path) -> None:
    with pytest.raises(LoraForgeError, match="no kernel passes"):
        tune_steps(
            tmp_path / "t.json",
            "toy",
            lambda op, case, choices: {},
            _toy_table(),
            TOY_RANKS,
            cases=CASES,
            candidates=TOY_CANDIDATES,
        )
    assert not (tmp_path / "t.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_command_says_so_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "tune-steps", "-o", str(tmp_path / "tuned")])
    assert caught.value.code == MissingDependencyError.exit_code
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "tuned").exists()
