"""Tuned tiles in the form that vLLM reads: what ships is what was measured, and no lookup comes back empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraforge.bench.cases import PROJECTIONS, Op, Projection
from loraforge.bench.native.tiles import TunedTiles
from loraforge.bench.native.vllm_folder import write_folder
from loraforge.cli import main
from loraforge.files import read_json

SHIPPED = Path(__file__).parents[2] / "config" / "serving" / "vllm_tuned"
DEVICE = "NVIDIA H200"


def _nearest(table: dict[str, Any], wanted: int) -> Any:
    return table[min(table, key=lambda key: abs(int(key) - wanted))]


def _found(folder: Path, op: Op, its: Projection, tokens: int, rank: int) -> dict[str, Any]:
    """As the engine looks it up: the nearest of each, but just this number of slices."""
    name = {"shrink": "SHRINK", "expand": "EXPAND_TRUE"}[op]
    table = _nearest(read_json(folder / f"NVIDIA_H200_{name}.json"), 29)[str(len(its.channels))]
    inner, outer = (its.d_in, rank) if op == "shrink" else (rank, max(its.channels))
    configuration: dict[str, Any] = _nearest(_nearest(_nearest(table, tokens), inner), outer)
    return configuration


def test_the_shipped_folder_is_what_was_measured(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "vllm-tiles", "-o", str(tmp_path)])
    assert not caught.value.code
    written = sorted(tmp_path.iterdir())
    assert [file.name for file in written] == sorted(file.name for file in SHIPPED.iterdir())
    for file in written:
        assert file.read_bytes() == (SHIPPED / file.name).read_bytes()


@pytest.mark.parametrize("its", PROJECTIONS, ids=lambda its: f"{its.model}-{its.name}")
def test_every_step_of_every_projection_finds_tiles(its: Projection) -> None:
    for tokens in (1, 60, 307, 8192):
        for rank in (8, 64, 128):
            shrink, expand = (_found(SHIPPED, op, its, tokens, rank) for op in ("shrink", "expand"))
            common = {"block_m", "block_n", "block_k", "num_warps", "num_ctas", "num_stages", "max_nreg"}
            assert set(shrink) == common | {"split_k", "group_size_m"}
            assert set(expand) == common


def test_the_engines_own_choice_stands_where_it_was_the_best_and_the_greater_gain_serves_both(
    tmp_path: Path,
) -> None:
    def tiles(model: str, projection: str, gain: float, found: dict[str, int] | None) -> TunedTiles:
        return TunedTiles(
            engine="vllm", op="shrink", phase="decode", model=model, projection=projection,
            tokens=24, rank=64, tiles=found, speedup=gain,
        )  # fmt: skip

    tuned = {"block_m": 16, "block_n": 16, "block_k": 64, "split_k": 4, "num_warps": 4, "num_ctas": 1,
             "num_stages": 2, "group_size_m": 8}  # fmt: skip
    other = {**tuned, "block_m": 64}
    write_folder(
        [
            tiles("Qwen3-4B", "o", 1.5, tuned),
            tiles("Llama-3.1-8B", "o", 1.2, other),
            tiles("Qwen3-4B", "down", 1.0, None),
            tiles("Qwen3-4B", "down", 1.0, None).model_copy(update={"tokens": 384}),
        ],
        DEVICE,
        tmp_path,
    )
    o, down = (next(its for its in PROJECTIONS if its.name == name) for name in ("o", "down"))
    assert _found(tmp_path, "shrink", o, 24, 64) == {**tuned, "max_nreg": None}
    few, more, many = (_found(tmp_path, "shrink", down, tokens, 64) for tokens in (24, 130, 384))
    assert (few["split_k"], few["block_k"]) == (64, 256)
    assert (more["split_k"], more["block_k"]) == (many["split_k"], many["block_k"]) == (8, 32)
    assert _found(tmp_path, "shrink", o, 130, 64) == {**tuned, "max_nreg": None}
