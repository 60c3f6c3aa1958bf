"""The engine's own LoRA manager around its own linear layers, on a CPU: all that SGLang does with an adapter but
attention and scheduling. To be imported where SGLang is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from torch import Tensor, nn
from transformers import LlamaConfig

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS = 64, 96, 4, 2, 16, 2
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
DTYPE = torch.bfloat16
REPLACED = ((torch, "tensor"), (torch, "zeros"), (Tensor, "pin_memory"))  # by unpinned()


def unpinned() -> None:
    """Have the engine's layers, which keep a few numbers in page-locked memory, do without where there is no GPU."""
    if torch.cuda.is_available():
        return
    torch.tensor, torch.zeros = _unpinned(torch.tensor), _unpinned(torch.zeros)  # type: ignore[assignment]
    Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def _unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return make(*args, **kwargs)

    return made


def start(rank: int, world: int, port: int) -> None:
    """Join the group of processes that share the model."""
    unpinned()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    get_context().override_server_args(
        device="cpu", tp_size=world, chunked_prefill_size=64, max_running_requests=8
    ).install()
    get_parallel().override_permanently(tp_size=world, tp_rank=rank)
    parallel_state.init_distributed_environment(
        world_size=world, rank=rank, local_rank=0, backend="gloo", distributed_init_method="env://"
    )
    parallel_state.initialize_model_parallel(backend="gloo")


class _Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        same = {"bias": False, "params_dtype": DTYPE}
        prefix = f"model.layers.{number}"
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = QKVParallelLinear(
            HIDDEN, HEAD, HEADS, KV_HEADS, prefix=f"{prefix}.self_attn.qkv_proj", **same
        )
        self.self_attn.o_proj = RowParallelLinear(HEADS * HEAD, HIDDEN, **same)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], **same)
        self.mlp.down_proj = RowParallelLinear(INNER, HIDDEN, **same)


class Model(nn.Module):
    """Linear layers of a Llama, weights zero: what comes out is what adapters add."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD,
            vocab_size=128,
        )
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(_Layer(number) for number in range(LAYERS))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def layer(self, number: int, name: str) -> Any:
        return self.get_submodule(f"model.layers.{number}.{name}")


def manager(
    model: Model,
    folders: Mapping[str, Path],
    *,
    slots: int = 4,
    rank: int | None = None,
    backend: str = "loraforge",
) -> Any:
    """The engine's manager with these adapters, for a server whose --lora-backend is ``backend``."""
    from sglang.srt.lora.lora_manager import LoRAManager

    return LoRAManager(
        base_model=model,
        base_hf_config=model.config,
        max_loras_per_batch=slots,
        load_config=LoadConfig(),
        dtype=DTYPE,
        server_args=get_context().server_args,
        lora_backend=backend,
        max_lora_rank=rank,
        target_modules={"qkv_proj", "o_proj", "gate_up_proj", "down_proj"} if rank else None,
        lora_paths=[ref(name, folder) for name, folder in folders.items()],
    )


def ref(name: str, folder: Path, *, pinned: bool = False) -> LoRARef:
    return LoRARef(lora_id=name, lora_name=name, lora_path=str(folder), pinned=pinned)


def batch(adapters: Sequence[str | None], lengths: Sequence[int]) -> Any:
    """What the manager reads of a batch of prompts."""
    return SimpleNamespace(
        batch_size=len(adapters),
        forward_mode=ForwardMode.EXTEND,
        lora_ids=list(adapters),
        extend_seq_lens=torch.tensor(lengths),
        extend_seq_lens_cpu=list(lengths),
        extend_num_tokens=sum(lengths),
        return_logprob=False,
    )
