"""Several arms of one adapter in one forward pass: a model whose linear maps have another weight for each lane of rows.

The rows of a batch lie lane after lane. What has no update is shared; a map with one becomes a batched product over
[lanes, out, in]. Weights are merged and rounded as :class:`~loraforge.quality.arms.MergedModel` merges and rounds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from loraforge.errors import InputError, UsageError
from loraforge.quality.arms import Update, check_fits, linear_of, merged


class LaneLinear(nn.Module):
    """``lanes`` linear maps side by side: rows [lanes * n, ..., in] to [lanes * n, ..., out]."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, lanes: int) -> None:
        super().__init__()
        self.pristine = linear.weight.detach()
        self.register_buffer("weight", self.pristine.repeat(lanes, 1, 1), persistent=False)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        lanes, out, width = self.weight.shape
        y = torch.bmm(x.reshape(lanes, -1, width), self.weight.mT).reshape(*x.shape[:-1], out)
        return y if self.bias is None else y + self.bias


class LaneModel:
    """A causal language model that serves ``lanes`` arms at once.

    Weights stay where they are but for a module's first update, which moves them: ``moves`` counts these.
    """

    def __init__(self, model: Any, lanes: int) -> None:
        self.model = model
        self.lanes = lanes
        self._maps: dict[str, LaneLinear] = {}
        self._merged: set[str] = set()

    @property
    def moves(self) -> int:
        """How often a weight has been given another place."""
        return len(self._maps)

    @torch.no_grad()
    def merge(self, updates: Sequence[Mapping[str, Update]]) -> None:
        """Lane i serves ``updates[i]``; lanes past the last, and modules that an arm lacks, serve the base.

        Raises UsageError for more updates than lanes, InputError where a module does not exist or does not fit; the
        model is then pristine.
        """
        if len(updates) > self.lanes:
            raise UsageError(f"{len(updates)} arms do not fit {self.lanes} lanes", key="lanes")
        self.reset()
        for lane, arm in enumerate(updates):
            for name, update in arm.items():
                try:
                    map_ = self._map(name, update)
                except InputError:
                    self.reset()
                    raise
                self._merged.add(name)
                map_.weight[lane].copy_(merged(map_.pristine, update))

    @torch.no_grad()
    def reset(self) -> None:
        """Every lane serves the base."""
        for name in self._merged:
            map_ = self._maps[name]
            map_.weight.copy_(map_.pristine.expand_as(map_.weight))
        self._merged.clear()

    def _map(self, name: str, update: Update) -> LaneLinear:
        if name not in self._maps:
            linear = linear_of(self.model, name)
            check_fits(name, linear.weight, update)
            parent, _, leaf = name.rpartition(".")
            self._maps[name] = LaneLinear(linear, self.lanes)
            setattr(self.model.get_submodule(parent), leaf, self._maps[name])
        check_fits(name, self._maps[name].pristine, update)
        return self._maps[name]
