"""What is scored: a base model with an update merged into its weights, exactly and reversibly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from loraforge.errors import InputError


class Update(NamedTuple):
    """One module's update ``scale * b @ a``: ``a`` [r, d_in], ``b`` [d_out, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class MergedModel:
    """A causal language model whose linear weights are W, or ``W + scale * B @ A`` of one set of updates.

    Sums are taken in FP32 and rounded to the model's dtype once; the pristine W of every module touched is
    kept, so :meth:`reset` restores it bit for bit (subtracting an update from a BF16 weight would not).
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._pristine: dict[str, torch.Tensor] = {}
        self._merged: set[str] = set()

    @torch.no_grad()
    def merge(self, updates: Mapping[str, Update]) -> None:
        """Replace whatever is merged by ``updates``, keyed by module name (``model.layers.0.mlp.up_proj``).

        Raises InputError where a module does not exist or its shape disagrees; the model is then pristine.
        """
        self.reset()
        for name, update in updates.items():
            weight = self._weight(name, update)
            pristine = self._pristine.setdefault(name, weight.detach().clone())
            a, b = (factor.to(weight.device, torch.float32) for factor in (update.a, update.b))
            weight.copy_(pristine.float().addmm_(b, a, alpha=update.scale))
            self._merged.add(name)

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the base model."""
        for name in self._merged:
            self.model.get_submodule(name).weight.copy_(self._pristine[name])
        self._merged.clear()

    def _weight(self, name: str, update: Update) -> torch.Tensor:
        try:
            weight = self.model.get_submodule(name).weight
        except AttributeError as error:
            self.reset()
            raise InputError(
                "no such module in the base model",
                key=name,
                remedy="use the base that the adapter was trained on",
            ) from error
        shape = (update.b.shape[0], update.a.shape[1])
        if tuple(weight.shape) != shape:
            self.reset()
            raise InputError(
                f"the update is {shape}, the weight {tuple(weight.shape)}",
                key=name,
                remedy="use the base that the adapter was trained on",
            )
        return weight  # type: ignore[no-any-return]
