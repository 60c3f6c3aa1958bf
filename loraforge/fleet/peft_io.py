"""Read every PEFT LoRA adapter that can be truncated exactly, and refuse the others by name.

An adapter is a folder with ``adapter_config.json`` and ``adapter_model.safetensors``. Opening one reads the
safetensors header only; factors are memory-mapped. Pickle files are never opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from loraforge.errors import InputError
from loraforge.files import sha256_file
from loraforge.fleet.peft_config import CONFIG_NAME, WEIGHTS_NAME, PeftConfig, read_config

_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Tensors of LoRA variants whose update is not s B A, and why a truncated one would not be exact.
_REFUSED_TENSORS = (
    (re.compile(r"\.lora_magnitude_vector(\.|$)"), "a DoRA magnitude is tied to the full update"),
    (re.compile(r"\.lora_embedding_[AB](\.|$)"), "LoRA on an embedding is not supported"),
    (re.compile(r"\.lora_[AB]\.bias$"), "the bias of a LoRA factor is scaled with the update"),
)


@dataclass(frozen=True)
class LoraModule:
    """One adapted linear map: ``dW = scale * B @ A`` with A [rank, d_in] and B [d_out, rank].

    ``name`` is the module's path in the base model (``model.layers.0.self_attn.q_proj``); ``a_key`` and
    ``b_key`` are the tensors in the file; ``dtype`` is the wider of the two stored types.
    """

    name: str
    rank: int
    d_in: int
    d_out: int
    scale: float
    dtype: torch.dtype
    a_key: str
    b_key: str


@dataclass(frozen=True)
class Adapter:
    """An opened adapter: modules in natural order, and keys of tensors that compression leaves alone."""

    name: str
    path: Path
    base_model: str
    config: dict[str, Any]
    modules: tuple[LoraModule, ...]
    passthrough: tuple[str, ...] = field(default=())

    @property
    def weights_path(self) -> Path:
        return self.path / WEIGHTS_NAME

    @cached_property
    def weights_sha256(self) -> str:
        """Hex SHA-256 of the weights file; read once, or not at all after :meth:`state_sha256`."""
        return sha256_file(self.weights_path)

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
        yield FactorReader(self, _open_safetensors(self.weights_path))

    def factors(self, module: LoraModule) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, d_in] and B [d_out, rank] as stored, without scale; see :meth:`FactorReader.factors`."""
        with self.reader() as reader:
            return reader.factors(module)


class FactorReader:
    """Memory-mapped tensors of one adapter; made by :meth:`Adapter.reader`."""

    def __init__(self, adapter: Adapter, handle: Any) -> None:
        self.adapter, self._handle = adapter, handle

    def factors(self, module: LoraModule) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, d_in] and B [d_out, rank] in their stored dtype, scale not applied.

        Raises InputError that names the tensor where a value is NaN or infinite.
        """
        return self._finite(module.a_key), self._finite(module.b_key)

    def tensor(self, key: str) -> torch.Tensor:
        """Any tensor of the file as stored, unchecked: what a pass-through copy needs."""
        tensor: torch.Tensor = self._handle.get_tensor(key)
        return tensor

    def _finite(self, key: str) -> torch.Tensor:
        tensor = self.tensor(key)
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                "holds NaN or infinite values",
                path=self.adapter.weights_path,
                key=key,
                remedy="the training run diverged: retrain, or leave this adapter out",
            )
        return tensor


def open_adapter(path: Path, *, name: str | None = None) -> Adapter:
    """Open one adapter folder and check everything that its header and configuration can tell.

    ``name`` defaults to the folder's name. Raises InputError for every input that cannot be compressed:
    missing, truncated or pickled weights, a configuration without rank, shapes that disagree, an unknown
    tensor, or a LoRA variant whose truncation is not exact.
    """
    path = Path(path)
    config = read_config(path)
    _require_weights(path)
    weights = path / WEIGHTS_NAME
    pairs: dict[str, dict[str, str]] = {}
    passthrough: list[str] = []
    handle = _open_safetensors(weights)
    for key in handle.keys():  # noqa: SIM118  (safe_open is not a mapping)
        found = _FACTOR.fullmatch(key.removeprefix(_PREFIX))
        if found is None:
            _accept_passthrough(config, weights, key)
            passthrough.append(key)
        elif found["side"] in pairs.setdefault(found["module"], {}):
            raise InputError(f"module {found['module']} is stored twice", path=weights, key=key)
        else:
            pairs[found["module"]][found["side"]] = key
    modules = [_module(handle, weights, config, name_, pairs[name_]) for name_ in natural_sorted(pairs)]
    if not modules:
        raise InputError("holds no LoRA factor", path=weights, remedy="check that it is a PEFT LoRA adapter")
    return Adapter(
        name=_adapter_name(path.resolve().name if name is None else name, path),
        path=path,
        base_model=config.base_model,
        config=config.raw,
        modules=tuple(modules),
        passthrough=tuple(natural_sorted(passthrough)),
    )


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


def open_fleet(adapters: Sequence[Path]) -> list[Adapter]:
    """Open all adapters found by :func:`find_adapters`, which must share one base model and differ in name.

    Raises InputError as :func:`open_adapter` does, and for a duplicate name or a second base model.
    """
    return check_fleet([open_adapter(path) for path in find_adapters(adapters)])


def check_fleet(fleet: list[Adapter]) -> list[Adapter]:
    """Return ``fleet`` where names are unique and the base model is one; raise InputError otherwise."""
    if not fleet:
        raise InputError("the fleet is empty", remedy="name at least one PEFT adapter folder")
    by_name: dict[str, Adapter] = {}
    for adapter in fleet:
        if adapter.name in by_name:
            raise InputError(
                f"two adapters are named {adapter.name!r} (the other is {by_name[adapter.name].path})",
                path=adapter.path,
                remedy="rename one of the folders",
            )
        by_name[adapter.name] = adapter
        if adapter.base_model != fleet[0].base_model:
            raise InputError(
                f"base model is {adapter.base_model!r}, but {fleet[0].path} has {fleet[0].base_model!r}",
                path=adapter.path / CONFIG_NAME,
                key="base_model_name_or_path",
                remedy="compress adapters of one base model at a time",
            )
    return fleet


def natural_sorted(names: Sequence[str] | Mapping[str, object]) -> list[str]:
    """Sort with numbers by value: layer 2 before layer 10."""
    return sorted(
        names, key=lambda name: [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in _split(name)]
    )


def _split(name: str) -> list[str]:
    return [part for part in re.split(r"([0-9]+)", name) if part]


def _looks_like_adapter(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in (CONFIG_NAME, WEIGHTS_NAME, *_PICKLES))


def _adapter_name(name: str, path: Path) -> str:
    if not name or name in (".", "..") or "/" in name or "\\" in name:
        raise InputError(f"{name!r} cannot name an adapter", path=path, remedy="use a plain folder name")
    return name


def _require_weights(path: Path) -> None:
    if (path / WEIGHTS_NAME).is_file():
        return
    for pickle in _PICKLES:
        if (path / pickle).exists():
            raise InputError(
                "is a pickle checkpoint, which can run code when opened",
                path=path / pickle,
                remedy="convert it to safetensors where you trust it: "
                "PeftModel.from_pretrained(base, folder).save_pretrained(folder, safe_serialization=True)",
            )
    raise InputError(
        "file not found", path=path / WEIGHTS_NAME, remedy="save the adapter with PEFT as safetensors"
    )


def _open_safetensors(path: Path) -> Any:
    """The file is closed with the last reference: to close it under a thread that reads, as where another has failed
    or the run is stopped, raises an error of its own, which hides why."""
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"not a whole safetensors file ({error})", path=path, remedy="download or save it again"
        ) from error


def _accept_passthrough(config: PeftConfig, weights: Path, key: str) -> None:
    for pattern, why in _REFUSED_TENSORS:
        if pattern.search(key):
            raise InputError(f"cannot be truncated exactly: {why}", path=weights, key=key)
    if not config.passes_through(key.removeprefix(_PREFIX)):
        raise InputError(
            "unknown module: neither a LoRA factor nor a tensor that adapter_config.json says is saved",
            path=weights,
            key=key,
            remedy="save the adapter with PEFT, or list the module in modules_to_save",
        )


def _module(handle: Any, weights: Path, config: PeftConfig, name: str, keys: Mapping[str, str]) -> LoraModule:
    for side, other in (("A", "B"), ("B", "A")):
        if side not in keys:
            raise InputError(
                f"module {name} has lora_{other} but no lora_{side}",
                path=weights,
                key=keys[other],
                remedy="the file is incomplete: save the adapter again",
            )
    if not config.targets(name):
        raise InputError(
            f"unknown module: {CONFIG_NAME} does not target {name}",
            path=weights,
            key=keys["A"],
            remedy="make target_modules and the tensors agree",
        )
    (rank, d_in), a_dtype = _shape(handle, weights, keys["A"])
    (d_out, b_rank), b_dtype = _shape(handle, weights, keys["B"])
    if rank != b_rank:
        raise InputError(
            f"shapes of module {name} disagree: lora_A is {[rank, d_in]}, lora_B is {[d_out, b_rank]}",
            path=weights,
            key=keys["B"],
            remedy="lora_A must be [r, d_in] and lora_B [d_out, r]",
        )
    if rank != config.rank(name):
        raise InputError(
            f"rank of module {name} is {rank}, but {CONFIG_NAME} gives it {config.rank(name)}",
            path=weights,
            key=keys["A"],
            remedy="make r or rank_pattern agree with the tensors",
        )
    if rank > min(d_in, d_out):
        raise InputError(
            f"rank {rank} of module {name} exceeds min(d_in, d_out) = {min(d_in, d_out)}",
            path=weights,
            key=keys["A"],
            remedy="train with a smaller r, or leave this adapter out",
        )
    return LoraModule(
        name=name,
        rank=rank,
        d_in=d_in,
        d_out=d_out,
        scale=config.scale(name),
        dtype=torch.promote_types(a_dtype, b_dtype),
        a_key=keys["A"],
        b_key=keys["B"],
    )


def _shape(handle: Any, weights: Path, key: str) -> tuple[tuple[int, int], torch.dtype]:
    view = handle.get_slice(key)
    shape, dtype = list(view.get_shape()), view.get_dtype()
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"shape {shape} is not that of a LoRA matrix", path=weights, key=key)
    if dtype not in _DTYPES:
        raise InputError(
            f"stored as {dtype}; only {', '.join(_DTYPES)} can be factorised",
            path=weights,
            key=key,
            remedy="save the adapter in bfloat16 or wider",
        )
    return (shape[0], shape[1]), _DTYPES[dtype]
