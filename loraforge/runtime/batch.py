"""One step of an engine: which token goes to which slot, and the workspace of the products; shared by all layers."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from loraforge.ops import api, cpu
from loraforge.ops.choice import Choice, Kernel
from loraforge.ops.plan import BASE, Plan, capacity, empty_plan
from loraforge.ops.slots import MAX_SLICES, SlotTable
from loraforge.runtime.kernels import Kernels
from loraforge.runtime.ranks import Projection

TILE = 64  # rows of a segment on a CPU: the most that share one pass over an adapter's factors
_CPU_PAIR = Choice(Kernel("cpu"), Kernel("cpu"), tile=TILE)
_RANK_UNIT = 16  # what the capacity of a workspace is a multiple of


class Pool(Protocol):
    """What a layer needs of a pool."""

    tables: dict[str, SlotTable]

    def operands(self, name: str) -> tuple[Tensor, Tensor]: ...


class Batch:
    """Buffers for steps of up to ``tokens`` tokens over ``slots`` slots, made once.

    The host writes the slots of the tokens; the plan is made from them on the device by the first layer of a step that
    asks for it. A captured graph has that launch at its start and so follows whatever the host writes before a replay.

    active: whether any token of this step has an adapter; where none has, layers have nothing to do.
    """

    def __init__(
        self,
        tokens: int,
        slots: int,
        rank: int,
        device: torch.device | str = "cpu",
        *,
        tiles: Collection[int] = (TILE,),
        planes: int | None = None,
    ) -> None:
        """rank: the largest that an adapter may have. tiles: heights of segments that will be asked for. planes: the
        most planes times tokens that a workspace will have, where that is more than ``tokens``."""
        self.tokens = tokens
        self.rank = -(-rank // _RANK_UNIT) * _RANK_UNIT
        self.active = False
        self._slots = slots
        self._token_slots = torch.full((tokens,), BASE, dtype=torch.int32, device=device)
        self._pin = self._token_slots.is_cuda
        self._written = 0  # tokens of the last step
        self._whole = {tile: empty_plan(tokens, slots, tile, device) for tile in tiles}
        self._z = torch.empty(
            max(planes or 0, tokens) * MAX_SLICES * self.rank, dtype=torch.float32, device=device
        )
        # views of the last step, since most steps are as long as the one before
        self._plans: dict[int, Plan] = {}
        self._workspaces: dict[tuple[int, int], Tensor] = {}
        self._step: object = None
        self._filled: dict[int, int] = {}  # tile -> tokens of the plan that is in its buffers

    @property
    def device_bytes(self) -> int:
        """Bytes that the buffers take."""
        plans = [part for plan in self._whole.values() for part in (plan.order, plan.segments, plan.count)]
        return sum(part.numel() * part.element_size() for part in (self._token_slots, self._z, *plans))

    def set(self, token_slots: Tensor, *, active: bool) -> None:
        """Begin a step. token_slots: integers [T] on the host, the slot of each token, negative for the base model
        alone. Tokens behind them, an engine's padding, get none."""
        self.active = active
        tokens = token_slots.shape[0]
        # what the step before wrote and this one does not is wiped in the same copy
        staged = torch.full((max(tokens, self._written),), BASE, dtype=torch.int32, pin_memory=self._pin)
        staged[:tokens] = token_slots
        self._token_slots[: len(staged)].copy_(staged, non_blocking=True)
        self._written = tokens
        self._filled.clear()

    def plan(self, tokens: int, tile: int, step: object) -> Plan:
        """The plan of the first ``tokens`` tokens, made now if it has not been in this step.

        step: any object that is another one in each step of the engine.
        """
        if step is not self._step or step is None:
            self._step = step
            self._filled.clear()
        plan = self._plans.get(tile)
        if plan is None or plan.tokens != tokens:
            plan = self._plans[tile] = self._view(tokens, tile)
        if self._filled.get(tile) != tokens:
            api.fill(plan, self._slots)
            self._filled[tile] = tokens
        return plan

    def workspace(self, planes: int, tokens: int, slices: int) -> Tensor:
        """FP32 [planes, T, slices, rank] for the products of a projection; contents undefined."""
        found = self._workspaces.get((planes, slices))
        if found is None or found.shape[1] != tokens:
            shape = planes, tokens, slices, self.rank
            found = self._workspaces[planes, slices] = self._z[: math.prod(shape)].view(shape)
        return found

    def _view(self, tokens: int, tile: int) -> Plan:
        whole = self._whole[tile]
        return Plan(
            self._token_slots[:tokens],
            whole.order[:tokens],
            whole.segments[: capacity(tokens, self._slots, tile)],
            whole.count,
            tile,
        )


class Applied:
    """One projection with its pool and batch: what a layer calls."""

    def __init__(
        self,
        pool: Pool,
        batch: Batch,
        projection: Projection,
        kernels: Kernels | None = None,
        *,
        split: bool = False,
    ) -> None:
        """kernels: those of a GPU; None for a CPU, which has one. split: whether the two products are called for
        separately, by :meth:`shrink` and :meth:`expand`."""
        self._a, self._b = pool.operands(projection.name)
        self._table = pool.tables[projection.name].tensor
        self._slices = projection.slices
        self._batch = batch
        self._projection = projection
        self._kernels = kernels
        self._split = split

    def add(self, y: Tensor, x: Tensor, step: object = None) -> None:
        """``y`` [T, channels] += each token's update of ``x`` [T, d_in]; rows of the base model alone are not touched.

        Rows past the tokens of the step (an engine's padding) are not touched either. step: see :meth:`Batch.plan`.
        """
        batch = self._batch
        if not batch.active:
            return
        if x.shape[0] > batch.tokens:
            x, y = x[: batch.tokens], y[: batch.tokens]
        tokens = x.shape[0]
        if self._kernels is None:
            plan = batch.plan(tokens, TILE, step)
            z = batch.workspace(1, tokens, len(self._slices))
            # not through torch's dispatcher once more: what an engine may compile calls this from inside an op
            cpu.lora(x, self._a, self._b, self._table, plan, z, y, self._slices)
            return
        self._run(y, x, self._kernels.choose(self._projection, tokens), step)

    def shrink(self, x: Tensor, step: object = None) -> Tensor:
        """The first product alone: FP32 [planes, T, slices, rank], to be summed over the devices that share ``d_in``
        and given to :meth:`expand` before any other projection runs. Entries that no adapter has are undefined.

        Undefined, and of one token, in a step without adapters: devices may be unable to sum nothing.
        """
        batch, slices = self._batch, len(self._slices)
        if not batch.active:
            return batch.workspace(1, 1, slices)
        x = x[: batch.tokens]
        tokens = x.shape[0]
        choice = self._pair(tokens)
        z = batch.workspace(choice.planes, tokens, slices)
        plan = batch.plan(tokens, choice.tile, step)
        api.shrink(x, self._a, self._table, plan, z, kernel=choice.shrink)
        return z

    def expand(self, y: Tensor, z: Tensor, step: object = None) -> None:
        """The second product: ``y`` [T, channels] += that of ``z``, which :meth:`shrink` gave in the same step."""
        if not self._batch.active:
            return
        tokens = z.shape[1]
        choice = self._pair(tokens)
        plan = self._batch.plan(tokens, choice.tile, step)
        second = choice.expand or choice.shrink
        api.expand(z, self._b, self._table, plan, y[:tokens], self._slices, kernel=second)

    def _pair(self, tokens: int) -> Choice:
        if self._kernels is None:
            return _CPU_PAIR
        return self._kernels.pair(self._projection, tokens)

    def warm(self) -> None:
        """Run every kernel that a step may take, on tokens without adapters: none is then compiled while requests wait.

        Nothing on a CPU, whose kernel is compiled already.
        """
        if self._kernels is None:
            return
        device, dtype = self._a.device, self._a.dtype
        seen = set()
        for tokens in self._kernels.bounds(self._batch.tokens):
            # one row that stands for all, since none is written
            x = torch.zeros((1, self._projection.d_in), dtype=dtype, device=device).expand(tokens, -1)
            y = torch.zeros((1, sum(self._projection.channels)), dtype=dtype, device=device).expand(
                tokens, -1
            )
            ask = self._kernels.pair if self._split else self._kernels.choose
            choice = ask(self._projection, tokens)
            if (key := str(choice.to_json())) not in seen:
                seen.add(key)
                self._run(y, x, choice, None)

    def _run(self, y: Tensor, x: Tensor, choice: Choice, step: object) -> None:
        tokens = x.shape[0]
        plan = self._batch.plan(tokens, choice.tile, step)
        z = self._batch.workspace(choice.planes, tokens, len(self._slices))
        traced = torch.compiler.is_compiling()
        api.lora(x, self._a, self._b, self._table, plan, z, y, self._slices, choice=choice, traced=traced)
