"""CSGMV of SGLang 0.5.22: the ``csgmv`` backend's chunked kernels, with shipped or given tiles.

Driven in its favour: the grid holds the batch's own segments (a captured decode graph of the engine launches those of
the largest captured batch), and metadata is on the device beforehand. The engine's launch cache, which keys a compiled
shrink by less than what it depends on, is left out, as the engine's own switch for it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from loraforge.bench.arms import Launch, nothing
from loraforge.bench.cases import Case, Op, Phase
from loraforge.bench.native.sites import open_site
from loraforge.bench.operands import Operands

DISTRIBUTION = "sglang-0.5.22"
CHUNK = 16  # rows of a segment: the engine's default for max_lora_chunk_size, which bounds its choice by token count
_DENSE = "sglang.kernels.ops.lora.dense"

# What the tuner tries beside the shipped tiles. split_k is the shrink's public argument, chunk the server's option
# max_lora_chunk_size, which the engine would take for prefill batches of 256 tokens and more.
_SHRINK = (
    {"BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 4, "num_stages": 3},
    {"BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3},
)
_EXPAND = (
    {"BLOCK_N": 32, "BLOCK_K": 16, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 128, "BLOCK_K": 16, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2},
)
TILES: dict[tuple[Op, Phase], tuple[dict[str, int], ...]] = {
    ("shrink", "decode"): (
        *_SHRINK,
        {"BLOCK_N": 16, "BLOCK_K": 256, "split_k": 4},
        {"BLOCK_N": 16, "BLOCK_K": 256, "split_k": 8},
    ),
    ("shrink", "prefill"): (
        *_SHRINK,
        {"BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4, "chunk": 64},
        {"BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4, "chunk": 128},
        {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4, "chunk": 64},
    ),
    ("expand", "decode"): _EXPAND,
    ("expand", "prefill"): (
        *_EXPAND[1:],
        {"BLOCK_N": 128, "BLOCK_K": 16, "num_warps": 4, "num_stages": 2, "chunk": 64},
        {"BLOCK_N": 64, "BLOCK_K": 16, "num_warps": 4, "num_stages": 2, "chunk": 128},
        {"BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 8, "num_stages": 2, "chunk": 128},
    ),
}


class Csgmv:
    """``tiles(op, case)`` gives the tiles of a case, or None for the engine's own choice."""

    def __init__(
        self,
        engines: Path,
        name: str = "csgmv",
        tiles: Callable[[Op, Case], Mapping[str, int] | None] = lambda op, case: None,
    ) -> None:
        self.name = name
        self._tiles = tiles
        self._site = open_site(
            engines,
            DISTRIBUTION,
            [
                "sglang.srt.environ",
                "sglang.srt.lora.utils",
                f"{_DENSE}.chunked_sgmv_shrink",
                f"{_DENSE}.chunked_sgmv_expand",
            ],
            {
                "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": object},
                "sglang.srt.utils.hf_transformers_utils": {"AutoConfig": object},
                "sglang.srt.utils": {
                    "cached_triton_kernel": lambda key_fn=None: lambda kernel: kernel,
                    "get_device_name": torch.cuda.get_device_name,
                },
            },
        )

    def supports(self, op: Op, case: Case) -> bool:
        return True

    def prepare(self, op: Op, operands: Operands) -> Launch:
        if op == "shrink":
            run, product, label = self._shrink(operands)
            return Launch(
                run,
                lambda: operands.unpack(product()),
                lambda: product().fill_(float("nan")),
                nothing,
                label,
            )
        y, base = operands.base.clone(), operands.base
        if op == "expand":
            z = operands.pack(operands.z).to(operands.dtype)
            run, label = self._expand(operands, lambda: z, y)
        else:
            first, product, one = self._shrink(operands)
            second, two = self._expand(operands, product, y)
            run, label = (lambda: (first(), second())), f"{one};{two}"

        def restore() -> None:
            y.copy_(base)

        return Launch(run, lambda: y, restore, restore, label, 2 if op == "lora" else 1)

    def _shrink(self, operands: Operands) -> tuple[Callable[[], object], Callable[[], torch.Tensor], str]:
        """The call, what it gave last, and its tiles."""
        module = self._site[f"{_DENSE}.chunked_sgmv_shrink"]
        tiles = self._tiles("shrink", operands.case)
        batch = self._batch(operands, tiles)
        x, weights, pieces = operands.x, operands.a_pool, operands.pieces
        split = None if tiles is None else tiles.get("split_k")
        held: list[torch.Tensor] = []

        def run() -> None:
            with _configured(module, "get_lora_shrink_config", tiles):
                held[:] = [module.chunked_sgmv_lora_shrink_forward(x, weights, batch, pieces, split)]

        return run, lambda: held[0], describe(tiles)

    def _expand(
        self, operands: Operands, z: Callable[[], torch.Tensor], y: torch.Tensor
    ) -> tuple[Callable[[], object], str]:
        module = self._site[f"{_DENSE}.chunked_sgmv_expand"]
        tiles = self._tiles("expand", operands.case)
        batch = self._batch(operands, tiles)
        weights, offsets = operands.b_pool, torch.tensor(operands.case.projection.offsets)
        on_device = offsets.to(operands.device, torch.int32)
        widest = max(operands.case.projection.channels)

        def run() -> None:
            with _configured(module, "get_lora_expand_config", tiles):
                module.chunked_sgmv_lora_expand_forward(z(), weights, batch, on_device, widest, y, offsets)

        return run, describe(tiles)

    def _batch(self, operands: Operands, tiles: Mapping[str, int] | None) -> Any:
        chunk = CHUNK if tiles is None else tiles.get("chunk", CHUNK)
        return _batch_info(operands, self._site["sglang.srt.lora.utils"].LoRABatchInfo, chunk)


@contextmanager
def _configured(module: Any, lookup: str, tiles: Mapping[str, int] | None) -> Iterator[None]:
    """The module's tile lookup answers ``tiles`` meanwhile, where there are any."""
    own = getattr(module, lookup)
    if tiles is not None:
        setattr(module, lookup, lambda **_: tiles)
    try:
        yield
    finally:
        setattr(module, lookup, own)


def describe(tiles: Mapping[str, int] | None) -> str:
    """Tiles as a record states them."""
    return "shipped" if tiles is None else ",".join(f"{key}={value}" for key, value in tiles.items())


def _batch_info(operands: Operands, kind: type[Any], chunk: int) -> Any:
    """The engine's metadata of a batch: tokens sorted by slot, cut into segments of at most ``chunk`` rows."""
    slots = operands.token_slots.long()
    permutation = torch.argsort(slots, stable=True).int()
    starts, owners = [0], []
    for slot, count in enumerate(torch.bincount(slots, minlength=operands.slots).tolist()):
        for first in range(0, count, chunk):
            owners.append(slot)
            starts.append(starts[-1] + min(chunk, count - first))

    def device(values: list[int] | list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=operands.device)

    return kind(
        use_cuda_graph=False,
        bs=len(slots),
        num_segments=len(owners),
        seg_indptr=device(starts, torch.int32),
        weight_indices=device(owners, torch.int32),
        lora_ranks=device(operands.slot_ranks, torch.int32),
        scalings=device(operands.scales, torch.float32),
        max_len=chunk,
        seg_lens=None,
        permutation=permutation,
    )
