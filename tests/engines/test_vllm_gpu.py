"""The plugin in a real vLLM engine on a GPU, against transformers in FP32, with a small model of random weights.

Needs ``pip install vllm==0.26.0`` and this package beside it. Each mode of the engine (eager; compiled with CUDA
graphs; the older model runner; on two GPUs) serves the same batches in a process of its own, which this file also is.

Tolerance: BF16 execution against FP32. A greedy token must be within 0.15 of the best token of the FP32 model with the
adapter folded in, and its log-probability within 0.15 of the FP32 one; adapters move log-probabilities by more than 1.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = [
    pytest.mark.engines,
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

TOLERANCE = 0.15
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB = 4, 512, 1024, 8, 2, 64, 4096
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD),
    "self_attn.o_proj": (HEADS * HEAD, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
# adapter -> live rank of every module it changes; "two" changes two kinds of modules, "embed" the embedding too, and
# "padded" is stored at rank 64
RANKS = {"one": 1, "three": 3, "eight": 8, "odd": 33, "two": 16, "padded": 5, "wide": 128, "embed": 8}
MIXED = ["one", None, "three", "eight", "two", "odd", "wide", None]
SLOTS = 7
MODES = {
    "eager": {},
    "graphs": {},
    "older_runner": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "two_gpus": {},
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
        draw = random.Random(seed)
        prompts = [
            {"prompt_token_ids": [draw.randrange(3, VOCAB) for _ in range(9 + 3 * place)]}
            for place in range(len(adapters))
        ]
        requests = [
            None if name is None else LoRARequest(name, list(RANKS).index(name) + 1, str(root / name))
            for name in adapters
        ]
        return [
            {
                "adapter": name,
                "prompt": list(result.prompt_token_ids),
                "tokens": list(result.outputs[0].token_ids),
                "logprobs": [
                    entry[token].logprob
                    for entry, token in zip(
                        result.outputs[0].logprobs, result.outputs[0].token_ids, strict=True
                    )
                ],
            }
            for name, result in zip(
                adapters, llm.generate(prompts, greedy, lora_request=requests, use_tqdm=False), strict=True
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
    (root / f"{mode}.json").write_text(json.dumps({"served": served, "report": report}))
    sys.stdout.flush()
    os._exit(0)  # the engine's own end may take long, and is not what is tested


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and the adapters, of random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("gpu")
    make = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=512,
        initializer_range=1 / math.sqrt(HIDDEN),
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.lm_head.weight.data.mul_(2.5)
    model.bfloat16().save_pretrained(folder / "base")
    for name, rank in RANKS.items():
        kinds = ["self_attn.q_proj", "mlp.down_proj"] if name == "two" else list(SHAPES)
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(LAYERS):
            for kind in kinds:
                d_in, d_out = SHAPES[kind]
                a = torch.randn(rank, d_in, generator=make) / math.sqrt(d_in)
                b = torch.randn(d_out, rank, generator=make) * 0.4 / math.sqrt(rank)
                if name == "padded":
                    a = torch.cat([a, torch.zeros(64 - rank, d_in)])
                    b = torch.cat([b, torch.zeros(d_out, 64 - rank)], 1)
                key = f"base_model.model.model.layers.{layer}.{kind}"
                tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, b
        modules = {kind.split(".")[1] for kind in kinds}
        if name == "embed":
            key = "base_model.model.model.embed_tokens.lora_embedding_"
            tensors[f"{key}A"] = torch.randn(rank, VOCAB, generator=make) / math.sqrt(rank)
            tensors[f"{key}B"] = torch.randn(HIDDEN, rank, generator=make) / math.sqrt(HIDDEN)
            modules.add("embed_tokens")
        (folder / name).mkdir()
        save_file(
            {key: t.bfloat16().contiguous() for key, t in tensors.items()},
            folder / name / "adapter_model.safetensors",
        )
        stored = 64 if name == "padded" else rank
        (folder / name / "adapter_config.json").write_text(
            json.dumps(
                {
                    "peft_type": "LORA",
                    "task_type": "CAUSAL_LM",
                    "r": stored,
                    "lora_alpha": stored,
                    "target_modules": sorted(modules),
                    "bias": "none",
                }
            )
        )
    return folder


@pytest.fixture(scope="module", params=MODES)
def served(request: pytest.FixtureRequest, root: Path) -> dict[str, Any]:
    """What one mode made of the batches."""
    mode: str = request.param
    if mode == "two_gpus" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = {
        **os.environ,
        **MODES[mode],
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LORAFORGE_COUNTERS": str(root / f"{mode}.counters"),
    }
    done = subprocess.run(
        [sys.executable, __file__, mode, str(root)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((root / f"{mode}.json").read_text())
    found["counters"] = json.loads((root / f"{mode}.counters").read_text())
    return dict(found)


def test_base_rows_of_a_mixed_batch_are_those_of_the_base_model_alone(served: dict[str, Any]) -> None:
    for mixed, alone in zip(served["served"]["mixed"], served["served"]["alone"], strict=True):
        if mixed["adapter"] is None:
            assert mixed["tokens"] == alone["tokens"]
            assert mixed["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-3)
        else:
            assert mixed["logprobs"] != alone["logprobs"]


def test_adapters_come_back_as_they_were(served: dict[str, Any]) -> None:
    for first, again in zip(served["served"]["mixed"], served["served"]["again"], strict=True):
        assert first["tokens"] == again["tokens"]
        assert first["logprobs"] == pytest.approx(again["logprobs"], abs=1e-3)


def test_counters_tell_of_the_pool(served: dict[str, Any]) -> None:
    report, told = served["report"], served["counters"]
    assert {key: told[key] for key in report} == report
    assert (told["execution"], told["pool"]) == ("loraforge", "ragged")
    assert told["adapters"] == told["loads"] - told["unloads"] <= SLOTS
    assert told["loads"] >= len(RANKS)
    assert told["peak_allocated_bytes"] > told["lora_bytes"] > told["capacity_bytes"]


def test_served_tokens_are_those_of_transformers(served: dict[str, Any], reference: Reference) -> None:
    for part, rows in served["served"].items():
        for row in rows:
            wanted = reference.logprobs(row)
            chosen = wanted.gather(1, torch.tensor(row["tokens"], device=wanted.device)[:, None])[:, 0]
            assert (wanted.max(1).values - chosen).max() <= TOLERANCE, (part, row["adapter"])
            assert (chosen.cpu() - torch.tensor(row["logprobs"])).abs().max() <= TOLERANCE, (
                part,
                row["adapter"],
            )


class Reference:
    """The base model in FP32, with one adapter at a time folded into its weights."""

    def __init__(self, root: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.root = root
        self.model: Any = (
            AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32).cuda().eval()
        )
        self.plain = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.folded: str | None = None

    @torch.no_grad()
    def logprobs(self, row: dict[str, Any]) -> torch.Tensor:
        """[tokens, vocabulary], where the engine chose each of its tokens."""
        self._fold(row["adapter"])
        logits = self.model(torch.tensor([row["prompt"] + row["tokens"]]).cuda()).logits[0]
        return logits[len(row["prompt"]) - 1 : -1].log_softmax(-1)

    def _fold(self, adapter: str | None) -> None:
        if adapter == self.folded:
            return
        weights = {name: tensor.clone() for name, tensor in self.plain.items()}
        if adapter is not None:
            tensors = load_file(self.root / adapter / "adapter_model.safetensors", device="cuda")
            for key, a in tensors.items():
                if key.endswith("lora_A.weight"):
                    name = key.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
                    weights[name] += tensors[key.replace("lora_A", "lora_B")].float() @ a.float()
                elif key.endswith("lora_embedding_A"):
                    b = tensors[key.replace("lora_embedding_A", "lora_embedding_B")]
                    weights["model.embed_tokens.weight"] += (b.float() @ a.float()).T
        self.model.load_state_dict(weights)
        self.folded = adapter


@pytest.fixture(scope="module")
def reference(root: Path) -> Reference:
    return Reference(root)


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
