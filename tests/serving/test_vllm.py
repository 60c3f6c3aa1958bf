"""The client and the process class against a real engine: vLLM, as its CPU edition too.

Runs where vLLM is installed, or where VLLM_PYTHON names the interpreter of an environment that has it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from adapter_folders import MakeAdapter
from test_engines import free_port

from loraforge.serving.client import Options, replay
from loraforge.serving.engines import Engine, EngineConfig
from loraforge.serving.metrics import failures, tpot_s, ttft_s
from loraforge.serving.workload import LoadSpec, make_workload

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed, and VLLM_PYTHON is not set"),
]
HIDDEN, HEADS, LAYERS = 256, 4, 2
# the engine as it comes, and little memory for its cache
ENVIRONMENT = {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
RATE, REQUESTS = 3.0, 90
TOLERANCE = 0.25  # of medians: two samples of arrivals on a busy machine, not two clocks


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


def both_clients(
    engine: Engine, base: Path, out: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Latencies in seconds of our client and of vLLM's own, at work at the same time so that they see the same engine:
    adapter a, 32 prompt and 32 output tokens, Poisson arrivals."""
    program = (
        "import sys; from vllm.benchmarks.serve import add_cli_args, main;"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser;"
        "parser = Parser(); add_cli_args(parser); main(parser.parse_args(sys.argv[1:]))"
    )
    arguments = {
        "backend": "openai",
        "base-url": engine.url,
        "model": "a",
        "tokenizer": base,
        "dataset-name": "random",
        "random-input-len": 32,
        "random-output-len": 32,
        "num-prompts": REQUESTS,
        "num-warmups": 3,
        "request-rate": RATE,
        "temperature": 0,
        "seed": 1,
        "result-dir": out.parent,
        "result-filename": out.name,
    }
    assert PYTHON is not None
    line = [PYTHON, "-c", program, "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
    for key, value in arguments.items():
        line += [f"--{key}", str(value)]
    with (
        open(out.with_suffix(".log"), "wb") as log,
        subprocess.Popen(
            line,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        assert process.stdout is not None
        said = next((text for text in process.stdout if "Starting main benchmark" in text), None)
        assert said is not None, out.with_suffix(".log").read_text()[-2000:]
        ours = our_client(engine)
        process.stdout.read()
    assert process.returncode == 0, out.with_suffix(".log").read_text()[-2000:]
    result = json.loads(out.read_text())
    assert result["completed"] == REQUESTS
    tpot = [sum(gaps) / (n - 1) for gaps, n in zip(result["itls"], result["output_lens"], strict=True)]
    return ours, {"ttft": result["ttfts"], "tpot": tpot}


def our_client(engine: Engine) -> dict[str, list[float]]:
    spec = LoadSpec.model_validate(
        {
            "fleets": {
                "fleet": {
                    "adapters": ["a"],
                    "vocabulary": {"high": 256, "tokens": {"kind": "fixed", "tokens": 32}},
                    "output_tokens": {"kind": "fixed", "tokens": 32},
                }
            },
            "popularity": {"kind": "even", "requests": REQUESTS},
        }
    )
    run = replay(make_workload(spec, 1, RATE), {"fleet": engine.url}, Options(timeout_s=60))
    assert failures(run.requests) == {}
    ttft = [value for row in run.requests if (value := ttft_s(row)) is not None]
    tpot = [value for row in run.requests if (value := tpot_s(row)) is not None]
    assert len(ttft) == len(tpot) == REQUESTS
    return {"ttft": ttft, "tpot": tpot}


def test_latencies_are_those_of_the_engines_own_client(engine: Engine, base: Path, tmp_path: Path) -> None:
    ours, theirs = both_clients(engine, base, tmp_path / "theirs.json")
    for key, values in ours.items():
        print(f"{key}: ours {median(values):.5f} s, theirs {median(theirs[key]):.5f} s")
        assert median(values) == pytest.approx(median(theirs[key]), rel=TOLERANCE), key
