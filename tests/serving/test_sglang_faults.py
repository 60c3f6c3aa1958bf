"""What goes wrong with a real SGLang server, and that it goes on serving: the faults of the test of vLLM, on one start.

A small model of random weights and its fleet, as ``loraforge serve sglang`` serves them; made for a GPU, and what is no
matter of one holds on a processor too, where the engine runs there. Tests are in their order: the last ends the server.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import SEVEN, write_adapter
from faulty import copy, deeper, half_a_pair, no_json, not_finite, repeated, sized, truncated
from live_server import SglangServer
from soak import soak
from test_engines import free_port

from loraforge.errors import InputError
from loraforge.serving.client import Options, replay
from loraforge.serving.engines import Engine
from loraforge.serving.launch import read_fleet
from loraforge.serving.metrics import failures, over_seeds
from loraforge.serving.shapes import write_base
from loraforge.serving.workload import make_workload

pytestmark = [
    pytest.mark.engines,
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

ROOT = Path(__file__).parents[2]
LAYERS, HIDDEN, HEADS, KV, HEAD, INNER = 4, 256, 4, 2, 64, 512
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
SHAPES = {  # (d_out, d_in)
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV * HEAD, HIDDEN),
    "self_attn.v_proj": (KV * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")
BASE = "tiny"
SLOTS, RANK, MOST = 4, 8, 16  # of the fleet; the largest that the server takes
ON_GPU = torch.cuda.is_available()
ARGUMENTS = (
    *("--dtype", "bfloat16", "--context-length", "512", "--max-running-requests", "16"),
    *("--max-total-tokens", "4096", "--disable-radix-cache", "--max-lora-rank", str(MOST)),
    *("--mem-fraction-static", "0.3", "--disable-prefill-cuda-graph", "--disable-decode-cuda-graph"),
    *("--prefill-decode-interval", "2"),
    *(
        ("--attention-backend", "triton")
        if ON_GPU
        else ("--device", "cpu", "--attention-backend", "torch_native")
    ),
    *("--sampling-backend", "pytorch"),
)
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    "HF_HUB_OFFLINE": "1",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
}


def adapter(folder: Path, **changed: Any) -> Path:
    """An adapter of all modules, weak enough for the model to go on."""
    options = {
        "r": RANK,
        "lora_alpha": RANK,
        "targets": SEVEN,
        "layers": range(LAYERS),
        "shapes": SHAPES,
        "base": BASE,
    }
    return write_adapter(folder, **{**options, "dtype": torch.bfloat16, **changed})


def launcher(fleet: Path, base: Path, port: int, *options: str) -> list[str]:
    """Command line of ``loraforge serve sglang``."""
    line = [sys.executable, "-m", "loraforge", "serve", "sglang", str(fleet), "--base", str(base)]
    return [*line, "--port", str(port), *options, "--", *ARGUMENTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base`` and ``fleet``."""
    root = tmp_path_factory.mktemp("sglang")
    write_base(MODEL, root / "base", "cpu", 0)
    for seed, name in enumerate(NAMES):
        adapter(root / "fleet" / name, seed=seed)
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[SglangServer]:
    """The one server of all tests here; each but the last leaves it as it was."""
    port, counters = free_port(), folder / "counters.json"
    largest = max(served.pool_bytes(torch.bfloat16) for served in read_fleet(folder / "fleet"))
    # one more adapter than slots of their own, for the base model's, which a batch of adapters alone takes too
    room = ("--slots", str(SLOTS), "--pool-bytes", str((SLOTS + 1) * largest))
    trace = {
        "LORAFORGE_COUNTERS": str(counters),
        "LORAFORGE_ADMISSION_TRACE": str(folder / "trace.jsonl"),
        "LORAFORGE_EARLY_STOP": "1",
    }
    line = launcher(folder / "fleet", folder / "base", port, *room)
    engine = Engine(line, port=port, log=folder / "engine.log", env={**ENVIRONMENT, **trace}, start_s=600)
    with engine:
        yield SglangServer(engine, counters, BASE, prompt="w5 w6 w7 w8")


# fault -> (what makes such an adapter of a good one, what the server answers)
FAULTS: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "truncated": (truncated, "not a whole safetensors file"),
    "configuration": (no_json, "not valid JSON at line 1"),
    "not finite": (partial(copy, change=not_finite), "holds NaN or infinite values"),
    "no tensor": (partial(copy, change=lambda _: {}), "has no tensor of a LoRA layer"),
    "half a pair": (partial(copy, change=half_a_pair), r"layers\.2\.self_attn\.q_proj: has no lora_B"),
    "narrower base model": (
        partial(copy, change=sized(128)),
        "maps 128 inputs to 128 outputs, the model's layer",
    ),
    "wider base model": (
        partial(copy, change=sized(1024)),
        "maps 1024 inputs to 1024 outputs, the model's layer",
    ),
    "deeper base model": (partial(copy, change=deeper), r"layers\.40\..*: the model has no such layer"),
    "larger rank": (partial(copy, change=repeated), "lora_A is .*128.* and the configuration gives rank 8"),
}


def says(server: SglangServer, path: Path, name: str = "bad") -> str:
    """What the server answers to an adapter that it refuses."""
    answer = server.load(name, path)
    assert answer.status == 400, answer.text
    told = json.loads(answer.text)
    assert told["success"] is False
    return str(told["error_message"])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_adapter_is_refused_and_sglang_lives(
    server: SglangServer, folder: Path, tmp_path: Path, fault: str
) -> None:
    make, wanted = FAULTS[fault]
    name = fault.replace(
        " ", "_"
    )  # a name of its own: the engine loads again what was unloaded and is asked for
    before = [server.complete(name) for name in (BASE, "a")]
    assert before[0] != before[1]
    assert re.search(wanted, says(server, make(folder / "fleet" / "a", tmp_path / "bad"), name))
    assert server.ask(name, 1).status == 400
    # also what has nothing to do with it: values that are not finite would spread through a shared cache
    assert [server.complete(name) for name in (BASE, "a")] == before
    assert server.load(name, folder / "fleet" / "a").status == 200  # the name is free
    assert server.complete(name) == before[1]
    assert server.unload(name).status == 200


def test_a_rank_above_the_servers_is_refused(server: SglangServer, tmp_path: Path) -> None:
    assert re.search("rank 32 is incompatible", says(server, adapter(tmp_path / "wide", r=2 * MOST)))
    assert server.complete("a")


def test_ranks_that_differ_within_a_fused_layer_are_served(server: SglangServer, tmp_path: Path) -> None:
    """What would end the engine's own server at the adapter's first use."""
    ranks = {"q_proj": 3, "v_proj": 5, "up_proj": 2}
    odd = adapter(
        tmp_path / "odd", r=RANK, targets=("q_proj", "v_proj", "up_proj"), rank_pattern=ranks, seed=3
    )
    assert server.load("odd", odd).status == 200
    assert server.complete("odd") != server.complete(BASE)
    assert server.unload("odd").status == 200


def test_a_manifest_that_disagrees_is_refused_by_sglang(
    server: SglangServer, folder: Path, tmp_path: Path
) -> None:
    from loraforge.allocate.budget import parse_budget
    from loraforge.compress import compress

    compress([folder / "fleet" / "a"], parse_budget("1/4"), tmp_path / "out", cache=None)
    good = tmp_path / "out" / "ragged" / "a"
    assert server.load("quarter", good).status == 200
    assert server.complete("quarter")
    assert server.unload("quarter").status == 200
    manifest = json.loads((good / "loraforge_manifest.json").read_text(encoding="utf-8"))
    modules = manifest["adapter"]["modules"].values()
    module = next(module for module in modules if module["k"] > 1)
    module.update(k=1, compact_parameters=module["d_in"] + module["d_out"])
    (good / "loraforge_manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert re.search(r"the manifest retains 1 directions, the tensors hold \d+", says(server, good))
    assert server.complete(BASE)


def test_an_adapter_that_sglangs_pool_cannot_hold_is_refused(server: SglangServer, tmp_path: Path) -> None:
    told = says(server, adapter(tmp_path / "large", r=MOST))
    assert re.search(r"needs \d+ bytes of the pool; with the largest others in \d+ slots", told)
    assert "--max-loras-per-batch" in told
    assert server.complete("a")


def test_an_adapter_that_sglang_does_not_know_is_named(server: SglangServer, make_load: Any) -> None:
    workload = make_workload(make_load("a", "nobody", each=2, tokens=2), 1, 20.0)
    run = replay(workload, {"fleet": server.engine.url}, Options(engine="sglang", timeout_s=60))
    assert {row.adapter for row in run.requests if row.failure is None} == {"a"}
    (reason,) = failures(run.requests)
    assert reason.startswith("HTTP 4")
    assert "nobody" in reason
    assert run.run.ended is None


@pytest.mark.parametrize("stop", ["exact", "exact-eos", "early"])
def test_answers_end_where_the_workload_says(
    server: SglangServer, folder: Path, make_load: Any, stop: Any
) -> None:
    """An early end needs the plugin: the engine alone would go on to the cap."""
    workload = make_workload(make_load("a", "b", None, each=3, tokens=5), 1, 50.0)
    options = Options(engine="sglang", stop=stop, timeout_s=60, caps={"fleet": 100})
    run = replay(workload, {"fleet": server.engine.url}, options)
    assert failures(run.requests) == {}
    assert {row.output_tokens for row in run.requests} == {5}
    assert {row.finish_reason for row in run.requests} == {"stop" if stop == "early" else "length"}


def test_the_trace_has_every_token(server: SglangServer, folder: Path, make_load: Any) -> None:
    def steps() -> list[dict[str, Any]]:
        lines = (folder / "trace.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    before = len(steps())
    workload = make_workload(make_load("a", "b", None, each=4, tokens=6), 2, 100.0)
    run = replay(workload, {"fleet": server.engine.url}, Options(engine="sglang", timeout_s=60))
    assert failures(run.requests) == {}
    new = steps()[before:]
    assert sum(step["prefill_tokens"] for step in new) == sum(len(one.prompt) for one in workload.requests)
    assert sum(step["prefill_requests"] for step in new) == len(workload.requests)
    decoded = sum(step["decode_tokens"] for step in new)
    answered = len(workload.requests) * 6
    # the first token of an answer is the prompt's; an engine ahead of its results decodes past an end
    assert answered - len(workload.requests) <= decoded <= answered + len(workload.requests)
    assert all(step["running"] <= step["unfinished"] for step in new)
    assert any(step["held"] for step in new)  # --prefill-decode-interval
    assert new == sorted(new, key=lambda step: (step["step"], step["time"]))


def test_a_timeout_of_the_client_is_in_the_record_of_sglang(server: SglangServer, make_load: Any) -> None:
    workload = make_workload(make_load("a", each=3, tokens=400), 1, 20.0)
    run = replay(workload, {"fleet": server.engine.url}, Options(engine="sglang", timeout_s=0.05))
    assert failures(run.requests) == {"timeout after 0.05 s": 3}
    assert run.run.ended is None  # the server is well
    assert server.complete("a")


def test_a_port_in_use_is_said_before_sglang_starts(server: SglangServer, folder: Path) -> None:
    line = launcher(folder / "fleet", folder / "base", server.engine.port)
    done = subprocess.run(
        line, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False, timeout=120
    )
    assert done.returncode == 2
    assert f"port {server.engine.port} is in use" in done.stderr


def test_options_that_mean_nothing_end_sglang_before_a_model_is_loaded(folder: Path) -> None:
    for said, changed in (
        ("LORAFORGE_POOL_BYTES: 'much'; give a number of bytes", {"LORAFORGE_POOL_BYTES": "much"}),
        ("LORAFORGE_SGLANG: 'on'; give 1, 0 or native", {"LORAFORGE_SGLANG": "on"}),
        ("LORAFORGE_ADMISSION_TRACE: no such folder", {"LORAFORGE_ADMISSION_TRACE": "/nowhere/trace"}),
    ):
        line = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder / "base")]
        line += ["--port", str(free_port()), "--lora-backend", "loraforge", *ARGUMENTS]
        done = subprocess.run(
            line,
            capture_output=True,
            text=True,
            env={**os.environ, **ENVIRONMENT, **changed},
            check=False,
            timeout=120,
        )
        assert done.returncode != 0
        assert said in done.stdout + done.stderr
        assert "Load weight" not in done.stdout + done.stderr


def test_sglang_says_that_the_plugin_is_active(server: SglangServer) -> None:
    log = server.engine.log.read_text(encoding="utf-8")
    assert re.search(
        r"LoRAForge \S+ is active in sglang 0\.5\.22: \d+ of \d+ LoRA layers from a ragged pool", log
    )
    counts = server.counts()
    assert (counts["execution"], counts["pool"]) == ("loraforge", "ragged")


def test_thousands_of_requests_to_sglang_over_adapters_that_come_and_go(
    server: SglangServer, folder: Path, tmp_path: Path
) -> None:
    soak(server, tmp_path, [folder / "fleet" / name for name in NAMES])
    assert server.complete("a")


def test_a_killed_sglang_is_in_the_record(server: SglangServer, make_load: Any) -> None:
    """The last: it leaves no server."""
    workload = make_workload(make_load("a", each=10, tokens=60), 1, 2.0)
    assert server.engine.pid is not None
    killer = threading.Timer(2.0, os.killpg, (server.engine.pid, signal.SIGKILL))
    killer.start()
    run = replay(workload, {"fleet": server.engine.url}, Options(engine="sglang", timeout_s=120))
    killer.join()
    assert run.run.ended is not None
    assert run.run.ended.startswith("nobody listens at")
    assert len(run.requests) == 10
    assert sum(failures(run.requests).values()) >= 1
    with pytest.raises(InputError, match="the run of seed 1 ended early"):
        over_seeds([run])
    time.sleep(0.1)
    assert server.engine.poll() is not None
