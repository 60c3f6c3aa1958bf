"""The kernel benchmark: every case checked, then timed, one record a case and operation, resumable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraforge.bench.arms import Arm, Launch
from loraforge.bench.cases import Case, Op, Projection, Work
from loraforge.bench.check import Errors, errors, expand_reference, sampled_rows, shrink_reference
from loraforge.bench.journal import append, take_up
from loraforge.bench.operands import Masters, Operands, masters
from loraforge.bench.timing import MAX_LAUNCHES, Captured, Floors, GraphTimer, Samples, Subject

REFERENCE_ARMS = ("csgmv", "csgmv_tuned")  # the first that ran: its output holds the others, beside FP64
Ranks = Callable[[Case], list[list[int]]]


def uniform_ranks(case: Case) -> list[list[int]]:
    """The case's rank for every adapter and slice."""
    return [[case.rank] * len(case.projection.channels)] * case.adapters


@dataclass
class Workbench:
    """Operands of one projection at a time, and the timer. ``seed`` draws factors, routings and block orders;
    ``launches``: of a graph, at most. ``with_timer``: taken instead of one of its own."""

    device: torch.device
    seed: int
    adapters: int = 8
    ranks: Ranks = uniform_ranks
    blocks: int = 5
    flushed: bool = True
    launches: int = MAX_LAUNCHES
    with_timer: InitVar[GraphTimer | None] = None
    timer: GraphTimer = field(init=False)
    _masters: dict[Projection, Masters] = field(default_factory=dict, init=False)

    def __post_init__(self, with_timer: GraphTimer | None) -> None:
        self.timer = with_timer or GraphTimer(self.device, self.launches)

    def operands(self, case: Case, keep: int = 1) -> Operands:
        """Of a case; masters of ``keep`` projections stay."""
        drawn = self._masters.get(case.projection)
        if drawn is None or drawn.a.shape[0] < case.adapters or drawn.x.shape[0] < case.tokens:
            while len(self._masters) >= keep:
                self._masters.pop(next(iter(self._masters)))
            drawn = self._masters[case.projection] = masters(
                case.projection,
                adapters=max(self.adapters, case.adapters),
                tokens=max(8192, case.tokens),
                seed=self.seed,
                device=self.device,
            )
        return Operands(case, drawn, self.ranks(case), self.seed)

    def cell(
        self, op: Op, operands: Operands, arms: Sequence[Arm], beside: Mapping[str, Subject] | None = None
    ) -> list[dict[str, Any]]:
        """One record an arm: how it did against the references, and its samples where it passed. Samples of one place
        in their lists are of one block. beside: what is timed among the arms without a check."""
        rows = sampled_rows(operands)
        want = reference(op, operands, rows)
        found: list[dict[str, Any]] = []
        captured: dict[str, Captured] = {}
        native: Tensor | None = None
        for arm in arms:
            if not arm.supports(op, operands.case):
                continue
            record: dict[str, Any] = {"arm": arm.name}
            found.append(record)
            try:
                launch = arm.prepare(op, operands)
                record |= {"variant": launch.variant, "launches": launch.launches}
                graphs = self.timer.capture(Subject(launch.run, launch.reset), launch.poison)
                output = launch.output()
                record |= _errors(errors(output[rows], want))
                if native is None and arm.name in REFERENCE_ARMS:
                    native = output.clone()
                elif native is not None:
                    record |= _errors(errors(output, native), "native_")
            except Exception as error:  # one arm's failure is a record, not the end of a run
                record |= {"passed": False, "error": f"{type(error).__name__}: {error}"[:300]}
                continue
            if record["passed"]:
                captured[arm.name] = graphs
        for name, subject in (beside or {}).items():
            captured[name] = self.timer.capture(subject)
            found.append({"arm": name, "passed": True})
        times = self.timer.measure(captured, self.seed, blocks=self.blocks, flushed=self.flushed)
        for record in found:
            if record["arm"] in times:
                record |= _samples(times[record["arm"]])
        return found

    def sequence(self, launches: Mapping[str, Sequence[Launch]]) -> list[dict[str, Any]]:
        """As :meth:`cell`, for launches one after another that have been checked each by itself."""
        captured = {
            name: self.timer.capture(
                Subject(
                    lambda parts=parts: [part.run() for part in parts],  # type: ignore[misc]
                    lambda parts=parts: [part.reset() for part in parts],  # type: ignore[misc]
                )
            )
            for name, parts in launches.items()
        }
        times = self.timer.measure(captured, self.seed, blocks=self.blocks, flushed=self.flushed)
        return [
            {
                "arm": name,
                "variant": "sequence",
                "launches": sum(part.launches for part in launches[name]),
                "passed": True,
                **_samples(times[name]),
            }
            for name in launches
        ]


def reference(op: Op, operands: Operands, rows: Tensor) -> Tensor:
    """FP64 of the sampled rows."""
    if op == "shrink":
        return shrink_reference(operands, rows)
    z = operands.z[rows].double() if op == "expand" else shrink_reference(operands, rows)
    return expand_reference(operands, z, rows)


def describe(case: Case, op: Op) -> dict[str, Any]:
    """What a record says of its case."""
    return {
        "record": "cell",
        "model": case.projection.model,
        "projection": case.projection.name,
        "phase": case.phase,
        "tokens": case.tokens,
        "adapters": case.adapters,
        "rank": case.rank,
        "mix": case.mix,
        "capacity": case.capacity,
        "op": op,
    }


def floor_us(op: Op, operands: Operands, floors: Floors) -> float:
    """The least microseconds of an operation at the measured bandwidth and launch."""
    if op == "shrink":
        return floors.floor_us(operands.shrink_bytes())
    if op == "expand":
        return floors.floor_us(operands.expand_bytes())
    z = int(operands.live.sum()) * 4
    return floors.floor_us(operands.shrink_bytes() + operands.expand_bytes() - 2 * z)


class Journal:
    """Records of a run, appended one by one; what a stopped run left is taken up again."""

    def __init__(self, path: Path, budget_s: float | None = None) -> None:
        self.path = path
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        self.done = {_key(record) for record in take_up(path)}

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def has(self, record: Mapping[str, Any]) -> bool:
        return _key(record) in self.done

    def add(self, record: Mapping[str, Any]) -> None:
        append(self.path, record)
        self.done.add(_key(record))


def run_works(
    bench: Workbench,
    works: Iterable[Work],
    arms: Sequence[Arm],
    floors: Floors,
    journals: Mapping[Op, Journal],
    *,
    keep: int = 1,
    note: Mapping[str, Any] | None = None,
    skip: Callable[[Arm, Case], bool] = lambda arm, case: False,
    say: Callable[[str], object] = lambda line: None,
) -> bool:
    """Time every case and operation that the journal of the operation lacks; False where its budget ended first.

    note: what records say beside the case. keep: projections whose factors stay in memory. skip: arms that are left
    out of a case.
    """
    for work in works:
        wanted = [op for op in work.ops if not journals[op].has(describe(work.case, op) | dict(note or {}))]
        if not wanted:
            continue
        if any(journals[op].spent for op in wanted):
            return False
        operands = bench.operands(work.case, keep)
        for op in wanted:
            found = bench.cell(op, operands, [arm for arm in arms if not skip(arm, work.case)])
            journals[op].add(
                describe(work.case, op)
                | dict(note or {})
                | {"floor_us": round(floor_us(op, operands, floors), 3), "arms": found}
            )
            say(f"{work.case.key} {op} " + " ".join(_short(item) for item in found))
    return True


def _short(item: Mapping[str, Any]) -> str:
    if "warm_us" not in item:
        return f"{item['arm']}=FAILED"
    middle = sorted(item["warm_us"])[len(item["warm_us"]) // 2]
    return f"{item['arm']}={middle:.1f}"


def _errors(found: Errors, prefix: str = "") -> dict[str, Any]:
    """Errors as a record states them; a comparison with the native output can only take ``passed`` away."""
    finite = {
        f"{prefix}relative_l2": _finite(found.relative_l2),
        f"{prefix}absolute": _finite(found.absolute),
    }
    return finite | ({"passed": found.passed} if not prefix or not found.passed else {})


def _finite(value: float) -> float:
    return float(f"{value:.3e}") if value == value and value < 1e30 else 1e30


def _samples(samples: Samples) -> dict[str, Any]:
    found = {"warm_us": [round(value, 3) for value in samples.warm]}
    return found | ({"flushed_us": [round(v, 3) for v in samples.flushed]} if samples.flushed else {})


def _key(record: Mapping[str, Any]) -> tuple[str, ...]:
    names = (
        "record", "group", "layer", "model", "projection", "phase", "tokens", "adapters", "rank", "mix", "capacity",
        "op", "staged", "width",
    )  # fmt: skip
    return tuple(str(record.get(name)) for name in names)
