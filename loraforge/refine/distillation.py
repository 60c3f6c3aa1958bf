"""Self-distillation of one truncated adapter from its original, on the original's own answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loraforge.activation.answers import Answered, AnswerSettings, collate, log_probabilities, states_at
from loraforge.errors import InputError, UsageError
from loraforge.fleet.train import batches, learning_rate
from loraforge.quality.arms import Update


@dataclass(frozen=True)
class RefineSettings(AnswerSettings):
    """How long and how fast a truncated adapter learns.

    Parameters
    ----------
    steps: of Adam, each on ``batch_size`` answers; more than there are prompts for go over them again.
    lr: peak learning rate; it rises over the first ``warmup`` share of the steps and falls to zero as a half cosine.
    clip: largest gradient norm of a step.
    seed: of the order of the answers.

    Raises UsageError for a rate that is negative or not finite.
    """

    steps: int = 200
    lr: float = 1e-3
    warmup: float = 0.1
    clip: float = 1.0
    seed: int = 20261130

    def __post_init__(self) -> None:
        if not 0.0 <= self.lr < math.inf:
            raise UsageError("no learning rate", key="--lr", remedy="give a finite one")


DEFAULTS = RefineSettings()


@dataclass(frozen=True)
class Refined:
    """Factors of scale 1 by module, float32 on the CPU, and the mean divergence of an answer at every step, in nats."""

    updates: Mapping[str, Update]
    curve: tuple[float, ...]


def distil(
    model: Any,
    original: Mapping[str, Update],
    truncated: Mapping[str, Update],
    answered: Sequence[Answered],
    pad: int,
    settings: RefineSettings = DEFAULTS,
) -> Refined:
    """Minimise KL(original || truncated) over ``answered``, from ``truncated`` on, at unchanged ranks.

    ``model`` is the base model with frozen weights, and is left as it was. Raises InputError where the divergence is
    not finite any more.
    """
    device = model.device
    student = _Factors({name: _balanced(update) for name, update in truncated.items()}, device)
    teacher = {
        name: (
            update.a.to(device, model.dtype),
            (update.scale * update.b.to(device, torch.float32)).to(model.dtype),
        )
        for name, update in original.items()
    }
    parameters = [student.whole]
    optimizer = torch.optim.Adam(parameters, lr=settings.lr)
    lengths = [len(row.prompt) + len(row.answer) for row in answered]
    curve: list[float] = []
    with torch.no_grad(), _beside(model, teacher):
        wanted = _last_states(model, answered, pad, settings.batch_size)
    for step, rows in enumerate(batches(lengths, settings.batch_size, settings.steps, settings.seed)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings.steps, settings.lr, settings.warmup)
        ids, positions = (tensor.to(device) for tensor in collate([answered[i] for i in rows], pad))
        with torch.no_grad():
            own = log_probabilities(model, torch.cat([wanted[i] for i in rows]))
        with _beside(model, student.pairs(model.dtype)):
            found = log_probabilities(model, states_at(model, ids, positions))
        loss = (own.exp() * (own - found)).sum() / len(rows)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.append(float(loss.detach()))
        if not math.isfinite(curve[-1]):
            raise InputError("the divergence is not finite", key="--lr", remedy="lower it")
    learned = student.pairs(torch.float32)
    updates = {
        name: Update(a.detach().to("cpu", copy=True), b.detach().to("cpu", copy=True), 1.0)
        for name, (a, b) in learned.items()
    }
    return Refined(updates, tuple(curve))


class _Factors:
    """Float32 factors of all modules in one parameter, ``whole``: steps of hundreds of small ones are launches."""

    def __init__(self, factors: Mapping[str, tuple[Tensor, Tensor]], device: torch.device) -> None:
        self._names = list(factors)
        tensors = [factor for pair in factors.values() for factor in pair]
        self._shapes = [tensor.shape for tensor in tensors]
        self.whole = torch.cat([tensor.flatten() for tensor in tensors]).to(device).requires_grad_(True)

    def pairs(self, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of every module, of ``dtype`` and differentiable."""
        # one split, whose gradient is one concatenation; that of slices would be as large as the whole, each
        parts = torch.split(self.whole.to(dtype), [shape.numel() for shape in self._shapes])
        tensors = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return dict(zip(self._names, zip(tensors[::2], tensors[1::2], strict=True), strict=True))


def _balanced(update: Update) -> tuple[Tensor, Tensor]:
    """A and scale B in float32, where each row of A is as long as its column of B: Adam moves all elements alike."""
    a, b = update.a.float(), update.scale * update.b.float()
    longer = a.norm(dim=1).div(b.norm(dim=0)).sqrt()
    longer = torch.where(longer.isfinite() & (longer > 0), longer, 1.0)
    return a / longer[:, None], b * longer


def _last_states(model: Any, answered: Sequence[Answered], pad: int, batch_size: int) -> list[Tensor]:
    """What the model says where it chooses each token of an answer, before the vocabulary: [tokens, hidden] each.

    They are the same at every step, and a vocabulary of probabilities is too large to be kept.
    """
    found: list[Tensor] = []
    for start in range(0, len(answered), batch_size):
        rows = answered[start : start + batch_size]
        ids, positions = (tensor.to(model.device) for tensor in collate(rows, pad))
        found += torch.split(states_at(model, ids, positions), [len(row.answer) for row in rows])
    return found


@contextmanager
def _beside(model: Any, factors: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Add B A x to the outputs of the modules that ``factors`` name, in the model's dtype."""

    def add(a: Tensor, b: Tensor) -> Any:
        def forward(_: Any, args: tuple[Tensor], out: Tensor) -> Tensor:
            x = args[0]
            return out + (x @ a.to(x.dtype).mT) @ b.to(x.dtype).mT

        return forward

    handles = [model.get_submodule(name).register_forward_hook(add(a, b)) for name, (a, b) in factors.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
