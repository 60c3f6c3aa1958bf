"""Which measured tiles the engine's own kernels take. Needs no engine, but for what it looks up itself."""

from __future__ import annotations

import importlib.util

import pytest

from loraforge.bench.native.tiles import FOLDER, TunedTiles, read_tiles
from loraforge.runtime.sglang.tiles import install, tuned


def _measured(op: str, rank: int, tokens: int, tiles: dict[str, int] | None, **other: str) -> TunedTiles:
    said = {"engine": "csgmv", "phase": "decode", "model": "Qwen3-4B", "projection": "qkv", **other}
    return TunedTiles.model_validate(
        {**said, "op": op, "rank": rank, "tokens": tokens, "tiles": tiles, "speedup": 1.5}
    )


WIDE, NARROW = {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4}, {"BLOCK_N": 32, "BLOCK_K": 16}
FOUND = [
    _measured("expand", 64, 24, NARROW),
    _measured("expand", 64, 96, WIDE),
    _measured("expand", 8, 96, NARROW),
    _measured("expand", 64, 384, NARROW, phase="prefill"),
    _measured("expand", 64, 96, NARROW, engine="vllm"),
    _measured("shrink", 8, 96, {"BLOCK_N": 16, "BLOCK_K": 256, "split_k": 8}),
    _measured("shrink", 64, 96, None, projection="gate_up"),
]


def test_tiles_of_the_nearest_rank_and_the_most_tokens() -> None:
    assert tuned(FOUND, "expand", 6144, 128, 3) == {16: WIDE}
    assert tuned(FOUND, "expand", 6144, 10, 3) == {16: NARROW}


def test_the_engines_defaults_where_nothing_better_can_be_told() -> None:
    assert tuned(FOUND, "shrink", 2560, 10, 3) is None  # no file of tiles has split_k
    assert tuned(FOUND, "shrink", 2560, 64, 2) is None  # its own were the best
    assert tuned(FOUND, "expand", 6144, 128, 1) is None
    assert tuned(FOUND, "expand", 4096, 128, 3) is None


def test_what_was_measured_on_an_h200_is_taken() -> None:
    found = read_tiles(FOLDER / "nvidia-h200.json")
    for width, slices in ((6144, 3), (19456, 2), (28672, 2)):
        taken = tuned(found, "expand", width, 128, slices)
        assert taken is not None
        assert taken[16]["BLOCK_K"] >= 16


@pytest.mark.engines
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_engine_asks_for_them_where_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.kernels.ops.lora.dense import lora_tuning_config as engine

    monkeypatch.setattr(engine, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(engine, "get_lora_configs", engine.get_lora_configs)
    plain = engine.get_lora_expand_config(K=6144, R=128, num_slices=3, chunk_size=16)
    assert plain == engine.DEFAULT_EXPAND_CONFIG
    shipped = engine.get_lora_expand_config(K=4096, R=64, num_slices=3, chunk_size=16)
    install("a device that nothing was measured on")
    assert engine.get_lora_expand_config(K=6144, R=128, num_slices=3, chunk_size=16) == plain
    install("NVIDIA H200")
    measured = tuned(read_tiles(FOLDER / "nvidia-h200.json"), "expand", 6144, 128, 3)
    assert measured is not None
    assert engine.get_lora_expand_config(K=6144, R=128, num_slices=3, chunk_size=16) == measured[16]
    assert engine.get_lora_expand_config(K=4096, R=64, num_slices=3, chunk_size=16) == shipped
