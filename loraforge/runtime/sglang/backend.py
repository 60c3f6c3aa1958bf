"""The engine's LoRA backend: its fused products from the pool, all else by the engine's own kernels.

The engine hands a backend tensors, not layers. The tensors of a layer that the pool serves stand in for buffers that do
not exist, and their addresses say which layer it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.lora.backend.chunked_backend import ChunkedSgmvLoRABackend
from sglang.srt.lora.utils import LoRABatchInfo, generate_sequence_lengths
from sglang.srt.runtime_context import get_exec, get_schedule, get_spec
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.ops.cpu import native as cpu
from loraforge.ops.plan import BASE
from loraforge.runtime.batch import Applied, Batch
from loraforge.runtime.kernels import Kernels
from loraforge.runtime.sglang.options import Options
from loraforge.runtime.sglang.projections import Key, Served

_REQUESTS = 512  # that run at once, where the engine captures no graph and sets no bound
_TOKENS = 16384  # of a step, where the engine sets no bound


@dataclass
class _Entry:
    """One layer: how it is described, and what it calls in a step of usual length."""

    key: Key
    served: Served
    applied: Applied


class LoRAForgeBackend(ChunkedSgmvLoRABackend):
    """memory: the engine's memory pool, once there is one. stream: that of the last step, None on a CPU."""

    name = "loraforge"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = Options.of(os.environ)
        self.memory: Any = None
        self.stream: Any = None
        self.kernels: Kernels | None = None
        self._entries: dict[int, _Entry] = {}
        # a layer that is called a second time without a new batch is in a new forward pass: the engine captures and
        # warms up several over one batch, and each needs its plan made inside
        self._called: set[Key] = set()
        self._step = object()

    @property
    def instructions(self) -> str:
        """What the products run on."""
        if self.kernels is None:
            return cpu.instructions()
        return f"kernels chosen for {self.kernels.source}"

    @property
    def device_bytes(self) -> int:
        """Bytes that the buffers of a step take."""
        return self._batch.device_bytes

    def attach(self, memory: Any, stand_ins: Mapping[Key, tuple[Tensor, Tensor]]) -> None:
        """Serve the layers of ``memory.served`` from its pool; A and B of ``stand_ins`` are what they call with."""
        requests, tokens = _bounds()
        if torch.device(self.device).type == "cuda":
            self.kernels = Kernels.of(self.device, requests, self.options.ranks, memory.max_lora_rank)
        self._rank, self._pool = memory.max_lora_rank, memory.pool
        self._usual = self._batch = self._make_batch(tokens)
        self._native = memory.native
        alike: dict[Any, Applied] = {}  # layers of one name and shape run the same kernels
        for key, served in memory.served.items():
            entry = _Entry(key, served, self._apply(served, self._batch))
            for tensor in stand_ins[key]:
                self._entries[tensor.data_ptr()] = entry
            its = served.projection
            alike.setdefault((key[1], its.d_in, its.channels, served.reduced), entry.applied)
        for applied in alike.values():
            applied.warm()
        self.memory = memory

    def prepare_lora_batch(
        self,
        forward_batch: Any,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_cuda_graph: bool,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        graph = use_cuda_graph or use_prefill_cuda_graph
        if self._native:
            super().prepare_lora_batch(
                forward_batch, weight_indices, lora_ranks, scalings, use_cuda_graph, use_prefill_cuda_graph
            )
        else:
            self.batch_info = _no_info(forward_batch.batch_size, graph)
        # the base model has a slot like the others, but no rank
        slots = torch.tensor(
            [slot if lora_ranks[slot] else BASE for slot in weight_indices], dtype=torch.int32
        )
        lengths = generate_sequence_lengths(forward_batch, device=torch.device("cpu"))
        token_slots = slots.repeat_interleave(lengths)
        if self.kernels is not None:
            self.stream = torch.cuda.current_stream(self.device)
        self._take_batch(len(token_slots), graph)
        # a graph is captured without adapters and replayed with them
        self._batch.set(token_slots, active=graph or bool((slots != BASE).any()))
        self._begin()

    def init_cuda_graph_batch_info(self, max_bs_in_cuda_graph: int, num_tokens_per_req: int) -> None:
        super().init_cuda_graph_batch_info(max_bs_in_cuda_graph, num_tokens_per_req)
        self._require_room(max_bs_in_cuda_graph * num_tokens_per_req)

    def init_prefill_cuda_graph_batch_info(
        self, max_num_tokens: int, max_num_requests: int | None = None
    ) -> None:
        super().init_prefill_cuda_graph_batch_info(max_num_tokens, max_num_requests)
        self._require_room(max_num_tokens)

    def run_lora_a_sgemm(self, x: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        entry = self._entries.get(weights.data_ptr())
        if entry is None:
            native: Tensor = super().run_lora_a_sgemm(x, weights, *args, **kwargs)
            return native
        if not entry.served.reduced:
            return x  # both products come with the second call
        return self._applied(entry).shrink(x, self._now(entry))

    def run_lora_b_sgemm(
        self,
        x: Tensor,
        weights: Tensor,
        output_offset: Tensor,
        base_output: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        entry = self._entries.get(weights.data_ptr())
        if entry is None or base_output is None:
            native: Tensor = super().run_lora_b_sgemm(x, weights, output_offset, base_output, *args, **kwargs)
            return native
        if entry.served.reduced:
            self._applied(entry).expand(base_output, x, self._step)
            return base_output
        return self._add(entry, x, base_output)

    def run_qkv_lora(
        self,
        x: Tensor,
        qkv_lora_a: Tensor,
        qkv_lora_b: Tensor,
        output_offset: Tensor,
        max_qkv_out_dim: int,
        base_output: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        entry = self._entries.get(qkv_lora_b.data_ptr())
        if entry is None or base_output is None:
            native: Tensor = super().run_qkv_lora(
                x, qkv_lora_a, qkv_lora_b, output_offset, max_qkv_out_dim, base_output, *args, **kwargs
            )
            return native
        return self._add(entry, x, base_output)

    def run_gate_up_lora(
        self,
        x: Tensor,
        gate_up_lora_a: Tensor,
        gate_up_lora_b: Tensor,
        output_offset: Tensor,
        base_output: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        entry = self._entries.get(gate_up_lora_b.data_ptr())
        if entry is None or base_output is None:
            native: Tensor = super().run_gate_up_lora(
                x, gate_up_lora_a, gate_up_lora_b, output_offset, base_output, *args, **kwargs
            )
            return native
        return self._add(entry, x, base_output)

    def _add(self, entry: _Entry, x: Tensor, y: Tensor) -> Tensor:
        self._applied(entry).add(y, x, self._now(entry))
        return y

    def _now(self, entry: _Entry) -> object:
        """What tells this forward pass from others, for a layer that is called in it."""
        if entry.key in self._called:
            self._begin()
        self._called.add(entry.key)
        return self._step

    def _begin(self) -> None:
        self._called.clear()
        self._step = object()

    def _applied(self, entry: _Entry) -> Applied:
        if self._batch is self._usual:
            return entry.applied
        return self._apply(entry.served, self._batch)

    def _apply(self, served: Served, batch: Batch) -> Applied:
        return Applied(self._pool, batch, served.projection, self.kernels, split=served.reduced)

    def _take_batch(self, tokens: int, graph: bool) -> None:
        """The usual buffers, which graphs hold, or larger ones for a longer step, which none does."""
        if tokens <= self._usual.tokens:
            self._batch = self._usual
        elif self._batch is self._usual or self._batch.tokens < tokens:
            self._batch = self._make_batch(1 << (tokens - 1).bit_length())

    def _make_batch(self, tokens: int) -> Batch:
        if self.kernels is None:
            return Batch(tokens, self.max_loras_per_batch, self._rank, self.device)
        return Batch(
            tokens,
            self.max_loras_per_batch,
            self._rank,
            self.device,
            tiles=self.kernels.tiles(),
            planes=self.kernels.planes(tokens),
        )

    def _require_room(self, tokens: int) -> None:
        if tokens > self._usual.tokens:
            raise LoraForgeError(
                f"the engine captures graphs of {tokens} tokens, its options gave {self._usual.tokens}",
                key="cuda_graph_config",
                remedy="give the engine a --chunked-prefill-size of at least as many",
            )


def _bounds() -> tuple[int, int]:
    """(requests at once, tokens of a step) that the engine's options give, graphs included."""
    schedule, graphs = get_schedule(), get_exec().graph.cuda_graph_config
    decode, prefill = (_captured(getattr(graphs, phase, None)) for phase in ("decode", "prefill"))
    requests = decode or schedule.max_running_requests or _REQUESTS
    chunk = schedule.chunked_prefill_size or 0
    tokens = chunk if chunk > 0 else schedule.max_prefill_tokens or _TOKENS
    drafts = get_spec().speculative_num_draft_tokens or 1
    # a step may hold a chunk of a prompt and the requests that decode
    return requests, max(tokens + requests, prefill, requests * drafts)


def _captured(phase: Any) -> int:
    """The largest size that graphs of a phase are captured for; 0 where there are none."""
    return 0 if phase is None else max([phase.max_bs or 0, *(phase.bs or ())])


def _no_info(requests: int, graph: bool) -> LoRABatchInfo:
    """What the engine asks whether there is a batch; its kernels, which would read it, do not run."""
    none = torch.empty(0, dtype=torch.int32)
    return LoRABatchInfo(
        use_cuda_graph=graph,
        bs=requests,
        num_segments=0,
        seg_indptr=none,
        weight_indices=none,
        lora_ranks=none,
        scalings=none,
        max_len=None,
        seg_lens=None,
        permutation=None,
    )
