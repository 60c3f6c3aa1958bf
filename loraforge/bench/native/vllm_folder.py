"""Tuned tiles as vLLM itself takes them: the folder that its ``VLLM_TUNED_CONFIG_FOLDER`` names.

The engine's LoRA ops look a configuration up by adapters, slices, tokens, inner and outer width, the nearest number of
each; a table must therefore answer for every number of slices, and wherever the engine's own choice was the best it
holds that choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loraforge.bench.cases import PROJECTIONS, Op
from loraforge.bench.native.tiles import TunedTiles
from loraforge.files import write_json

_MANY = 128  # tokens from which vLLM takes another default
_ANY = "1"  # adapters: tiles were measured for no particular number of them
_FILES: dict[Op, str] = {
    "shrink": "SHRINK",
    "expand": "EXPAND_TRUE",
}  # TRUE: added to the base layer's output


def write_folder(found: Iterable[TunedTiles], device: str, folder: Path) -> list[Path]:
    """Write the tiles of vLLM among ``found`` into ``folder`` for a device that torch names ``device``; the files."""
    found = [item for item in found if item.engine == "vllm"]
    files = []
    for op, name in _FILES.items():
        file = folder / f"{re.sub('[ -]', '_', device)}_{name}.json"
        write_json(file, _table(op, [item for item in found if item.op == op]))
        files.append(file)
    return files


def _table(op: Op, found: Iterable[TunedTiles]) -> dict[str, Any]:
    """[adapters][slices][tokens][inner width][outer width] -> configuration. Where two projections are one problem to
    the engine (Llama's o has the inputs of Qwen's), the tiles that gained the most serve both."""
    table: dict[str, Any] = {}
    found = sorted(found, key=lambda item: item.speedup)
    # of steps just above that the nearest measured ones lie below, and their default is not the engine's there
    nearest = max((item.tokens for item in found if item.tokens < _MANY), default=_MANY)
    for item in found:
        its = next(one for one in PROJECTIONS if (one.model, one.name) == (item.model, item.projection))
        inner, outer = (its.d_in, item.rank) if op == "shrink" else (item.rank, max(its.channels))
        slices = len(its.channels)
        for tokens in {item.tokens, _MANY} if item.tokens == nearest else {item.tokens}:
            place = table.setdefault(str(slices), {}).setdefault(str(tokens), {}).setdefault(str(inner), {})
            place[str(outer)] = {**(item.tiles or _default(op, tokens, slices)), "max_nreg": None}
    return {_ANY: table}


def _default(op: Op, tokens: int, slices: int) -> dict[str, int]:
    """What vLLM 0.26.0 takes by itself."""
    common = {"num_warps": 4, "num_ctas": 1, "num_stages": 2}
    if op == "expand":
        return {"block_m": 64, "block_n": 64 if slices > 1 else 128, "block_k": 32, **common}
    few = tokens < _MANY
    split = {"block_k": 256, "split_k": 64} if few else {"block_k": 32, "split_k": 8}
    return {"block_m": 32, "block_n": 16, **split, "group_size_m": 8, **common}
