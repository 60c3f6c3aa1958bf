"""Read every PEFT adapter that can be truncated exactly, and refuse the others by name.

An adapter is a folder with ``adapter_config.json`` and ``adapter_model.safetensors``, or shards of it. Opening one
reads headers only; factors are memory-mapped. Nothing in the folder is executed or imported, and pickles are not
opened unless the user allows it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from loraforge.digest import source_digest
from loraforge.errors import InputError
from loraforge.fleet.modules import Get, LoraModule
from loraforge.fleet.options import DEFAULT, ReadOptions
from loraforge.fleet.peft_config import CONFIG_NAME, WEIGHTS_NAME, PeftConfig, read_config
from loraforge.fleet.peft_keys import parse_key
from loraforge.fleet.untrusted_path import plain_name
from loraforge.fleet.variants.adalora import adalora_modules
from loraforge.fleet.variants.equivalent import lora_config
from loraforge.fleet.variants.lora import lora_modules
from loraforge.fleet.variants.lycoris import loha_modules, lokr_modules
from loraforge.fleet.variants.source import Named, Source
from loraforge.fleet.variants.vera import vera_modules
from loraforge.fleet.weight_files import WeightFiles, has_weights, open_weights

__all__ = ["Adapter", "FactorReader", "LoraModule", "open_adapter", "open_fleet"]

_SHARED = 4  # tensors kept of those that many modules are made of
# Tensors of LoRA variants whose update is not s B A, and why a truncated one would not be exact.
_REFUSED_TENSORS = (
    (re.compile(r"\.lora_magnitude_vector(\.|$)"), "a DoRA magnitude is tied to the full update"),
    (re.compile(r"\.lora_A\.bias$"), "a bias of lora_A goes through lora_B"),
)


@dataclass(frozen=True)
class Adapter:
    """An opened adapter: modules in natural order, and tensors that compression leaves alone.

    ``config`` is that of LoRA, of one of another kind the equivalent. ``passthrough``: names of tensors as they are
    written; ``stored_as`` has their keys in the file where those differ.
    """

    name: str
    path: Path
    base_model: str
    config: dict[str, Any]
    modules: tuple[LoraModule, ...]
    weights: WeightFiles
    passthrough: tuple[str, ...] = field(default=())
    stored_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights_path(self) -> Path:
        """The weights file, or the first of several."""
        return self.weights.first

    @property
    def derivation(self) -> dict[str, Any]:
        """What factors depend on beyond the weights: of modules that are built, the shapes and how; else nothing."""
        built = [module for module in self.modules if module.build is not None]
        if not built:
            return {}
        shapes = {module.name: [module.rank, module.d_in, module.d_out] for module in built}
        return {"derived": shapes, "derivation": source_digest("fleet/variants")}

    @cached_property
    def weights_sha256(self) -> str:
        """Hex SHA-256 of the weights (:meth:`WeightFiles.sha256`); read once, or not at all after
        :meth:`state_sha256`."""
        return self.weights.sha256()

    @property
    def hashed(self) -> bool:
        """Whether ``weights_sha256`` is known without reading the file."""
        return "weights_sha256" in self.__dict__

    def state_sha256(self, sha256: str) -> None:
        """Take ``weights_sha256`` from whoever has read the whole file for another purpose."""
        self.__dict__["weights_sha256"] = sha256

    @property
    def n_parameters(self) -> int:
        """Parameters of all factors: sum of rank * (d_in + d_out)."""
        return sum(module.rank * (module.d_in + module.d_out) for module in self.modules)

    @contextmanager
    def reader(self) -> Iterator[FactorReader]:
        """Open the weights once for many reads; the tensors outlive the block."""
        yield FactorReader(self, self.weights.reader())

    def factors(self, module: LoraModule) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, d_in] and B [d_out, rank] as stored, without scale; see :meth:`FactorReader.factors`."""
        with self.reader() as reader:
            return reader.factors(module)


class FactorReader:
    """Memory-mapped tensors of one adapter; made by :meth:`Adapter.reader`."""

    def __init__(self, adapter: Adapter, get: Get) -> None:
        self.adapter, self._get = adapter, get
        self._lock = threading.Lock()
        self._shared: dict[str, torch.Tensor] = {}

    def factors(self, module: LoraModule) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, d_in] and B [d_out, rank], scale not applied: in their stored dtype, or float64 where they are
        computed from what is stored.

        Raises InputError that names the tensor where a value is NaN or infinite.
        """
        if module.build is not None:
            return module.build.factors(self._checked_once)
        return self._finite(module.a_key), self._finite(module.b_key)

    def bias(self, module: LoraModule) -> torch.Tensor | None:
        """Bias [d_out] of lora_B as it is to be written with factors of scale 1: float32, or wider if stored so."""
        if module.bias_key is None:
            return None
        bias = self._finite(module.bias_key)
        return (module.scale * bias.double()).to(torch.promote_types(bias.dtype, torch.float32))

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor by its name in ``passthrough``, or its key in the file, as stored and unchecked."""
        return self._get(self.adapter.stored_as.get(name, name))

    def _checked_once(self, key: str) -> torch.Tensor:
        """:meth:`_finite`, the last few kept: all experts of a stack, and all modules of VeRA, are read from two."""
        with self._lock:
            if (tensor := self._shared.get(key)) is None:
                tensor = self._shared[key] = self._finite(key)
                if len(self._shared) > _SHARED:
                    del self._shared[next(iter(self._shared))]
            return tensor

    def _finite(self, key: str) -> torch.Tensor:
        tensor = self._get(key)
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                "holds NaN or infinite values",
                path=self.adapter.weights.tensors[key].file,
                key=key,
                remedy="the training run diverged: retrain, or leave this adapter out",
            )
        return tensor


def open_adapter(path: Path, *, name: str | None = None, options: ReadOptions = DEFAULT) -> Adapter:
    """Open one adapter folder and check everything that its header and configuration can tell.

    ``name`` defaults to the folder's name. Raises InputError for every input that cannot be compressed:
    missing, truncated or pickled weights, a configuration without rank, shapes that disagree, an unknown
    tensor, or a kind of adapter whose truncation is not exact.
    """
    path = Path(path)
    config = read_config(path)
    weights = open_weights(path, allow_pickle=options.allow_pickle)
    source = Source(path, config, _by_name(weights), options.base)
    modules = _modules(source, weights)
    stored_as: dict[str, str] = {}
    for key_name, tensor in source.tensors.items():
        if key_name not in source.used:
            _accept_passthrough(config, key_name, tensor)
            stored_as[tensor.key.canonical] = tensor.stored
    if not modules:
        raise InputError(
            "holds no LoRA factor", path=weights.first, remedy="check that it is a PEFT LoRA adapter"
        )
    by_module = {module.name: module for module in modules}
    return Adapter(
        name=_adapter_name(path.resolve().name if name is None else name, path),
        path=path,
        base_model=config.base_model,
        config=lora_config(config.raw),
        modules=tuple(by_module[module] for module in natural_sorted(by_module)),
        weights=weights,
        passthrough=tuple(natural_sorted(stored_as)),
        stored_as=stored_as,
    )


def _by_name(weights: WeightFiles) -> dict[str, Named]:
    """Tensors by their names in PEFT's form, without prefix."""
    found: dict[str, Named] = {}
    for stored, tensor in weights.tensors.items():
        key = parse_key(stored)
        if key.name in found:
            raise InputError(
                f"is stored twice, the other time as {found[key.name].stored}", path=tensor.file, key=stored
            )
        found[key.name] = Named(key, tensor)
    return found


def _modules(source: Source, weights: WeightFiles) -> list[LoraModule]:
    match source.config.kind:
        case "ADALORA":
            return adalora_modules(source, weights.reader())
        case "VERA":
            return vera_modules(source)
        case "LOHA":
            return loha_modules(source)
        case "LOKR":
            return lokr_modules(source)
        case _:
            return lora_modules(source)


def find_adapters(paths: Sequence[Path]) -> list[Path]:
    """Adapter folders named by ``paths``: each is one itself, or holds some as its direct subfolders.

    Raises InputError for a path that is missing, not a folder, or without an adapter.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            problem = "is not a folder" if path.exists() else "folder not found"
            raise InputError(problem, path=path, remedy="name a PEFT adapter folder or a folder of them")
        inside = (
            [path] if _looks_like_adapter(path) else [p for p in path.iterdir() if _looks_like_adapter(p)]
        )
        if not inside:
            raise InputError(
                "no PEFT adapter found",
                path=path,
                remedy=f"each adapter is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}",
            )
        by_name = {folder.name: folder for folder in inside}
        found.extend(by_name[name] for name in natural_sorted(by_name))
    return found


def open_fleet(adapters: Sequence[Path], options: ReadOptions = DEFAULT) -> list[Adapter]:
    """Open all adapters found by :func:`find_adapters`, which must share one base model and differ in name.

    Raises InputError as :func:`open_adapter` does, and for a duplicate name or a second base model.
    """
    return check_fleet([open_adapter(path, options=options) for path in find_adapters(adapters)])


@dataclass(frozen=True)
class Member:
    """What one fleet asks of its adapters: names of their own, and one base model."""

    name: str
    base_model: str
    path: Path


def check_fleet(fleet: list[Adapter]) -> list[Adapter]:
    """Return ``fleet`` where names are unique and the base model is one; raise InputError otherwise."""
    check_members([Member(adapter.name, adapter.base_model, adapter.path) for adapter in fleet])
    return fleet


def check_members(members: Sequence[Member]) -> None:
    """Raise InputError where there are no members, two of one name, or two base models."""
    if not members:
        raise InputError("the fleet is empty", remedy="name at least one PEFT adapter folder")
    by_name: dict[str, Member] = {}
    first = members[0]
    for member in members:
        if member.name in by_name:
            other = by_name[member.name].path
            if os.path.realpath(other) == os.path.realpath(member.path):
                raise InputError("is named twice", path=member.path, remedy="name it once")
            raise InputError(
                f"two adapters are named {member.name!r} (the other is {other})",
                path=member.path,
                remedy="rename one of the folders",
            )
        by_name[member.name] = member
        if member.base_model != first.base_model:
            raise InputError(
                f"base model is {member.base_model!r}, but {first.path} has {first.base_model!r}",
                path=member.path / CONFIG_NAME,
                key="base_model_name_or_path",
                remedy="compress adapters of one base model at a time",
            )


def natural_sorted(names: Sequence[str] | Mapping[str, object]) -> list[str]:
    """Sort with numbers by value: layer 2 before layer 10."""
    return sorted(
        names, key=lambda name: [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in _split(name)]
    )


def _split(name: str) -> list[str]:
    return [part for part in re.split(r"([0-9]+)", name) if part]


def _looks_like_adapter(path: Path) -> bool:
    return path.is_dir() and ((path / CONFIG_NAME).exists() or has_weights(path))


def _adapter_name(name: str, path: Path) -> str:
    if not plain_name(name):
        raise InputError(
            f"{name[:300]!r} cannot name an adapter", path=path, remedy="use a plain folder name"
        )
    return name


def _accept_passthrough(config: PeftConfig, name: str, tensor: Named) -> None:
    where: dict[str, Any] = {"path": tensor.tensor.file, "key": tensor.stored}
    for pattern, why in _REFUSED_TENSORS:
        if pattern.search(name):
            raise InputError(f"cannot be truncated exactly: {why}", **where)
    if not config.passes_through(name):
        raise InputError(
            "unknown module: neither a LoRA factor nor a tensor that adapter_config.json says is saved",
            remedy="save the adapter with PEFT, or list the module in modules_to_save",
            **where,
        )
