"""LoRA itself: on linear maps, on embeddings, with or without a bias, and on stacks of experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraforge.errors import InputError
from loraforge.fleet.modules import Get, LoraModule, Stack
from loraforge.fleet.peft_config import CONFIG_NAME
from loraforge.fleet.variants.source import Named, Source

_PARTS = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_[AB](?=\.weight)|lora_embedding_[AB]|lora_B\.bias)(?:\.weight)?"
)
# PEFT wraps the parameters of one module in the order in which the module has them, the first innermost
_INNER_FIRST = ("gate_up_proj", "up_proj", "down_proj")


def lora_modules(source: Source) -> list[LoraModule]:
    """Every module of a LoRA adapter. Raises InputError, naming the tensor, for what does not fit together."""
    modules: list[LoraModule] = []
    for name, parts in source.groups(_PARTS).items():
        owner = name
        while owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
        if source.config.parameters_of(owner):
            modules += _experts(source, name, owner, parts)
        else:
            modules.append(_module(source, name, parts))
    return modules


def _module(source: Source, name: str, parts: Mapping[str, Named]) -> LoraModule:
    kind = "lora_embedding" if "lora_embedding_A" in parts or "lora_embedding_B" in parts else "lora"
    a, b = (_side(source, name, parts, kind, side) for side in "AB")
    source.require_target(name, a)
    rank, d_in = source.matrix(a)
    d_out, b_rank = source.matrix(b)
    if rank != b_rank:
        raise source.error(
            f"shapes of module {name} disagree: lora_A is {[rank, d_in]}, lora_B is {[d_out, b_rank]}",
            b,
            "lora_A must be [r, d_in] and lora_B [d_out, r]",
        )
    if rank != source.config.rank(name):
        raise source.error(
            f"rank of module {name} is {rank}, but {CONFIG_NAME} gives it {source.config.rank(name)}",
            a,
            "make r or rank_pattern agree with the tensors",
        )
    _check_rank(source, name, rank, d_in, d_out, a)
    bias = parts.get("lora_B.bias")
    if bias is not None and source.vector(bias) != d_out:
        raise source.error(f"shape {list(bias.shape)} is not that of a bias of {d_out} outputs", bias)
    return LoraModule(
        name=name,
        rank=rank,
        d_in=d_in,
        d_out=d_out,
        scale=source.config.scale(name),
        dtype=torch.promote_types(source.dtype(a), source.dtype(b)),
        a_key=a.stored,
        b_key=b.stored,
        a_name=a.key.canonical,
        b_name=b.key.canonical,
        bias_key=None if bias is None else bias.stored,
        bias_name=None if bias is None else bias.key.canonical,
    )


def _side(source: Source, name: str, parts: Mapping[str, Named], kind: str, side: str) -> Named:
    if (found := parts.get(f"{kind}_{side}")) is None:
        other = "B" if side == "A" else "A"
        have = parts.get(f"{kind}_{other}") or next(iter(parts.values()))
        raise source.error(
            f"module {name} has lora_{other} but no lora_{side}",
            have,
            "the file is incomplete: save the adapter again",
        )
    return found


def _check_rank(source: Source, name: str, rank: int, d_in: int, d_out: int, tensor: Named) -> None:
    if rank > min(d_in, d_out):
        raise source.error(
            f"rank {rank} of module {name} exceeds min(d_in, d_out) = {min(d_in, d_out)}",
            tensor,
            "train with a smaller r, or leave this adapter out",
        )


@dataclass(frozen=True)
class ExpertBuild:
    """One expert's pair out of A [experts * r, d_in] and B [d_out, r * experts], experts varying fastest in B."""

    a: str
    b: str
    expert: int
    experts: int

    @property
    def keys(self) -> tuple[str, ...]:
        return self.a, self.b

    def factors(self, get: Get) -> tuple[Tensor, Tensor]:
        a, b = get(self.a), get(self.b)
        return (
            a.view(self.experts, -1, a.shape[1])[self.expert],
            b.view(b.shape[0], -1, self.experts)[:, :, self.expert].contiguous(),
        )


def stack_experts(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The pair of tensors that PEFT stores for the pairs A [r, d_in], B [d_out, r] of all experts, of one rank."""
    a = torch.cat([pair[0] for pair in pairs])
    b = torch.stack([pair[1] for pair in pairs], dim=2)
    return a, b.flatten(1)


def _experts(source: Source, name: str, owner: str, parts: Mapping[str, Named]) -> list[LoraModule]:
    """One module an expert of a parameter that PEFT adapts as a stack (``target_parameters``)."""
    a, b = (_side(source, name, parts, "lora", side) for side in "AB")
    parameter = _parameter(source, name, owner, a)
    rank, scale = source.config.rank(parameter), source.config.scale(parameter)
    rows, d_in = source.matrix(a)
    d_out, columns = source.matrix(b)
    if rows != columns or rows % rank:
        raise source.error(
            f"lora_A [{rows}, {d_in}] and lora_B [{d_out}, {columns}] are not those of experts of rank {rank}",
            a,
            "make r or rank_pattern agree with the tensors",
        )
    _check_rank(source, name, rank, d_in, d_out, a)
    experts = rows // rank
    whole = LoraModule(
        name=name,
        rank=rank,
        d_in=d_in,
        d_out=d_out,
        scale=scale,
        dtype=torch.promote_types(source.dtype(a), source.dtype(b)),
        a_key=a.stored,
        b_key=b.stored,
        a_name=a.key.canonical,
        b_name=b.key.canonical,
    )
    return [
        replace(
            whole,
            name=f"{name}[{expert}]",
            build=ExpertBuild(a.stored, b.stored, expert, experts),
            stack=Stack(owner, expert, experts),
        )
        for expert in range(experts)
    ]


def _parameter(source: Source, name: str, owner: str, tensor: Named) -> str:
    """Path of the parameter that ``name`` adapts, which its place among wrappers tells and the file does not name.

    Where all parameters of the module have one rank and scale, any of them does.
    """
    parameters = [f"{owner}.{leaf}" for leaf in source.config.parameters_of(owner)]
    rules = {(source.config.rank(parameter), source.config.scale(parameter)) for parameter in parameters}
    if len(rules) == 1:
        return parameters[0]
    leaves = [parameter.rpartition(".")[2] for parameter in parameters]
    if not set(leaves) <= set(_INNER_FIRST):
        raise InputError(
            f"gives parameters of {owner} different ranks, and the file does not say which tensor is whose",
            path=source.config.path,
            key="rank_pattern",
            remedy="train them with one rank and one alpha",
        )
    parameters.sort(key=lambda parameter: _INNER_FIRST.index(parameter.rpartition(".")[2]))
    depth = (len(name) - len(owner)) // len(".base_layer")  # the outermost has none
    if depth >= len(parameters):
        raise source.error(f"{owner} has more adapted tensors than target_parameters", tensor)
    return parameters[len(parameters) - 1 - depth]
