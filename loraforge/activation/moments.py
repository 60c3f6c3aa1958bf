"""Files of moments: what a policy measures updates by besides their weights. One kind a norm, all opened here."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loraforge.allocate.policies import Norm
from loraforge.errors import InputError, IntegrityError
from loraforge.factor.engine import Path as OrderPath
from loraforge.files import canonical_json, sha256_text, write_with
from loraforge.fleet.peft_io import Adapter, LoraModule
from loraforge.tensor_file import contents_sha256, write_self_hashed

REMEDY = "collect it again with `loraforge moments`"


@dataclass(frozen=True)
class Moments(ABC):
    """Moments on disk, and the norm that they make.

    Parameters
    ----------
    path: the safetensors file; every matrix in it is the lower triangle of a symmetric one, row by row, float32.
    sha256: hex digest of its tensors; what depends on the moments is named by it.
    base_sha256: digest of the base model's tensors (:func:`~loraforge.fleet.base_model.tensors_sha256`).
    tokens: how many positions were seen.
    """

    path: Path
    sha256: str
    base_sha256: str
    tokens: int

    schema: ClassVar[str]  # of the file
    norm: ClassVar[Norm]
    factors_path: ClassVar[OrderPath]  # how entries say that their factors were ordered

    @classmethod
    @abstractmethod
    def of(cls, path: Path, header: Mapping[str, Any]) -> Moments:
        """These moments by the header of their file. Raises LookupError for what it lacks."""

    @abstractmethod
    def require(self, adapter: Adapter) -> None:
        """Raise IntegrityError where these are moments of another adapter of that name, InputError where of none."""

    @abstractmethod
    def ordered(
        self, adapter: Adapter, module: LoraModule, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ordered factors of a module's update ``scale * b @ a`` (A [r, d_in], B [d_out, r]) in this norm.

        Returns the update's singular values in the norm [r], descending, A' [r, d_in] and B' [d_out, r], float64:
        B' A' is the whole update, and its first k directions are the best of their rank. Raises InputError where
        there are no moments of this module, or of another size.
        """

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What entries depend on besides the moments themselves, for their names."""

    def symmetric(self, key: str, d: int, *, module: str) -> Tensor:
        """The matrix stored as ``key``, float64 [d, d]. Raises InputError, naming ``module``, for another size."""
        packed = self._handle.get_tensor(key).double()
        if len(packed) != d * (d + 1) // 2:
            raise InputError(
                f"moments of {len(packed)} entries are not those of {d} inputs",
                path=self.path,
                key=module,
                remedy="collect them from the base model and the adapters that they are used for",
            )
        found = torch.zeros(d, d, dtype=torch.float64)
        row, column = torch.tril_indices(d, d)
        found[row, column] = packed
        found[column, row] = packed
        return found

    @cached_property
    def _handle(self) -> Any:
        return safe_open(str(self.path), framework="pt")


def packed(matrix: Tensor) -> Tensor:
    """The lower triangle of a symmetric matrix [d, d] row by row, float32 [d (d + 1) / 2], on the CPU."""
    row, column = torch.tril_indices(*matrix.shape, device=matrix.device)
    return matrix[row, column].float().cpu()


def write_moments(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write a file of moments atomically; ``header`` states its ``schema`` and all that is not in the tensors."""

    def metadata(sha256: str) -> dict[str, str]:
        stated = dict(header) | {"tensors_sha256": sha256}
        return {"loraforge": canonical_json(stated | {"header_sha256": sha256_text(canonical_json(stated))})}

    write_with(path, lambda temporary: write_self_hashed(temporary, tensors, metadata))


def read_header(path: Path) -> dict[str, Any]:
    """What :func:`write_moments` was told, and ``tensors_sha256``; every byte of the file checked.

    Raises InputError for a file that is missing or none, IntegrityError for one whose bytes have changed.
    """
    try:
        sha256, metadata = contents_sha256(path)
        header: dict[str, Any] = json.loads(metadata["loraforge"])
        stated = header.pop("header_sha256")
        whole = header["tensors_sha256"] == sha256 and stated == sha256_text(canonical_json(header))
    except (OSError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"not a file of moments ({error})", path=path, remedy=REMEDY) from error
    if not whole:
        raise IntegrityError("its bytes are not those that were written", path=path, remedy=REMEDY)
    return header


def stated_norm(path: Path) -> Norm | None:
    """The norm that a file of moments is for, by its header alone; None for what is no such file."""
    try:
        with safe_open(str(path), framework="pt") as handle:
            schema = json.loads(handle.metadata()["loraforge"])["schema"]
    except (OSError, SafetensorError, LookupError, TypeError, ValueError):
        return None
    return next((kind.norm for kind in _kinds() if kind.schema == schema), None)


def load_moments(path: Path) -> Moments:
    """Open a file of moments of any kind, every byte checked.

    Raises InputError for a file that is missing or none, IntegrityError for one whose bytes have changed.
    """
    header = read_header(path)
    for kind in _kinds():
        if header.get("schema") == kind.schema:
            try:
                return kind.of(path, header)
            except (LookupError, AttributeError, TypeError) as error:
                raise InputError(f"not a file of moments ({error})", path=path, remedy=REMEDY) from error
    raise InputError(f"not a file of moments ({header.get('schema')})", path=path, remedy=REMEDY)


def _kinds() -> tuple[type[Moments], ...]:
    from loraforge.activation.fisher import FisherMoments
    from loraforge.activation.inputs import InputMoments

    return InputMoments, FisherMoments
