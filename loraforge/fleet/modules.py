"""One adapted linear map of an adapter, and how its factors come out of the stored tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Get = Callable[[str], Tensor]


class Build(Protocol):
    """Factors that are not stored as such, but follow from stored tensors exactly."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors read, by their keys in the file."""

    def factors(self, get: Get) -> tuple[Tensor, Tensor]:
        """A [rank, d_in] and B [d_out, rank] from the tensors that ``get`` gives."""


@dataclass(frozen=True)
class Stack:
    """The place of one expert in the pair of tensors that holds all experts of a parameter.

    ``owner`` is the module that holds the parameter: PEFT gives one rank to all that it holds, unless told otherwise.
    """

    owner: str
    expert: int
    experts: int


@dataclass(frozen=True)
class LoraModule:
    """One adapted linear map: ``dW = scale * B @ A`` with A [rank, d_in] and B [d_out, rank].

    Parameters
    ----------
    name: the module's path in the base model (``model.layers.0.self_attn.q_proj``); of an expert in a stack, with its
        number (``model.layers.0.mlp.experts[3]``).
    dtype: the type that holds both factors: the wider of the two stored ones.
    a_key, b_key: the tensors in the file.
    a_name, b_name: the tensors as they are written, in PEFT's form.
    build: how factors are made that are not stored as such; None where ``a_key`` and ``b_key`` are they.
    bias_key, bias_name: the bias of lora_B, which is scaled with the update; None where there is none.
    stack: the place of an expert whose factors are stored with the others'.
    """

    name: str
    rank: int
    d_in: int
    d_out: int
    scale: float
    dtype: torch.dtype
    a_key: str
    b_key: str
    a_name: str
    b_name: str
    build: Build | None = None
    bias_key: str | None = None
    bias_name: str | None = None
    stack: Stack | None = None
