"""The retained-rank manifest: what every module of a compressed fleet keeps, and how exact it is.

``OUT/manifest.json`` describes the fleet; ``OUT/<layout>/<adapter>/loraforge_manifest.json`` is one adapter's
slice of it, which travels with the weights and is what a serving plugin reads. The JSON schemas in this folder
are generated from these models, and a test asserts that they have not drifted. Padding never redefines which
directions are live: ``k`` is the retained rank in every layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loraforge.allocate.allocation import BudgetEntry
from loraforge.config import Layout, Policy
from loraforge.errors import InputError
from loraforge.files import read_json, write_json, write_text

MANIFEST_FILE = "manifest.json"
ADAPTER_MANIFEST_FILE = "loraforge_manifest.json"

Sha256 = str  # 64 lower-case hex digits


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


class Certificate(_Strict):
    """How far the exported factors are from the original update of one module."""

    action_error: float = Field(
        ge=0,
        description="|W x - R x| / |R x| in FP64 over eight Gaussian probes x; W the exported product, "
        "R the original update s B A restricted to its leading k right singular directions",
    )
    retained_energy: float = Field(
        ge=0, le=1, description="sum of the k leading squared singular values over all"
    )
    relative_error: float = Field(
        ge=0, le=1, description="|dW - dW_k|_F / |dW|_F = sqrt(1 - retained_energy)"
    )


class ModuleEntry(_Strict):
    """One module of one adapter."""

    k: int = Field(ge=1, description="retained rank: the live directions")
    r: int = Field(ge=1, description="rank of the original")
    scale: float = Field(description="scale of the original; the exported factors have scale 1")
    d_in: int = Field(ge=1, description="input features")
    d_out: int = Field(ge=1, description="output features")
    path: str = Field(
        pattern=r"^(gram|tsqr|reference|whitened|fisher)$",
        description="how the ordered factors were built; whitened: in the norm of activations; fisher: in that of the "
        "Fisher information",
    )
    certificate: Certificate
    compact_parameters: int = Field(ge=1, description="k (d_in + d_out)")
    physical_bytes: dict[Layout, int] = Field(description="bytes of both factors on disk, by layout")

    @model_validator(mode="after")
    def _consistent(self) -> ModuleEntry:
        if self.k > self.r:
            raise ValueError(f"k {self.k} exceeds the original rank {self.r}")
        if self.compact_parameters != self.k * (self.d_in + self.d_out):
            raise ValueError(f"compact_parameters {self.compact_parameters} is not k (d_in + d_out)")
        return self


class Weights(_Strict):
    """The weight file of one adapter in one layout."""

    rank: int = Field(ge=1, description="r and lora_alpha of adapter_config.json")
    sha256: Sha256 = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0, description="size of adapter_model.safetensors")


class AdapterEntry(_Strict):
    """One adapter."""

    weights_sha256: Sha256 = Field(pattern=r"^[0-9a-f]{64}$", description="of the original's weights")
    factor_key: str = Field(description="key of its ordered factors in the cache")
    original_parameters: int = Field(ge=0, description="sum of r (d_in + d_out)")
    original_bytes: int = Field(ge=0, description="size of the original's weight file")
    passthrough: tuple[str, ...] = Field(description="tensors copied byte for byte")
    layouts: dict[Layout, Weights]
    modules: dict[str, ModuleEntry]
    dropped: tuple[str, ...] = Field((), description="modules that keep no direction and are in no layout")

    @property
    def compact_parameters(self) -> int:
        """Parameters of the live directions."""
        return sum(module.compact_parameters for module in self.modules.values())


class FleetEntry(_Strict):
    """What holds for all adapters."""

    name: str
    base_model: str
    policy: Policy
    budget: BudgetEntry
    floor: str = Field(description="rule of the rank floor")
    spent: int = Field(ge=0, description="compact parameters of the whole fleet")
    slack: int = Field(ge=0, description="ceiling minus spent")
    optimality_gap: float = Field(ge=0, description="bound on the energy that a better choice could add")
    retained_energy: float = Field(
        ge=0, le=1, description="absolute retained energy of the fleet over all of it"
    )
    layouts: tuple[Layout, ...]
    dtype: str = Field(description="torch dtype of the exported factors, or 'source' for each adapter's own")
    tool_version: str
    allocation_sha256: Sha256 = Field(
        pattern=r"^[0-9a-f]{64}$", description="of the allocation's canonical JSON"
    )
    probes: int = Field(ge=1, description="probes of every certificate")
    probe_seed: int


class Manifest(_Strict):
    """The whole fleet (``manifest.json``)."""

    schema_: Literal["loraforge.manifest/1"] = Field("loraforge.manifest/1", alias="schema")
    fleet: FleetEntry
    adapters: dict[str, AdapterEntry]

    @model_validator(mode="after")
    def _spent_is_the_sum(self) -> Manifest:
        total = sum(adapter.compact_parameters for adapter in self.adapters.values())
        if total != self.fleet.spent:
            raise ValueError(f"modules hold {total} compact parameters, the fleet states {self.fleet.spent}")
        return self


class AdapterManifest(_Strict):
    """One adapter in one layout (``loraforge_manifest.json`` beside its weights)."""

    schema_: Literal["loraforge.adapter-manifest/1"] = Field("loraforge.adapter-manifest/1", alias="schema")
    name: str
    layout: Layout
    fleet: FleetEntry
    adapter: AdapterEntry


def _parse(model: type[BaseModel], path: Path) -> BaseModel:
    try:
        return model.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or None
        raise InputError(
            f"not a valid manifest ({first['msg']})", path=path, key=key, remedy="export the fleet again"
        ) from error


def load_manifest(path: Path) -> Manifest:
    """Read ``manifest.json``; ``path`` is the file or the folder that holds it.

    Raises InputError for a missing file or one that does not follow the schema.
    """
    path = Path(path)
    if path.is_dir():
        path /= MANIFEST_FILE
    if not path.exists():
        raise InputError("file not found", path=path, remedy="name an output of `loraforge compress`")
    manifest = _parse(Manifest, path)
    assert isinstance(manifest, Manifest)
    return manifest


def load_adapter_manifest(path: Path) -> AdapterManifest:
    """Read one adapter's slice; ``path`` is the file or the adapter's folder. Raises InputError."""
    path = Path(path)
    manifest = _parse(AdapterManifest, path / ADAPTER_MANIFEST_FILE if path.is_dir() else path)
    assert isinstance(manifest, AdapterManifest)
    return manifest


def save_manifest(path: Path, manifest: Manifest | AdapterManifest) -> None:
    """Write a manifest atomically as JSON for people, its keys in the order of the models."""
    # by pydantic's own writer: Python's takes seconds over thousands of modules
    write_text(path, manifest.model_dump_json(by_alias=True, indent=2) + "\n")


def json_schemas() -> dict[str, dict[str, Any]]:
    """JSON schemas by file name; ``python -m loraforge.export.manifest`` rewrites the committed ones."""
    return {
        "manifest.schema.json": Manifest.model_json_schema(by_alias=True),
        "adapter_manifest.schema.json": AdapterManifest.model_json_schema(by_alias=True),
    }


def write_schemas(folder: Path | None = None) -> None:
    """Write :func:`json_schemas` into ``folder`` (this package's own by default)."""
    for name, schema in json_schemas().items():
        write_json((folder or Path(__file__).parent) / name, schema)


if __name__ == "__main__":
    write_schemas()
