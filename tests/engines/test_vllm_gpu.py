"""The plugin in a real vLLM engine on a GPU, against transformers in FP32, with a small model of random weights.

Needs ``pip install vllm==0.26.0`` and this package beside it. Each mode of the engine (eager; compiled with CUDA
graphs; the older model runner; on two GPUs) serves the same batches in a process of its own, which this file also is.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_model import (
    MIXED,
    RANKS,
    VLLM,
    Reference,
    check_base_rows,
    check_same,
    check_tokens,
    end,
    of_vllm,
    prompts,
    serve,
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SLOTS = 7
MODES = {
    "eager": {},
    "graphs": {},
    "older_runner": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    # sums over devices without NVLink multicast, which a host may not let its guests use
    "two_gpus": {"NCCL_NVLS_ENABLE": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"},
}


def _serve(mode: str, root: Path) -> None:
    """Serve the batches and print what came of them."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        str(root / "base"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.2,
        # or the engine measures what is free, which others may change meanwhile
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        enforce_eager=mode == "eager",
        tensor_parallel_size=2 if mode == "two_gpus" else 1,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]},
        enable_lora=True,
        max_loras=SLOTS,
        max_cpu_loras=len(RANKS),
        max_lora_rank=128,
        additional_config={"loraforge_ranks": {"qkv_proj": 4}},
    )
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False)

    def run(adapters: list[str | None], seed: int) -> list[dict[str, Any]]:
        asked = [{"prompt_token_ids": ids} for ids in prompts(seed, len(adapters))]
        requests = [
            None if name is None else LoRARequest(name, list(RANKS).index(name) + 1, str(root / name))
            for name in adapters
        ]
        return [
            {
                "adapter": name,
                "prompt": list(result.prompt_token_ids),
                **of_vllm(result.outputs[0]),
            }
            for name, result in zip(
                adapters, llm.generate(asked, greedy, lora_request=requests, use_tqdm=False), strict=True
            )
        ]

    served = {
        "mixed": run(MIXED, 0),
        "alone": run([None] * len(MIXED), 0),
        "other_map": run(MIXED[::-1], 1),
        "embedding": run(["embed", None, "padded", "embed"], 2),  # puts two others out of their slots
        "again": run(MIXED, 0),
        "single": run(["eight"], 3),
    }
    report, *_ = llm.apply_model(lambda model: model.lora_manager.pool.report())
    end(root, mode, {"served": served, "report": report})


@pytest.fixture(scope="module", params=MODES)
def served(request: pytest.FixtureRequest, root: Path) -> dict[str, Any]:
    """What one mode made of the batches."""
    mode: str = request.param
    if mode == "two_gpus" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = {**VLLM, **MODES[mode], "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    return serve(__file__, mode, root, environment)


def test_base_rows_of_a_mixed_batch_are_those_of_the_base_model_alone(served: dict[str, Any]) -> None:
    check_base_rows(served["served"]["mixed"], served["served"]["alone"])


def test_adapters_come_back_as_they_were(served: dict[str, Any]) -> None:
    check_same(served["served"]["mixed"], served["served"]["again"])


def test_counters_tell_of_the_pool(served: dict[str, Any]) -> None:
    report, told = served["report"], served["counters"]
    assert {key: told[key] for key in report} == report
    assert (told["execution"], told["pool"]) == ("loraforge", "ragged")
    assert told["adapters"] == told["loads"] - told["unloads"] <= SLOTS
    assert told["loads"] >= len(RANKS)
    assert told["peak_allocated_bytes"] > told["lora_bytes"] > told["capacity_bytes"]


def test_served_tokens_are_those_of_transformers(served: dict[str, Any], reference: Reference) -> None:
    check_tokens(served["served"], reference)


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
