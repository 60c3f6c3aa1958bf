"""Tiles of the engine's own kernels for shapes that it ships none for, so that arms of native execution are no untuned
ones: what ``loraforge bench tune`` measured, as far as a server can be told of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from loraforge.bench.cases import PROJECTIONS
from loraforge.bench.native.tiles import FOLDER, TunedTiles, ratio, read_tiles
from loraforge.dispatch.table import table_path

_ROWS = 16  # of a segment, unless the server is given another --max-lora-chunk-size; the engine then takes the nearest
Configs = dict[int, dict[str, Any]]  # rows of a segment -> tiles
_TOLD = {"BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"}  # in a file of tiles; not split_k


def tuned(found: Sequence[TunedTiles], kernel: str, width: int, rank: int, slices: int) -> Configs | None:
    """Tiles of a kernel by what the engine looks them up by, as it reads them from a file; None for its defaults.

    kernel: ``shrink`` or ``expand``. width: inputs of a shrink, outputs of an expand, of all slices. rank: directions
    that the pool has room for. Of a projection of that width, those measured at the nearest rank and the most tokens
    that decode: a segment has as many rows there as in prefill.
    """
    alike = {
        (its.model, its.name)
        for its in PROJECTIONS
        if (its.d_in if kernel == "shrink" else its.d_out) == width and len(its.channels) == slices
    }
    measured = [
        item
        for item in found
        if (item.engine, item.op, item.phase) == ("csgmv", kernel, "decode")
        and (item.model, item.projection) in alike
    ]
    if not measured:
        return None
    best = min(measured, key=lambda item: (ratio(item.rank, rank), -item.tokens))
    return {_ROWS: dict(best.tiles)} if best.tiles and best.tiles.keys() <= _TOLD else None


def install(device: str) -> None:
    """Have the engine's csgmv take the tiles measured on a device where it has none of its own; nothing where none
    were measured."""
    from sglang.kernels.ops.lora.dense import lora_tuning_config as engine

    path = FOLDER / table_path(device).name
    if not path.is_file():
        return
    found, shipped = read_tiles(path), engine.get_lora_configs

    @cache  # asked at every launch
    def configs(kernel: str, K: int, R: int, S: int) -> Configs | None:
        own: Configs | None = shipped(kernel, K, R, S)
        return own or tuned(found, kernel, K, R, S)

    engine.get_lora_configs = configs
