"""What every kind of adapter is read from: its tensors by name, its configuration, and the base model's shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from loraforge.errors import InputError
from loraforge.fleet.modules import Build, LoraModule
from loraforge.fleet.peft_config import CONFIG_NAME, PeftConfig
from loraforge.fleet.peft_keys import Key
from loraforge.fleet.weight_files import StoredTensor

FACTOR_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Named:
    """One stored tensor: its key in the file, and in PEFT's form; type and shape."""

    key: Key
    tensor: StoredTensor

    @property
    def stored(self) -> str:
        return self.key.stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape


@dataclass
class Source:
    """The tensors of one adapter by their names without prefix; ``used`` are those that modules were made of."""

    path: Path
    config: PeftConfig
    tensors: Mapping[str, Named]
    base: Path | None = None
    used: set[str] = field(default_factory=set)

    def groups(self, pattern: re.Pattern[str]) -> dict[str, dict[str, Named]]:
        """Tensors whose names match ``pattern``, which has groups ``module`` and ``part``: by module, then part.

        Marks them as used. Raises InputError for a part stored twice, or a module that the configuration does not
        target.
        """
        found: dict[str, dict[str, Named]] = {}
        for name, tensor in self.tensors.items():
            if (match := pattern.fullmatch(name)) is None:
                continue
            parts = found.setdefault(match["module"], {})
            if match["part"] in parts:
                raise self.error(f"module {match['module']} is stored twice", tensor)
            parts[match["part"]] = tensor
            self.used.add(name)
        return found

    def require_target(self, module: str, tensor: Named) -> None:
        """Raise InputError where the configuration puts nothing on ``module``."""
        if not self.config.targets(module):
            raise self.error(
                f"unknown module: {CONFIG_NAME} does not target {module}",
                tensor,
                "make target_modules and the tensors agree",
            )

    def matrix(self, tensor: Named) -> tuple[int, int]:
        """Rows and columns. Raises InputError for another shape, or a type that cannot be factorised."""
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise self.error(f"shape {list(tensor.shape)} is not that of a LoRA matrix", tensor)
        self.dtype(tensor)
        return tensor.shape[0], tensor.shape[1]

    def vector(self, tensor: Named) -> int:
        """Values of a vector, or of a matrix of one column. Raises InputError as :meth:`matrix` does."""
        shape = tensor.shape
        if not shape or 0 in shape or shape[1:] not in ((), (1,)):
            raise self.error(f"shape {list(shape)} is not that of a vector", tensor)
        self.dtype(tensor)
        return shape[0]

    def dtype(self, tensor: Named) -> torch.dtype:
        """The type. Raises InputError for one that cannot be factorised."""
        if tensor.tensor.dtype not in FACTOR_DTYPES:
            raise self.error(
                f"stored as {tensor.tensor.dtype}; only {', '.join(FACTOR_DTYPES)} can be factorised",
                tensor,
                "save the adapter in bfloat16 or wider",
            )
        return FACTOR_DTYPES[tensor.tensor.dtype]

    def part(self, module: str, parts: Mapping[str, Named], name: str) -> Named:
        """The part ``name`` of a module. Raises InputError where it is missing."""
        if name not in parts:
            present, tensor = next(iter(parts.items()))
            raise self.error(
                f"module {module} has {present} but no {name}",
                tensor,
                "the file is incomplete: save the adapter again",
            )
        return parts[name]

    def error(self, problem: str, tensor: Named, remedy: str | None = None) -> InputError:
        return InputError(problem, path=tensor.tensor.file, key=tensor.stored, remedy=remedy)

    def converted(
        self, name: str, build: Build, parts: Mapping[str, Named], shape: tuple[int, int, int], scale: float
    ) -> LoraModule:
        """A module whose factors ``build`` makes; ``shape`` is rank, d_in and d_out.

        Raises InputError where it is not targeted, or where no smaller factors than the update itself exist.
        """
        rank, d_in, d_out = shape
        first = next(iter(parts.values()))
        self.require_target(name, first)
        if rank > min(d_in, d_out):
            raise self.error(
                f"cannot be converted: the update of module {name} has {rank} directions, more than "
                f"min(d_in, d_out) = {min(d_in, d_out)}, and is not thin",
                first,
                "train with a smaller r, or leave this adapter out",
            )
        wide = any(self.dtype(tensor) == torch.float64 for tensor in parts.values())
        out = Key("", name)
        return LoraModule(
            name=name,
            rank=rank,
            d_in=d_in,
            d_out=d_out,
            scale=scale,
            dtype=torch.float64 if wide else torch.float32,
            a_key=build.keys[0],
            b_key=build.keys[-1],
            a_name=f"{out.canonical}.lora_A.weight",
            b_name=f"{out.canonical}.lora_B.weight",
            build=build,
        )
