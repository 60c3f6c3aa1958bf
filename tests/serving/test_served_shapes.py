"""Shape fleets to serve: what transformers reads of the base, and weights of one fleet."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraforge.errors import OutputError
from loraforge.export.manifest import load_manifest
from loraforge.factor.gpu.synthetic import write_fleet
from loraforge.fleet.peft_io import open_fleet
from loraforge.fleet.shapes import ShapeFleet, shape_fleet
from loraforge.serving.shapes import CONFIGS, base_shapes, write_base, write_served_fleet

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
KINDS = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False},
}


def small_fleet(config: dict[str, Any] = SMALL | KINDS["llama"]) -> ShapeFleet:
    """Two adapters of ranks 4 and 8 over the modules of a model."""
    rows = [
        (f"{adapter:02d}-r{rank}", name.removesuffix(".weight"), rank, shape[1], shape[0])
        for adapter, rank in enumerate((4, 8))
        for part in base_shapes(config)
        for name, shape in part.items()
        if "_proj" in name
    ]
    numbers = np.array([row[2:] for row in rows], dtype=np.int64).T.copy()
    return ShapeFleet("small", "tiny/base", tuple(row[:2] for row in rows), *numbers)


@pytest.mark.parametrize(("fleet", "parameters"), [("qwen50", 4_022_468_096), ("llama35", 8_030_261_248)])
def test_bases_have_the_shapes_that_the_fleets_change(fleet: str, parameters: int) -> None:
    shapes = shape_fleet(fleet)
    base: dict[str, tuple[int, ...]] = {}
    for part in base_shapes(CONFIGS[shapes.base_model]):
        base |= part
    assert sum(torch.Size(shape).numel() for shape in base.values()) == parameters  # as published
    for (_, name), d_in, d_out in zip(shapes.names, shapes.d_in.tolist(), shapes.d_out.tolist(), strict=True):
        assert base[f"{name}.weight"] == (d_out, d_in)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_every_tensor_and_each_token_has_text(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_base(SMALL | KINDS[kind], tmp_path / "base", "cpu", seed=1)
    model, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == KINDS[kind]["architectures"][0]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    ids = [2, 17, 299]
    assert tokenizer.decode(ids) == "w2 w17 w299"
    assert tokenizer("w2 w17 w299").input_ids == ids
    assert tokenizer.eos_token_id == 1
    again = tmp_path / "again"
    write_base(SMALL | KINDS[kind], again, "cpu", seed=1)
    for file in sorted(again.iterdir()):
        assert file.read_bytes() == (tmp_path / "base" / file.name).read_bytes()


def test_a_fleet_in_every_set_of_weights(tmp_path: Path) -> None:
    config, shapes = SMALL | KINDS["llama"], small_fleet()
    seconds = write_served_fleet(shapes, config, tmp_path, torch.device("cpu"), 1, budget="1/4")
    assert list(seconds) == ["base", "original", "uniform_1-4", "spectral_1-4"]
    names = {name for name, _ in shapes.names}
    original = open_fleet([tmp_path / "original"])
    assert {adapter.name for adapter in original} == names
    assert sum(adapter.n_parameters for adapter in original) == shapes.n_parameters
    for kind in ("uniform", "spectral"):
        folder = tmp_path / f"{kind}_1-4"
        manifest = load_manifest(folder)
        assert manifest.fleet.policy == kind
        assert manifest.fleet.spent <= shapes.n_parameters / 4
        assert {path.name for path in (folder / "padded").iterdir()} == names
        for adapter in original:
            assert manifest.adapters[adapter.name].weights_sha256 == adapter.weights_sha256
    stamps = {path: os.stat(path).st_mtime_ns for path in tmp_path.rglob("*")}
    assert (
        write_served_fleet(shapes, config, tmp_path, torch.device("cpu"), 1, budget="1/4") == {}
    )  # what is there stays
    assert {path: os.stat(path).st_mtime_ns for path in tmp_path.rglob("*")} == stamps


def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"base: cannot be written \(File too large\)"):
            write_base(SMALL | KINDS["llama"], tmp_path / "base", "cpu", 1)
        with pytest.raises(OSError, match="File too large"):  # which the folder that it is in translates
            write_fleet(small_fleet(), tmp_path / "original", torch.device("cpu"), 1)
        shutil.rmtree(tmp_path / "original")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []
