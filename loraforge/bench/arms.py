"""What is compared: an arm prepares a case's operation as a launch that can be captured, checked and reset."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraforge import ops
from loraforge.bench.cases import Case, Op
from loraforge.bench.operands import Operands
from loraforge.ops import Choice
from loraforge.ops.plan import Plan, empty_plan, fill_reference
from loraforge.ops.slots import bucket


@dataclass(frozen=True)
class Launch:
    """One operation on prepared operands.

    run: enqueue it on the current stream, without host reads; capturable once it has run on that stream.
    output: canonical Z [T, slices, rank], zero where not live, or Y [T, d_out], after a run.
    poison: after a first run, make what ``run`` writes unlike any result, and restore what it adds to.
    reset: restore what it adds to.
    variant: tiles and the like, for the record. launches: kernels that one run starts.
    """

    run: Callable[[], object]
    output: Callable[[], Tensor]
    poison: Callable[[], object]
    reset: Callable[[], object]
    variant: str
    launches: int = 1


class Arm(Protocol):
    """A way to compute an operation."""

    name: str

    def supports(self, op: Op, case: Case) -> bool:
        """Whether it is run on a case."""

    def prepare(self, op: Op, operands: Operands) -> Launch:
        """Lay out what the operation needs; nothing of this is timed."""


def nothing() -> None:
    """A reset of outputs that a run writes whole."""


class Ours:
    """This package's ops by the choice that ``choose(op, case)`` makes, None where it leaves a case out.

    A choice of the engine's own path runs ``native``.
    """

    def __init__(
        self, name: str, choose: Callable[[Op, Case], Choice | None], native: Arm | None = None
    ) -> None:
        self.name = name
        self._choose = choose
        self._native = native

    @classmethod
    def of(cls, name: str, choice: Choice) -> Ours:
        """With one choice for every case."""
        return cls(name, lambda op, case: choice)

    def supports(self, op: Op, case: Case) -> bool:
        choice = self._choose(op, case)
        if choice is None:
            return False
        if choice.native:
            return self._native is not None and self._native.supports(op, case)
        return op == "lora" or choice.expand is not None

    def prepare(self, op: Op, operands: Operands) -> Launch:
        choice = self._choose(op, operands.case)
        assert choice is not None
        if choice.native:
            assert self._native is not None
            return self._native.prepare(op, operands)
        plan = filled_plan(operands, choice.tile)
        slices, table = operands.case.projection.slices, operands.table.tensor
        x, base = operands.x, operands.base
        y = base.clone()
        z = torch.full(
            (choice.planes, operands.case.tokens, operands.pieces, bucket(operands.case.capacity)),
            float("nan"),
            device=operands.device,
        )
        label = json.dumps(choice.to_json(), sort_keys=True, separators=(",", ":"))

        def restore() -> None:
            y.copy_(base)

        def poison() -> None:
            z.fill_(float("nan"))
            restore()

        if op == "shrink":

            def product() -> Tensor:
                return torch.where(operands.live, z.sum(0)[:, :, : operands.case.rank], 0.0)

            return Launch(
                lambda: ops.shrink(x, operands.a_pool, table, plan, z, kernel=choice.shrink),
                product,
                lambda: z.fill_(float("nan")),
                nothing,
                label,
            )
        if op == "expand":
            second = choice.expand
            assert second is not None
            # two halves where planes are summed, which add up to the same bits; dead entries stay NaN
            live = operands.live
            for plane in z:
                plane[:, :, : operands.case.rank][live] = 0.0
            for plane in (z[0], z[-1]):
                plane[:, :, : operands.case.rank][live] += operands.z[live] / 2
            return Launch(
                lambda: ops.expand(z, operands.b_compact, table, plan, y, slices, kernel=second),
                lambda: y,
                restore,
                restore,
                label,
            )
        return Launch(
            lambda: ops.lora(
                x, operands.a_pool, operands.b_compact, table, plan, z, y, slices, choice=choice
            ),
            lambda: y,
            poison,
            restore,
            label,
            1 if choice.shrink.backend == "cpu" else 2,
        )


def filled_plan(operands: Operands, tile: int) -> Plan:
    """The plan of the operands' batch, which nothing that is timed writes; made once a tile."""
    if tile in operands.plans:
        return operands.plans[tile]
    plan = operands.plans[tile] = empty_plan(operands.case.tokens, operands.slots, tile, operands.device)
    plan.token_slots.copy_(operands.token_slots)
    if operands.device.type == "cuda":
        ops.fill(plan, operands.slots)
    else:
        fill_reference(plan, operands.slots)
    return plan
