"""The client and the process class against a real engine: vLLM, as its CPU edition too.

Runs where vLLM is installed, or where VLLM_PYTHON names the interpreter of an environment that has it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import MakeAdapter
from test_engines import free_port

from loraforge.serving.client import Options, replay
from loraforge.serving.engines import Engine, EngineConfig
from loraforge.serving.metrics import failures
from loraforge.serving.workload import make_workload

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed, and VLLM_PYTHON is not set"),
]
HIDDEN, HEADS, LAYERS = 256, 4, 2
# the engine as it comes, and little memory for its cache
ENVIRONMENT = {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama of random weights with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("base")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: place for place, symbol in enumerate([*alphabet, "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=256,
        bos_token_id=256,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(
    base: Path, make_adapter: MakeAdapter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (HIDDEN, HIDDEN)}
    adapters = {
        name: make_adapter(folder / name, r=8, shapes=shapes, layers=range(LAYERS), seed=seed, base=str(base))
        for seed, name in enumerate(("a", "b"))
    }
    assert PYTHON is not None
    config = EngineConfig(
        engine="vllm",
        model=str(base),
        python=Path(PYTHON),
        port=free_port(),
        context=256,
        running=16,
        lora={"adapters": adapters, "slots": 2, "max_rank": 8},
        extra=("--enforce-eager",),
        env=ENVIRONMENT,
    )
    with Engine.of(config, folder / "engine.log", start_s=300) as running:
        yield running
    assert running.pid is None


def test_exact_lengths_of_adapters_and_base(engine: Engine, make_load: Any) -> None:
    workload = make_workload(make_load("a", "b", None, each=8, tokens=12), 1, 20.0)
    run = replay(workload, {"fleet": engine.url}, Options(timeout_s=60), warmup=3)
    assert failures(run.requests) == {}
    for request, row in zip(workload.requests, run.requests, strict=True):
        assert row.model == (request.adapter or "base")
        assert (row.prompt_tokens, row.output_tokens, row.counted) == (len(request.prompt), 12, "usage")
        assert row.finish_reason == "length"


def test_an_unknown_adapter_fails_alone(engine: Engine, make_load: Any) -> None:
    workload = make_workload(make_load("a", "nobody", each=3), 1, 20.0)
    run = replay(workload, {"fleet": engine.url}, Options(timeout_s=60))
    assert {row.adapter for row in run.requests if row.failure is None} == {"a"}
    (reason,) = failures(run.requests)
    assert reason.startswith("HTTP 404: ")
    assert "nobody" in reason
