"""Times of updates in their place in a step: behind the base product that they add to, factors not in the cache.

In a captured step a layer's products follow each other, and between two uses of a layer's weights all the others go
through the L2 cache. So a graph repeats three things: a pass over other memory twice as large as that cache, the base
product y = x W^T, and the update. The same graph without the update is replayed in the same blocks; the median over
blocks of the difference, a repetition, is the update's time. As in a step, x and y are where that product left them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from loraforge.bench.arms import Launch, Ours, nothing
from loraforge.bench.cases import Case, Op, Projection
from loraforge.bench.kernels import Workbench
from loraforge.bench.operands import Operands
from loraforge.bench.runs import times
from loraforge.bench.timing import Subject
from loraforge.bench.tune import INCUMBENT
from loraforge.ops.choice import Choice

FINALISTS = 5  # whole updates that are measured a second time, for longer
BASE = "base"  # the name of the graph without an update
_LEAST_US = 0.05  # a difference that noise has made nothing of


@dataclass
class BaseProduct:
    """weight: [d_out, d_in]. others: [n] FP32, what goes through the cache before it is read."""

    weight: Tensor
    others: Tensor
    _sum: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._sum = torch.empty((), dtype=self.others.dtype, device=self.others.device)

    def run(self, x: Tensor, y: Tensor) -> None:
        """``y`` [T, d_out] = ``x`` [T, d_in] W^T, read from memory; capturable once it has run on the stream."""
        torch.sum(self.others, dim=0, out=self._sum)
        torch.mm(x, self.weight.t(), out=y)


class InPlace:
    """An arm of ours whose whole updates run behind their base product.

    The operands' ``base`` must be that product: it is what outputs are checked against.
    """

    def __init__(self, arm: Ours, product: BaseProduct) -> None:
        self.name = arm.name
        self._arm = arm
        self._product = product

    def supports(self, op: Op, case: Case) -> bool:
        return op == "lora" and self._arm.supports(op, case)

    def prepare(self, op: Op, operands: Operands) -> Launch:
        launch = self._arm.prepare(op, operands)
        x, y = operands.x, launch.output()

        def run() -> None:
            self._product.run(x, y)
            launch.run()

        return replace(launch, run=run, reset=nothing)  # the base product writes all of y


@dataclass
class StepTimes:
    """What :func:`~loraforge.bench.tune.tune` measures a candidate by.

    Products alone run on ``quick``, warm and with a flushed cache. Whole updates are timed in their place: all of them
    on ``first``, and those that did best, with the incumbent, for longer on ``last``. others: see BaseProduct.
    """

    quick: Workbench
    first: Workbench
    last: Workbench
    others: Tensor
    _product: tuple[Projection, BaseProduct] | None = field(default=None, init=False)
    _operands: Operands | None = field(default=None, init=False)

    def __call__(self, op: Op, case: Case, choices: Mapping[str, Choice]) -> dict[str, float]:
        operands = self._of(case)
        ours = [Ours.of(name, choice) for name, choice in choices.items()]
        if op != "lora":
            return times(self.quick, op, operands, ours)
        found = self._in_place(self.first, operands, ours)
        kept = finalists(found, choices)
        return self._in_place(self.last, operands, [each for each in ours if each.name in kept])

    def _in_place(self, bench: Workbench, operands: Operands, ours: Sequence[Ours]) -> dict[str, float]:
        product = self._base(operands.case.projection)
        y = torch.empty_like(operands.base)
        alone = Subject(lambda: product.run(operands.x, y), nothing)
        return differences(
            bench.cell("lora", operands, [InPlace(each, product) for each in ours], beside={BASE: alone})
        )

    def _of(self, case: Case) -> Operands:
        """Made once for all that competes in a case."""
        if self._operands is None or self._operands.case != case:
            self._operands = None  # its memory is given back first
            operands = self.quick.operands(case)
            operands.base = torch.mm(operands.x, self._base(case.projection).weight.t())
            self._operands = operands
        return self._operands

    def _base(self, projection: Projection) -> BaseProduct:
        if self._product is None or self._product[0] != projection:
            self._product = None
            generator = torch.Generator(self.quick.device).manual_seed(self.quick.seed)
            weight = torch.empty(
                (projection.d_out, projection.d_in), dtype=torch.bfloat16, device=self.quick.device
            ).normal_(0.0, projection.d_in**-0.5, generator=generator)
            self._product = projection, BaseProduct(weight, self.others)
        return self._product[1]


def finalists(found: Mapping[str, float], choices: Mapping[str, Choice]) -> set[str]:
    """The fastest, the fastest pair of two kernels, which every entry states, and the incumbent."""
    ranked = sorted(found, key=lambda name: (found[name], name))
    pairs = [name for name in ranked if name != INCUMBENT and choices[name].expand is not None]
    return {*ranked[:FINALISTS], *pairs[:1], INCUMBENT}


def differences(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Microseconds that each arm that passed adds to BASE: the median over blocks of the difference within a block."""
    samples = {record["arm"]: record["warm_us"] for record in records if record["passed"]}
    alone = samples.pop(BASE)
    return {
        name: max(_LEAST_US, statistics.median(a - b for a, b in zip(mine, alone, strict=True)))
        for name, mine in samples.items()
    }
