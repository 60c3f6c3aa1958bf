"""An adapter in the engine's host memory: packed for the pool, with exact ranks and scales.

The engine stacks the parts of a fused layer, which need one rank for that, and multiplies an adapter by one scale. What
the pool serves is taken from it before: each part keeps the rank and the scale that PEFT would give it. What is left to
the engine (embeddings, experts) is held against what it can serve, since what it cannot ends the server at first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.utils import get_stacked_multiply, get_target_module_name
from torch import Tensor

from loraforge.errors import InputError, LoraForgeError
from loraforge.fleet.peft_config import CONFIG_NAME, PeftConfig, parse_config
from loraforge.fleet.peft_io import open_adapter
from loraforge.runtime.packed import Packed
from loraforge.runtime.ranks import Factors, check_manifest
from loraforge.runtime.sglang.modules import Pair, pairs, parse, place

_UNSERVED = "load an adapter of this base model and of the server's --lora-target-modules"
_SAME = "the engine serves these modules at the adapter's own rank and scale alone: leave this adapter out"


class RankedConfig(LoRAConfig):
    """The engine's view of ``adapter_config.json``: its rank is the largest that any module has."""

    peft: PeftConfig

    def __init__(self, path: str | None = None, *args: Any, **kwargs: Any) -> None:
        with _explained(path):
            super().__init__(path, *args, **kwargs)
        file = Path(path or "") / CONFIG_NAME
        self.peft = parse_config(file, self.hf_config)
        if self.peft.kind != "LORA":
            raise InputError(
                f"is {self.peft.kind}, which the engine does not load",
                path=file,
                key="peft_type",
                remedy="loraforge compress makes plain LoRA of it",
            )
        patterns: Mapping[str, Any] = self.hf_config.get("rank_pattern") or {}
        self.r = max([self.peft.r, *(rank for rank in patterns.values() if type(rank) is int)])


class PackedAdapter(LoRAAdapter):
    """packed: what the pool takes, once there is a pool."""

    def __init__(self, uid: str, config: RankedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(uid, config, *args, **kwargs)
        self.packed: Packed | None = None
        self._path = Path(config.path or uid)
        # the engine's own formula leaves rsLoRA out; it is of those modules alone that the engine serves
        self.scaling = config.peft.scale("")
        self._held: list[dict[str, Tensor]] = []

    def initialize_weights(self) -> None:
        """Called by the engine to read the file."""
        with _explained(self.config.path):
            super().initialize_weights()

    def _process_weight(self, name: str, loaded_weight: Tensor) -> None:
        try:
            super()._process_weight(name, loaded_weight)
        except IndexError:
            raise InputError(
                "the model has no such layer", path=self._path, key=name, remedy=_UNSERVED
            ) from None

    def _normalize_weights(self) -> None:
        """Called by the engine when the tensors are read: holds back what the pool may serve."""
        for layer in self.layers:
            held = {
                name: weight
                for name, weight in layer.weights.items()
                if weight.dim() <= 2 and "experts" not in name
            }
            for name in held:
                del layer.weights[name]
            self._held.append(held)
        self._native()
        if self.lora_backend.memory is not None:
            self.adopt()

    def adopt(self) -> None:
        """Pack what the pool serves, once there is a pool, and give the rest to the engine.

        Raises LoraForgeError for what neither can serve.
        """
        memory = self.lora_backend.memory
        if self.packed is not None:
            return
        factors: dict[str, list[Factors | None]] = {}
        ranks: dict[str, int] = {}
        mine = [layer.weights for layer in self.layers]
        for number, (layer, held) in enumerate(zip(self.layers, self._held, strict=True)):
            # what is no factor at all is refused with those that are ours
            taken = {name for name in held if (key := _key(number, name)) is None or key in memory.served}
            layer.weights = {name: weight for name, weight in held.items() if name not in taken}
            its = pairs(
                {name: held[name] for name in taken},
                self.config.peft.rank,
                self.config.peft.scale,
                self._path,
            )
            for target, parts in its.items():
                served = memory.served[number, target]
                factors[served.projection.name] = self._factors(served, parts)
                ranks |= {pair.module: _live(pair) for pair in parts.values()}
        self._native()
        for layer, weights in zip(self.layers, mine, strict=True):
            layer.weights.update(weights)
        if not factors and not any(True for _ in self._rest()):
            raise InputError(
                "has no tensor of a LoRA layer", path=self._path, remedy="save the adapter again"
            )
        self._check_rest(memory)
        if self._path.is_dir():
            check_manifest(self._path, ranks)
        self.packed = memory.register(self, factors)
        self._held = []

    def _factors(self, served: Any, parts: dict[int | None, Pair]) -> list[Factors | None]:
        try:
            found: list[Factors | None] = served.factors(parts)
        except InputError as error:
            raise InputError(error.problem, path=self._path, key=error.key, remedy=error.remedy) from None
        return found

    def _native(self) -> None:
        """The engine's own normalisation, of what is in the layers now."""
        try:
            super()._normalize_weights()
        except (KeyError, RuntimeError) as error:
            raise InputError(
                f"the engine cannot put its modules together ({error})", path=self._path, remedy=_UNSERVED
            ) from error

    def _check_rest(self, memory: Any) -> None:
        """Raise InputError for a tensor that the engine's loader would stop the server at."""
        stated = self.config.r
        for name, weight in self._rest():
            try:
                target = get_target_module_name(name, memory.target_modules)
            except ValueError:
                raise InputError(
                    "no module that is served", path=self._path, key=name, remedy=_UNSERVED
                ) from None
            if target in memory.served_targets:
                raise InputError("the model has no such layer", path=self._path, key=name, remedy=_UNSERVED)
            if parse(name) is None and "lora_embedding" not in name:
                continue  # whole weights, which the engine passes over
            first = "lora_A" in name or "lora_embedding_A" in name
            slices = get_stacked_multiply(f"{target}_moe" if "experts" in name else target, self.base_model)
            rank, wanted = (weight.shape[-2], slices * stated) if first else (weight.shape[-1], stated)
            module = (parse(name) or (name, ""))[0]
            if rank != wanted or self.config.peft.scale(module) != self.scaling:
                raise InputError(
                    f"rank {rank} where the engine takes {wanted}, or a scale of its own",
                    path=self._path,
                    key=name,
                    remedy=_SAME,
                )

    def _rest(self) -> Iterator[tuple[str, Tensor]]:
        for layer in self.layers:
            yield from layer.weights.items()
        yield from self.embedding_layers.items()


def require_packed(adapter: PackedAdapter) -> Packed:
    """What the pool takes of an adapter. Raises LoraForgeError where there was no pool when it was registered."""
    if adapter.packed is None:
        raise LoraForgeError("was not packed", key=str(adapter.uid), remedy="load the adapter again")
    return adapter.packed


@contextmanager
def _explained(path: str | None) -> Iterator[None]:
    """Have what the engine's own reader says of a damaged folder say which file it is, and what of it."""
    try:
        yield
    except (SafetensorError, ValueError, KeyError, TypeError):
        if path and (folder := Path(path)).is_dir():
            open_adapter(folder)
        raise


def _key(layer: int, name: str) -> tuple[int, str] | None:
    parsed = parse(name)
    return (layer, place(parsed[0])[0]) if parsed else None


def _live(pair: Pair) -> int:
    from loraforge.runtime.ranks import live_rank

    return live_rank(pair.a, pair.b)
