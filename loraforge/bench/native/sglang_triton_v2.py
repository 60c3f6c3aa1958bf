"""``triton_v2`` of SGLang 0.5.23: the dense LoRA runner with the plan tables that it ships.

Driven by the engine's own runner, plans included. What a plan gains by overlapping the shrink with the base product
on a second stream lies outside of a kernel benchmark. Routes (tokens sorted by adapter) are made once a step by the
engine and are not timed; where it makes them by a CUDA extension, its Triton builder for large batches does here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraforge.bench.arms import Launch, nothing
from loraforge.bench.cases import Case, Op
from loraforge.bench.native.sites import open_site
from loraforge.bench.operands import Operands

DISTRIBUTION = "sglang-0.5.23"
_RUNNER = "sglang.srt.lora.dense.runner"
_ROUTING = "sglang.kernels.ops.lora.common.routing"


class TritonV2:
    """The runner's shrink and expand, one runner a prepared launch."""

    name = "triton_v2"

    def __init__(self, engines: Path) -> None:
        self._site = open_site(
            engines,
            DISTRIBUTION,
            ["sglang.srt.environ", "sglang.srt.lora.utils", "sglang.srt.lora.workspace", _RUNNER],
            {
                "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": object},
                "sglang.srt.utils.hf_transformers_utils": {"AutoConfig": object},
                "sglang.kernels.ops.lora.moe.virtual_experts": {"_align_block_size_jit": _absent},
                "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: False},
            },
        )
        routing = self._site[_ROUTING]
        routing._LARGE_ROUTE_MIN_PAIRS = routing._SMALL_ROUTE_MAX_PAIRS + 1

    def supports(self, op: Op, case: Case) -> bool:
        return True

    def prepare(self, op: Op, operands: Operands) -> Launch:
        with self._site.active():
            runner, plan = self._runner(operands)
        if op == "shrink":
            return self._shrink(operands, runner, plan)
        y, base = operands.base.clone(), operands.base
        bridge = self._bridge(operands, plan) if op == "expand" else None
        a, b, offsets = operands.a_pool, operands.b_pool, operands.case.projection.offsets

        def run() -> None:
            with self._site.active():
                source = bridge or runner.run_a(operands.x, a, stack=operands.pieces, plan=plan)
                runner.run_b(source, b, y, offsets=offsets, plan=plan)

        def restore() -> None:
            y.copy_(base)

        label = _label(plan, plan.b_family, plan.b_tiles)
        if op == "lora":
            label = f"{_label(plan, plan.a_family, plan.a_tiles)};{label}"
        return Launch(run, lambda: y, restore, restore, label, 2 if op == "lora" else 1)

    def _runner(self, operands: Operands) -> tuple[Any, Any]:
        module, utils = self._site[_RUNNER], self._site["sglang.srt.lora.utils"]
        runner = module.DenseLoraRunner(
            self._site["sglang.srt.lora.workspace"].LoraWorkspace(),
            max_loras=operands.slots,
            device=operands.device,
        )
        case = operands.case
        runner.begin_batch(
            token_slots=operands.token_slots,
            lora_ranks=torch.tensor(operands.slot_ranks, dtype=torch.int32, device=operands.device),
            scalings=torch.tensor(operands.scales, dtype=torch.float32, device=operands.device),
            num_tokens=case.tokens,
            phase=utils.Phase(case.phase),
            graph_mode=False,
        )
        plan = runner.plan_for(
            module.DenseLoraKind.LINEAR,
            case.capacity,
            case.projection.d_in,
            case.projection.d_out,
            num_tokens=case.tokens,
        )
        return runner, plan

    def _shrink(self, operands: Operands, runner: Any, plan: Any) -> Launch:
        x, weights, pieces = operands.x, operands.a_pool, operands.pieces
        held: list[Any] = []

        def run() -> None:
            with self._site.active():
                held[:] = [runner.run_a(x, weights, stack=pieces, plan=plan)]

        def output() -> Tensor:
            (bridge,) = held
            packed = bridge.tensor
            if bridge.slot_planes:
                rows = torch.arange(len(x), device=x.device)
                packed = packed[operands.token_slots.long(), rows]
            elif bridge.planes > 1:
                # what is past a slot's rank was never written; unpacking leaves it out
                packed = packed.sum(0)
            return operands.unpack(packed)

        def poison() -> None:
            for bridge in held:
                bridge.tensor.fill_(float("nan"))

        return Launch(run, output, poison, nothing, _label(plan, plan.a_family, plan.a_tiles))

    def _bridge(self, operands: Operands, plan: Any) -> Any:
        """The canonical Z as the plan's shrink would leave it."""
        packed, kind = operands.pack(operands.z), self._site[_RUNNER].Bridge
        planes = int(plan.a_tiles.get("SPLIT_K", 1)) if plan.a_tiles.get("SPLIT_MODE") == "planes" else 1
        if plan.a_family.value == "all_slots":
            flat = packed.to(operands.dtype).repeat(1, operands.slots)
            return kind(flat.view(len(packed), operands.slots, -1).transpose(0, 1), slot_planes=True)
        if planes > 1:
            split = packed.new_zeros((planes, *packed.shape))
            split[0], split[-1] = packed / 2, packed / 2
            return kind(split, planes=planes)
        return kind(packed.to(operands.dtype))


def _absent(*_: object, **__: object) -> None:
    raise NotImplementedError("the CUDA route builder is not part of the benchmark")


def _label(plan: Any, family: Any, tiles: dict[str, Any]) -> str:
    listed = ",".join(f"{key}={value}" for key, value in tiles.items())
    return f"{family.value},block={plan.block_size},{listed}"
