"""One step of an engine: which token goes to which slot, and the workspace of the products; shared by all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from loraforge.ops import api, cpu
from loraforge.ops.plan import BASE, Plan, capacity
from loraforge.ops.slots import MAX_SLICES
from loraforge.runtime.pool import RaggedPool
from loraforge.runtime.ranks import Projection

TILE = 64  # rows of a segment: the most that share one pass over an adapter's factors


class Batch:
    """Buffers for steps of up to ``tokens`` tokens over ``slots`` slots, made once.

    active: whether any token of this step has an adapter; where none has, layers have nothing to do.
    """

    def __init__(self, tokens: int, slots: int, rank: int, device: torch.device | str = "cpu") -> None:
        """``rank``: the largest that an adapter may have."""
        self._token_slots = torch.full((tokens,), BASE, dtype=torch.int32, device=device)
        self._order = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._segments = torch.zeros((capacity(tokens, slots, TILE), 4), dtype=torch.int32, device=device)
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._z = torch.empty(tokens * MAX_SLICES * rank, dtype=torch.float32, device=device)
        self._rank = rank
        self._slots = slots
        self.active = False
        self.plan = self._plan(0)
        self._workspaces: dict[int, Tensor] = {}

    @property
    def tokens(self) -> int:
        """How many tokens the current step has."""
        return self.plan.tokens

    def set(self, token_slots: Tensor, *, active: bool) -> None:
        """Begin a step. token_slots: integers [T], the slot of each token, negative for the base model alone."""
        self.active = active
        tokens = token_slots.shape[0]
        if tokens != self.tokens:
            self.plan = self._plan(tokens)
            self._workspaces.clear()
        if active:
            self.plan.token_slots.copy_(token_slots)
            api.fill(self.plan, self._slots)

    def workspace(self, slices: int) -> Tensor:
        """FP32 [1, T, slices, rank] for the products of a projection; contents undefined."""
        found = self._workspaces.get(slices)
        if found is None:
            shape = (1, self.tokens, slices, self._rank)
            found = self._workspaces[slices] = self._z[: self.tokens * slices * self._rank].view(shape)
        return found

    def _plan(self, tokens: int) -> Plan:
        return Plan(
            self._token_slots[:tokens],
            self._order[:tokens],
            self._segments[: capacity(tokens, self._slots, TILE)],
            self._count,
            TILE,
        )


class Applied:
    """One projection with its pool and batch: what a layer calls."""

    def __init__(self, pool: RaggedPool, batch: Batch, projection: Projection) -> None:
        self._buffer = pool.buffer
        self._table = pool.tables[projection.name].tensor
        self._slices = projection.slices
        self._batch = batch

    def add(self, y: Tensor, x: Tensor) -> None:
        """``y`` [T, channels] += each token's update of ``x`` [T, d_in]; rows of the base model alone are not touched.

        Rows past the tokens of the step (an engine's padding) are not touched either.
        """
        batch = self._batch
        if not batch.active:
            return
        plan = batch.plan
        if x.shape[0] != plan.tokens:
            x, y = x[: plan.tokens], y[: plan.tokens]
        z = batch.workspace(len(self._slices))
        # not through torch's dispatcher once more: what an engine may compile calls this from inside an op
        cpu.lora(x, self._buffer, self._buffer, self._table, plan, z, y, self._slices)
