"""A small model of random weights and adapters of many kinds, for the tests of both engines on a GPU, and the answers
that transformers gives in FP32.

Tolerance: BF16 execution against FP32. The log-probability of a greedy token must be within 0.15 of that of the FP32
model with the adapter folded in, and the token within twice that of the FP32 model's best: two tokens whose
log-probabilities are off by so much, one up and one down, change places. Adapters move log-probabilities by more
than 1.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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
LENGTHS = (131, 255, 257)  # prompts at which eager execution and graphs part
VLLM = {  # environment of an engine that is tested
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


Rows = list[dict[str, Any]]  # adapter, prompt, tokens, logprobs of each answer


def prompts(seed: int, count: int, length: int = 9) -> list[list[int]]:
    """Token ids, each prompt three longer than the one before."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(length + 3 * place)] for place in range(count)]


def write_model(folder: Path) -> None:
    """``base`` and the adapters of RANKS."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

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


def serve(file: str, mode: str, root: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a test's file as a process of its own, which serves one mode of an engine; what it wrote to ``MODE.json``,
    and the counters."""
    counters = root / f"{mode}.counters"
    done = subprocess.run(
        [sys.executable, file, mode, str(root)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HF_HUB_OFFLINE": "1",
            "LORAFORGE_COUNTERS": str(counters),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((root / f"{mode}.json").read_text())
    return {**found, "counters": json.loads(counters.read_text()), "mode": mode}


def of_vllm(made: Any) -> dict[str, Any]:
    """Tokens, and log-probabilities of those, of one of vLLM's outputs."""
    tokens = list(made.token_ids)
    return {
        "tokens": tokens,
        "logprobs": [entry[token].logprob for entry, token in zip(made.logprobs, tokens, strict=True)],
    }


def of_sglang(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The same of one of SGLang's answers."""
    chosen = answer["meta_info"]["output_token_logprobs"]
    return {"tokens": [token for _, token, *_ in chosen], "logprobs": [logprob for logprob, *_ in chosen]}


def end(
    root: Path, mode: str, told: Mapping[str, Any], shutdown: Callable[[], object] = lambda: None
) -> None:
    """Write what a mode served, and end this process: an engine's own end may take long, and is not what is tested."""
    (root / f"{mode}.json").write_text(json.dumps(told))
    shutdown()
    sys.stdout.flush()
    os._exit(0)


def check_base_rows(mixed: Rows, alone: Rows) -> None:
    """Rows of the base model are those of the base model alone, and adapters change theirs."""
    for one, other in zip(mixed, alone, strict=True):
        if one["adapter"] is None:
            check_same([one], [other])
        else:
            assert one["logprobs"] != other["logprobs"]


def check_same(first: Rows, again: Rows) -> None:
    """Two answers of one kind are alike."""
    for one, other in zip(first, again, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)


def check_tokens(served: Mapping[str, Rows], reference: Reference) -> None:
    """What was served, by part, is what transformers would have."""
    for part, rows in served.items():
        for row in rows:
            wanted = reference.logprobs(row)
            chosen = wanted.gather(1, torch.tensor(row["tokens"], device=wanted.device)[:, None])[:, 0]
            assert (wanted.max(1).values - chosen).max() <= 2 * TOLERANCE, (part, row["adapter"])
            off = (chosen.cpu() - torch.tensor(row["logprobs"])).abs().max()
            assert off <= TOLERANCE, (part, row["adapter"])
