"""LoRA ops of vLLM 0.26.0, with default or given configurations.

Driven in their favour: the grid holds the adapters of the batch alone, not all that the engine has room for. Z is
zeroed by the shrink itself, as its split sums need. The engine folds the scale into B on loading; scales here are
powers of two, so that this rounds nothing. Programmatic launch, which the engine takes with two streams only (not its
default), is off. Expand pipelines of more than one stage are checked like anything else: on SM90 some
compilers got them wrong, and a configuration that fails its check is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from loraforge.bench.arms import Launch, nothing
from loraforge.bench.cases import Case, Op, Phase
from loraforge.bench.native.sglang_csgmv import describe
from loraforge.bench.native.sites import open_site
from loraforge.bench.operands import Operands

DISTRIBUTION = "vllm-0.26.0"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what max_lora_rank may be
_OPS = "vllm.lora.ops.triton_ops"


def _shrink(m: int, n: int, k: int, split: int, warps: int, stages: int) -> dict[str, int]:
    return {
        "block_m": m, "block_n": n, "block_k": k, "split_k": split,
        "num_warps": warps, "num_stages": stages, "num_ctas": 1, "group_size_m": 8,
    }  # fmt: skip


def _expand(m: int, n: int, k: int, warps: int, stages: int) -> dict[str, int]:
    return {
        "block_m": m, "block_n": n, "block_k": k, "num_warps": warps, "num_stages": stages, "num_ctas": 1
    }  # fmt: skip


# what the tuner tries beside the default
TILES: dict[tuple[Op, Phase], tuple[dict[str, int], ...]] = {
    ("shrink", "decode"): (
        _shrink(16, 16, 256, 8, 4, 2),
        _shrink(16, 16, 256, 16, 4, 2),
        _shrink(16, 32, 128, 8, 4, 3),
        _shrink(32, 16, 256, 4, 4, 2),
    ),
    ("shrink", "prefill"): (
        _shrink(32, 16, 128, 4, 4, 3),
        _shrink(64, 32, 64, 4, 4, 3),
        _shrink(128, 32, 64, 2, 8, 3),
        _shrink(64, 16, 128, 1, 4, 3),
    ),
    ("expand", "decode"): (
        _expand(16, 64, 16, 4, 1),
        _expand(16, 128, 16, 4, 1),
        _expand(16, 128, 32, 4, 1),
        _expand(16, 64, 64, 4, 1),
    ),
    ("expand", "prefill"): (
        _expand(64, 128, 16, 4, 1),
        _expand(64, 64, 32, 4, 1),
        _expand(128, 128, 16, 8, 1),
        _expand(64, 128, 32, 8, 1),
        _expand(64, 128, 64, 8, 1),
    ),
}


class VllmOps:
    """``tiles(op, case)`` gives the configuration of a case, or None for the engine's default."""

    def __init__(
        self,
        engines: Path,
        name: str = "vllm",
        tiles: Callable[[Op, Case], Mapping[str, int] | None] = lambda op, case: None,
    ) -> None:
        import triton
        import triton.language as tl

        self.name = name
        self._tiles = tiles
        logger = SimpleNamespace(info_once=_say_nothing, warning_once=_say_nothing)
        self._site = open_site(
            engines,
            DISTRIBUTION,
            [
                "vllm.envs",
                "vllm.utils.math_utils",
                f"{_OPS}.lora_shrink_op",
                f"{_OPS}.lora_expand_op",
                f"{_OPS}.lora_kernel_metadata",
            ],
            {
                "vllm.triton_utils": {"triton": triton, "tl": tl},
                "vllm.logger": {"init_logger": lambda name: logger},
                "vllm.platforms": {
                    "current_platform": SimpleNamespace(
                        is_cuda=lambda: True,
                        has_device_capability=lambda wanted: False,
                    )
                },
                "vllm.utils.torch_utils": {
                    "async_tensor_h2d": _to_device,
                    "direct_register_custom_op": _unregistered,
                },
            },
        )

    def supports(self, op: Op, case: Case) -> bool:
        return True

    def prepare(self, op: Op, operands: Operands) -> Launch:
        case = operands.case
        meta = self._site[f"{_OPS}.lora_kernel_metadata"].LoRAKernelMeta.make(
            operands.slots, case.tokens, operands.device
        )
        meta.prepare_tensors(operands.token_slots)
        arguments = meta.meta_args(case.tokens, True)
        a, b = pools(operands)
        shrink, expand = self._site[f"{_OPS}.lora_shrink_op"], self._site[f"{_OPS}.lora_expand_op"]
        one, two = self._tiles("shrink", case), self._tiles("expand", case)
        z = operands.z.new_zeros((operands.pieces, case.tokens, pool_rank(case.capacity)))
        y, base = operands.base.clone(), operands.base
        kept: dict[str, dict[Any, Any]] = {}

        def product() -> None:
            with self._configured(shrink, one, kept):
                shrink._lora_shrink(operands.x, a, z, *arguments, 1.0)

        def update() -> None:
            with self._configured(expand, two, kept):
                expand._lora_expand(z, b, y, *arguments, 0, True)

        def canonical() -> Tensor:
            return torch.where(operands.live, z.transpose(0, 1)[:, :, : case.rank], 0.0)

        def restore() -> None:
            y.copy_(base)

        if op == "shrink":
            return Launch(
                product, canonical, lambda: z.fill_(float("nan")), nothing, describe(one), launches=2
            )
        if op == "expand":
            z[:, :, : case.rank] = operands.z.transpose(0, 1)
            return Launch(update, lambda: y, restore, restore, describe(two))

        def both() -> None:
            product()
            update()

        return Launch(
            both,
            lambda: y,
            restore,
            restore,
            f"{describe(one)};{describe(two)}",
            launches=3,
        )

    @contextmanager
    def _configured(
        self, module: Any, tiles: Mapping[str, int] | None, kept: dict[str, dict[Any, Any]]
    ) -> Iterator[None]:
        """The configuration lookup answers ``tiles`` meanwhile, where there are any. The engine remembers strides by
        address, for good; here tensors come and go, so ``kept`` is this launch's memory."""
        utils = self._site[f"{_OPS}.utils"]
        own = module.get_lora_op_configs
        for name in ("_LORA_A_PTR_DICT", "_LORA_B_PTR_DICT"):
            setattr(utils, name, kept.setdefault(name, {}))
        if tiles is not None:
            module.get_lora_op_configs = lambda *_, **__: tiles
        try:
            yield
        finally:
            module.get_lora_op_configs = own


def pool_rank(capacity: int) -> int:
    """The smallest max_lora_rank that has room for ``capacity`` directions."""
    return next(rank for rank in RANKS if rank >= capacity)


def pools(operands: Operands) -> tuple[list[Tensor], list[Tensor]]:
    """The engine's buffers, one a slice: A [slots, R, d_in] and B [slots, channels, R] with the scale folded in; zeros
    past the rank, as the engine leaves them."""
    case, width = operands.case, pool_rank(operands.case.capacity)
    scale = torch.tensor(operands.scales, dtype=operands.dtype, device=operands.device)[:, None, None]
    ranks = torch.tensor(operands.ranks, device=operands.device)
    a, b = [], []
    for piece, (first, channels) in enumerate(case.projection.slices):
        live = torch.arange(case.rank, device=operands.device) < ranks[:, piece, None]
        rows = operands.masters.a.new_zeros((operands.slots, width, case.projection.d_in))
        rows[:, : case.rank] = operands.masters.a[: operands.slots, piece, : case.rank] * live[:, :, None]
        columns = operands.masters.b.new_zeros((operands.slots, channels, width))
        columns[:, :, : case.rank] = (
            operands.masters.b[: operands.slots, first : first + channels, : case.rank]
            * live[:, None, :]
            * scale
        )
        a.append(rows)
        b.append(columns)
    return a, b


def _to_device(data: list[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(data, dtype=dtype).to(device)


def _unregistered(**_: object) -> None:
    """The engine's own path where it cannot register an op: the functions are called as they are."""
    raise AttributeError("not registered")


def _say_nothing(*_: object, **__: object) -> None:
    """Logging of the engine is not wanted in a benchmark's output."""
