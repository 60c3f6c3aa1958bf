"""Where an adapter's tensors lie: one safetensors file, shards with an index, or, where that is allowed, a pickle.

Opening reads headers only. Nothing of a pickle is executed: it is read by torch's restricted reader, which builds
tensors and plain containers, and from a plain archive of the stated size.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loraforge.errors import InputError
from loraforge.files import canonical_json, sha256_file, sha256_text
from loraforge.fleet.peft_config import WEIGHTS_NAME
from loraforge.fleet.tensor_header import read_header
from loraforge.fleet.untrusted_json import read_untrusted_json, shown
from loraforge.fleet.untrusted_path import plain_name, require_regular
from loraforge.tensor_file import DTYPES

INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
MAX_SHARDS = 1000


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: the file that holds it, its type in safetensors' spelling, and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightFiles:
    """The weights of one adapter, opened: ``files`` that hold tensors, and others (an index) that say where."""

    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    others: tuple[Path, ...] = ()

    @property
    def first(self) -> Path:
        """The file, or the first of several: what errors name."""
        return self.files[0]

    @property
    def mapped(self) -> bool:
        """Whether all tensors lie in one safetensors file, at the places that its header states."""
        return len(self.files) == 1 and self.first.name not in PICKLES

    @property
    def bytes(self) -> int:
        """Size of all files that hold tensors."""
        return sum(path.stat().st_size for path in self.files)

    def sha256(self) -> str:
        """Hex SHA-256 of the one file; of names and hashes, as canonical JSON, where there are several."""
        if len(self.files) == 1:
            return sha256_file(self.first)
        return sha256_text(canonical_json({path.name: sha256_file(path) for path in self.files}))

    def reader(self) -> Callable[[str], Tensor]:
        """A function that gives the tensor of a key as stored; memory-mapped, and good beyond this object's life.

        Raises InputError for files that cannot be opened any more.
        """
        handles: dict[Path, Any] = {}

        def get(key: str) -> Tensor:
            path = self.tensors[key].file
            if path not in handles:
                handles[path] = _open(path)
            handle = handles[path]
            tensor: Tensor = handle[key] if isinstance(handle, dict) else handle.get_tensor(key)
            return tensor

        for path in self.files:
            handles[path] = _open(path)
        return get


def open_weights(folder: Path, *, allow_pickle: bool) -> WeightFiles:
    """Find and check the weights in an adapter folder; no tensor is read, except of a pickle.

    Raises InputError where there are none, where a header, an index or a pickle cannot be trusted, and for a pickle
    without ``allow_pickle``.
    """
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if single.exists() or single.is_symlink():
        require_regular(single, folder)
        return WeightFiles((single,), _header(single))
    if index.exists():
        return _open_shards(folder, index)
    for name in PICKLES:
        if (folder / name).exists():
            return _open_pickle(folder, folder / name, allow_pickle)
    raise InputError("file not found", path=single, remedy="save the adapter with PEFT as safetensors")


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights of any kind."""
    return any((folder / name).exists() for name in (WEIGHTS_NAME, INDEX_NAME, *PICKLES))


def _open(path: Path) -> Any:
    """The file is closed with the last reference: to close it under a thread that reads, as where another has failed
    or the run is stopped, raises an error of its own, which hides why."""
    if path.name in PICKLES:
        return _load_pickle(path)
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"not a whole safetensors file ({error})", path=path, remedy="download or save it again"
        ) from error


def _header(path: Path) -> dict[str, StoredTensor]:
    entries = read_header(path)
    _open(path)  # the reader that will be used must take the file too
    return {name: StoredTensor(path, entry.dtype, entry.shape) for name, entry in entries.items()}


def _open_shards(folder: Path, index: Path) -> WeightFiles:
    require_regular(index, folder)
    value = read_untrusted_json(index)
    table = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise InputError("must map tensor names to file names", path=index, key="weight_map")
    names = sorted(set(table.values()))
    if len(names) > MAX_SHARDS:
        raise InputError(
            f"names {len(names)} files, at most {MAX_SHARDS} are read", path=index, key="weight_map"
        )
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        if not plain_name(name) or not name.endswith(".safetensors"):
            raise InputError(f"{name[:200]!r} is not the name of a file here", path=index, key="weight_map")
        path = folder / name
        if not path.exists():
            raise InputError("file not found, but the index names it", path=path, remedy="download it")
        require_regular(path, folder)
        for key, entry in _header(path).items():
            if table.get(key) != name:
                raise InputError(
                    f"is in {name}, but the index places it in {table.get(key)}",
                    path=index,
                    key=key,
                    remedy="save the adapter again",
                )
            tensors[key] = entry
    if lost := sorted(table.keys() - tensors.keys()):
        raise InputError(
            f"is not in {table[lost[0]]}", path=index, key=shown(lost[0]), remedy="save the adapter again"
        )
    return WeightFiles(tuple(folder / name for name in names), tensors, (index,))


def _open_pickle(folder: Path, path: Path, allow_pickle: bool) -> WeightFiles:
    if not allow_pickle:
        raise InputError(
            "is a pickle checkpoint, which can run code when opened",
            path=path,
            remedy="pass --allow-pickle to read its tensors and nothing else, or convert it to safetensors where you "
            "trust it: PeftModel.from_pretrained(base, folder).save_pretrained(folder, safe_serialization=True)",
        )
    require_regular(path, folder)
    tensors = {
        key: StoredTensor(path, DTYPES[tensor.dtype], tuple(tensor.shape))
        for key, tensor in _load_pickle(path).items()
    }
    return WeightFiles((path,), tensors)


def _load_pickle(path: Path) -> dict[str, Tensor]:
    _require_stored(path)
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the restricted reader raises whatever the damage makes it raise
        raise InputError(
            f"not a pickle of tensors alone ({str(error).splitlines()[0] if str(error) else type(error).__name__})",
            path=path,
            remedy="convert it to safetensors where you trust it",
        ) from error
    if not isinstance(value, dict):
        raise InputError("not a table of tensors", path=path)
    size = path.stat().st_size
    for key, tensor in value.items():
        if not isinstance(key, str) or not key.isprintable() or not isinstance(tensor, Tensor):
            raise InputError("not a table of tensors by name", path=path, key=ascii(key)[:200])
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise InputError(f"is a tensor of {tensor.dtype}, {tensor.layout}", path=path, key=key)
        # a stride of zero makes a tensor of any size out of one number
        if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() > size:
            raise InputError("claims more values than the file holds", path=path, key=key)
    return {key: tensor.detach() for key, tensor in value.items()}


def _require_stored(path: Path) -> None:
    """Refuse what is no archive whose members lie in it as they are: a compressed one may be of any size."""
    with (
        suppress(zipfile.BadZipFile, OSError, ValueError, NotImplementedError),
        zipfile.ZipFile(path) as archive,
    ):
        members = archive.infolist()
        stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        if stored and sum(member.file_size for member in members) <= path.stat().st_size:
            return
    raise InputError(
        "not an uncompressed archive as torch.save writes it",
        path=path,
        remedy="convert it to safetensors where you trust it",
    )
