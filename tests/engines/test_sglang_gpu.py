"""The plugin in a real SGLang engine on a GPU, against transformers in FP32, with a small model of random weights.

Needs ``pip install sglang==0.5.22`` and this package beside it. Each mode of the engine (eager; decode and prefill in
CUDA graphs; the shadow pool; adapters loaded while others run; on two GPUs) serves the same batches in a process of its
own, which this file also is. Model, adapters and tolerance are those of the test of vLLM, and one adapter more, which
the engine's own loader refuses: its ranks differ within the fused layers, and one part of each is missing.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_model import (
    LAYERS,
    LENGTHS,
    MIXED,
    RANKS,
    SHAPES,
    Reference,
    Rows,
    check_base_rows,
    check_same,
    check_tokens,
    end,
    of_sglang,
    prompts,
    serve,
)
from safetensors.torch import save_file

pytestmark = [
    pytest.mark.engines,
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

MODES: dict[str, dict[str, Any]] = {
    "eager": {"disable_cuda_graph": True},
    "graphs": {},
    "shadow": {},
    "overlap": {"enable_lora_overlap_loading": True, "max_loaded_loras": 16},
    "two_gpus": {"tp_size": 2},
}
SLOTS = 8  # one of them the base model's
RAGGED = {"self_attn.q_proj": 3, "self_attn.v_proj": 16, "mlp.up_proj": 9, "mlp.down_proj": 33}
FLEET = [*RANKS, "ragged"]


def _serve(mode: str, root: Path) -> None:
    """Serve the batches and write what came of them."""
    import sglang

    targets = {kind.rpartition(".")[2] for kind in SHAPES}
    engine = sglang.Engine(
        model_path=str(root / "base"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        context_length=512,
        max_running_requests=32,
        max_total_tokens=16384,
        chunked_prefill_size=512,
        disable_radix_cache=True,
        attention_backend="triton",
        sampling_backend="pytorch",
        cuda_graph_bs_decode=[1, 2, 4, 8, 16, 32],
        cuda_graph_bs_prefill=[64, 256, 512],
        random_seed=0,
        enable_lora=True,
        lora_backend="loraforge",
        max_loras_per_batch=SLOTS,
        max_lora_rank=128,
        # two GPUs and the graphs run without an embedding's native path, eager execution and the others with it
        lora_target_modules=sorted(targets if mode in ("graphs", "two_gpus") else {*targets, "embed_tokens"}),
        lora_paths={name: str(root / name) for name in _known(mode)},
        **MODES[mode],
    )

    def run(adapters: list[str | None], seed: int, length: int = 9) -> Rows:
        asked = prompts(seed, len(adapters), length)
        answers = engine.generate(
            input_ids=asked,
            sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
            lora_path=adapters,
            return_logprob=True,
        )
        return [
            {"adapter": name, "prompt": prompt, **of_sglang(answer)}
            for name, prompt, answer in zip(adapters, asked, answers, strict=True)
        ]

    served = {"mixed": run(MIXED, 0), "alone": run([None] * len(MIXED), 0)}
    served["ragged"] = run(["ragged", None, "padded", "ragged"], 2)
    if "embed" in _known(mode):
        served["embedding"] = run(["embed", None, "padded", "embed"], 3)
    for length in LENGTHS:
        served[f"long_{length}"] = run(["ragged", "odd"], length, length)
    served["again"] = run(MIXED, 0)
    answer = engine.load_lora_adapter("broken", str(root / "broken"))
    served["after"] = run(["ragged"], 5)
    told = {"served": served, "refused": [answer.success, answer.error_message]}
    end(root, mode, told, engine.shutdown)


def _known(mode: str) -> list[str]:
    return [name for name in FLEET if name != "embed" or mode not in ("graphs", "two_gpus")]


@pytest.fixture(scope="module")
def fleet(root: Path) -> Path:
    """The folder of the test of vLLM, with two adapters more."""
    make = torch.Generator().manual_seed(9)
    tensors = {}
    for layer in range(LAYERS):
        for kind, rank in RAGGED.items():
            d_in, d_out = SHAPES[kind]
            key = f"base_model.model.model.layers.{layer}.{kind}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, d_in, generator=make) / math.sqrt(d_in)
            tensors[f"{key}.lora_B.weight"] = torch.randn(d_out, rank, generator=make) * 0.4 / math.sqrt(rank)
    ranks = {kind.rpartition(".")[2]: rank for kind, rank in RAGGED.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 33,
        "lora_alpha": 33,
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
        "target_modules": sorted(ranks),
        "bias": "none",
    }
    for name, change in {"ragged": {}, "broken": {"rank_pattern": {**ranks, "q_proj": 4}}}.items():
        (root / name).mkdir()
        save_file(
            {key: tensor.bfloat16().contiguous() for key, tensor in tensors.items()},
            root / name / "adapter_model.safetensors",
        )
        (root / name / "adapter_config.json").write_text(json.dumps({**config, **change}))
    return root


@pytest.fixture(scope="module", params=MODES)
def served(request: pytest.FixtureRequest, fleet: Path) -> dict[str, Any]:
    """What one mode made of the batches."""
    mode: str = request.param
    if mode == "two_gpus" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return serve(__file__, mode, fleet, {"LORAFORGE_POOL": "shadow" if mode == "shadow" else "ragged"})


def test_base_rows_of_a_mixed_batch_are_those_of_the_base_model_alone(served: dict[str, Any]) -> None:
    check_base_rows(served["served"]["mixed"], served["served"]["alone"])


def test_adapters_come_back_as_they_were(served: dict[str, Any]) -> None:
    check_same(served["served"]["mixed"], served["served"]["again"])


def test_a_broken_adapter_is_refused_and_the_server_goes_on(served: dict[str, Any]) -> None:
    success, message = served["refused"]
    assert not success
    assert "q_proj" in message
    assert "rank 4" in message
    assert len(served["served"]["after"][0]["tokens"]) == 12


def test_counters_tell_of_the_pool(served: dict[str, Any]) -> None:
    told = served["counters"]
    assert told["execution"] == "loraforge"
    assert told["pool"] == ("shadow" if served["mode"] == "shadow" else "ragged")
    assert told["adapters"] == told["loads"] - told["unloads"] <= SLOTS
    assert told["loads"] >= len(_known(served["mode"])) - 1
    assert told["peak_allocated_bytes"] > told["lora_bytes"] > told["live_bytes"]


def test_served_tokens_are_those_of_transformers(served: dict[str, Any], reference: Reference) -> None:
    check_tokens(served["served"], reference)


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
