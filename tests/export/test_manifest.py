"""The manifest's schema, its checks, and that reading one needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import loraforge.export.manifest as manifest_module
from loraforge.allocate.allocation import BudgetEntry
from loraforge.errors import InputError
from loraforge.export.manifest import (
    AdapterEntry,
    Certificate,
    FleetEntry,
    Manifest,
    ModuleEntry,
    Weights,
    json_schemas,
    load_manifest,
    save_manifest,
)


def module_entry(**changes: object) -> ModuleEntry:
    fields = {
        "k": 2,
        "r": 8,
        "scale": 2.0,
        "d_in": 10,
        "d_out": 6,
        "path": "gram",
        "certificate": Certificate(action_error=1e-3, retained_energy=0.75, relative_error=0.5),
        "compact_parameters": 32,
        "physical_bytes": {"ragged": 64, "padded": 128},
    }
    return ModuleEntry(**{**fields, **changes})


@pytest.fixture
def example() -> Manifest:
    entry = AdapterEntry(
        weights_sha256="0" * 64,
        factor_key="f" * 64,
        original_parameters=128,
        original_bytes=512,
        passthrough=(),
        layouts={"ragged": Weights(rank=2, sha256="1" * 64, bytes=64)},
        modules={"model.layers.0.q": module_entry()},
    )
    fleet = FleetEntry(
        name="tiny",
        base_model="tiny/base",
        policy="spectral",
        budget=BudgetEntry(kind="fraction", value="1/4", params=33),
        floor="max(1, ceil(u / 2))",
        spent=32,
        slack=1,
        optimality_gap=0.0,
        retained_energy=0.75,
        layouts=("ragged",),
        dtype="bfloat16",
        tool_version="0.1.0",
        allocation_sha256="2" * 64,
        probes=8,
        probe_seed=1,
    )
    return Manifest(fleet=fleet, adapters={"one": entry})


def test_round_trip(example: Manifest, tmp_path: Path) -> None:
    save_manifest(tmp_path / "manifest.json", example)
    assert load_manifest(tmp_path) == example
    assert load_manifest(tmp_path / "manifest.json") == example
    assert json.loads((tmp_path / "manifest.json").read_text())["schema"] == "loraforge.manifest/1"


def test_committed_schemas_have_not_drifted() -> None:
    folder = Path(manifest_module.__file__).parent
    for name, schema in json_schemas().items():
        assert json.loads((folder / name).read_text()) == schema, (
            "run python -m loraforge.export.manifest and commit the result"
        )


@pytest.mark.parametrize(
    "changes", [{"k": 9, "compact_parameters": 144}, {"k": 0}, {"compact_parameters": 31}, {"path": "magic"}]
)
def test_a_module_that_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        module_entry(**changes)


def test_an_edited_file_is_refused_by_name(example: Manifest, tmp_path: Path) -> None:
    save_manifest(tmp_path / "manifest.json", example)
    value = json.loads((tmp_path / "manifest.json").read_text())
    value["fleet"]["spent"] = 31
    (tmp_path / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"manifest\.json: not a valid manifest .*32 compact.*states 31"):
        load_manifest(tmp_path)
    with pytest.raises(InputError, match=r"nowhere: file not found"):
        load_manifest(tmp_path / "nowhere")


def test_reading_needs_no_torch() -> None:
    code = "import sys, loraforge.export.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
