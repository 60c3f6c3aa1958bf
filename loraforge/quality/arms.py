"""What is scored: a base model with an update merged into its weights, exactly and reversibly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loraforge.errors import InputError
from loraforge.export.directions import cast_factors

if TYPE_CHECKING:
    from loraforge.factor.cache import CachedAdapter
    from loraforge.fleet.peft_io import Adapter


_REMEDY = "use the base that the adapter was trained on"


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
            try:
                weight = linear_of(self.model, name).weight
                check_fits(name, weight, update)
            except InputError:
                self.reset()
                raise
            pristine = self._pristine.setdefault(name, weight.detach().clone())
            weight.copy_(merged(pristine, update))
            self._merged.add(name)

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the base model."""
        for name in self._merged:
            self.model.get_submodule(name).weight.copy_(self._pristine[name])
        self._merged.clear()


def merged(pristine: torch.Tensor, update: Update) -> torch.Tensor:
    """``pristine + scale * b @ a`` in FP32, [d_out, d_in], on the device of ``pristine``."""
    a, b = (factor.to(pristine.device, torch.float32) for factor in (update.a, update.b))
    return torch.addmm(pristine.float(), b, a, alpha=update.scale)


def linear_of(model: Any, name: str) -> Any:
    """The module ``name`` of a model. Raises InputError where there is none with a weight."""
    try:
        module = model.get_submodule(name)
        module.weight  # noqa: B018  # a module without weights is no linear map
    except AttributeError as error:
        raise InputError("no such module in the base model", key=name, remedy=_REMEDY) from error
    return module


def check_fits(name: str, weight: torch.Tensor, update: Update) -> None:
    """Raise InputError unless ``update`` has the shape of ``weight`` [d_out, d_in]."""
    shape = (update.b.shape[0], update.a.shape[1])
    if tuple(weight.shape) != shape:
        raise InputError(f"the update is {shape}, the weight {tuple(weight.shape)}", key=name, remedy=_REMEDY)


class Arm(NamedTuple):
    """One way to serve an adapter: ``name`` is base, original or a policy; ``budget`` "0", "1" or a fraction."""

    name: str
    budget: str


BASE = Arm("base", "0")
ORIGINAL = Arm("original", "1")


def arms_of(policies: Sequence[str], budgets: Sequence[str]) -> list[Arm]:
    """Base, original, then every policy at every budget."""
    return [BASE, ORIGINAL, *(Arm(policy, budget) for policy in policies for budget in budgets)]


def original_updates(adapter: Adapter) -> dict[str, Update]:
    """The adapter's own factors, as stored."""
    with adapter.reader() as reader:
        return {module.name: Update(*reader.factors(module), module.scale) for module in adapter.modules}


def truncated_updates(
    adapter: Adapter, cached: CachedAdapter, ranks: Mapping[str, int], dtype: torch.dtype = torch.bfloat16
) -> dict[str, Update]:
    """The leading ``ranks`` directions of every module that keeps any, rounded to ``dtype`` as export rounds them.

    Raises InputError where ``ranks`` lacks a module or a value overflows ``dtype``.
    """
    found: dict[str, Update] = {}
    for module in adapter.modules:
        if module.name not in ranks:
            raise InputError(
                f"no rank for this module of {adapter.name}",
                key=module.name,
                remedy="allocate again for this fleet",
            )
        if ranks[module.name] == 0:
            continue
        factors = cached.factors(module.name, ranks[module.name])
        found[module.name] = Update(*cast_factors(adapter, module.name, factors, dtype), 1.0)
    return found
