"""Names of the tensors of an adapter, as PEFT writes them, against the engine's layers. Knows no engine."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loraforge.errors import InputError

# a layer that the engine runs as one -> the modules that it is made of, in their order
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ATTENTION = FUSED["qkv_proj"]
_PLACES = {part: (whole, place) for whole, parts in FUSED.items() for place, part in enumerate(parts)}
_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")


@dataclass(frozen=True)
class Pair:
    """Factors of one module of an adapter: A [rank, inputs], B [outputs, rank], the scale folded into B."""

    module: str
    a: Tensor
    b: Tensor


def parse(name: str) -> tuple[str, str] | None:
    """(module, "A" or "B") that a tensor is for; None where it is no factor of a linear map."""
    found = _FACTOR.fullmatch(name)
    return (found["module"], found["side"]) if found else None


def place(module: str) -> tuple[str, int | None]:
    """(target, slice) of a module in the engine; the slice is None where the module has all of them."""
    leaf = module.rpartition(".")[2]
    return _PLACES.get(leaf, (leaf, None))


def pairs(
    tensors: Mapping[str, Tensor], rank: Callable[[str], int], scale: Callable[[str], float], path: Path
) -> dict[str, dict[int | None, Pair]]:
    """Factors by target and slice, of the tensors of one layer, by their names in the file.

    rank, scale: what the configuration gives a module. path: of the adapter, for errors.
    Raises InputError for a tensor that is no factor, a factor without the other, ranks that disagree with each other or
    with the configuration, values that are not finite, or modules that exclude each other.
    """
    sides: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        parsed = parse(name)
        if parsed is None:
            raise InputError("is no LoRA factor of a linear layer", path=path, key=name, remedy=_OTHER)
        module, side = parsed
        if side in sides[module]:
            raise InputError(f"lora_{side} is stored twice", path=path, key=module, remedy=_AGAIN)
        if not bool(tensor.isfinite().all()):
            raise InputError(
                "holds NaN or infinite values", path=path, key=name, remedy="leave this adapter out"
            )
        sides[module][side] = tensor
    found: dict[str, dict[int | None, Pair]] = defaultdict(dict)
    for module, its in sides.items():
        if len(its) < 2:
            lacking = "B" if "A" in its else "A"
            raise InputError(f"has no lora_{lacking}", path=path, key=module, remedy=_AGAIN)
        a, b, wanted = its["A"], its["B"], rank(module)
        if a.dim() != 2 or b.dim() != 2 or not len(a) == b.shape[1] == wanted:
            raise InputError(
                f"lora_A is {list(a.shape)}, lora_B {list(b.shape)}, and the configuration gives rank {wanted}",
                path=path,
                key=module,
                remedy="make r or rank_pattern agree with the tensors",
            )
        target, slice_ = place(module)
        if slice_ in found[target] or (found[target] and None in {slice_, *found[target]}):
            raise InputError(
                f"{target} has these factors twice in one layer", path=path, key=module, remedy=_AGAIN
            )
        # one rounding, when the pool takes it
        found[target][slice_] = Pair(module, a, b.to(torch.float32) * scale(module))
    return dict(found)


def missing(weights: Mapping[str, Tensor], outputs: Mapping[str, int]) -> dict[str, Tensor]:
    """Zeros for the parts of attention that an adapter lacks beside others, by name.

    weights: of one layer, by their names in the file. outputs: of each part.
    """
    present: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in weights:
        if (parsed := parse(name)) is not None:
            module, side = parsed
            parent, _, leaf = module.rpartition(".")
            if leaf in ATTENTION:
                present[parent][leaf][side] = name
    made: dict[str, Tensor] = {}
    for its in present.values():
        leaf, names = next(iter(its.items()))
        for lacking in (part for part in ATTENTION if part not in its):
            for side, name in names.items():
                given = weights[name]
                rows = len(given) if side == "A" else outputs[lacking]
                # not the first such word in it: a model's own name may hold one
                head, _, tail = name.rpartition(f".{leaf}.")
                made[f"{head}.{lacking}.{tail}"] = torch.zeros((rows, given.shape[1]), dtype=given.dtype)
    return made


_OTHER = "load a LoRA adapter of this base model"
_AGAIN = "the file is incomplete or damaged: save it again"
