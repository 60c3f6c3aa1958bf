"""What goes wrong with a real server, and that it goes on serving: damaged and foreign adapters, timeouts, a kill, and
thousands of requests over adapters that come and go."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import copy, deeper, half_a_pair, no_json, not_finite, repeated, sized, truncated
from live_server import LiveServer
from safetensors.torch import save_file
from smol_server import BASE, ENGINE_ARGUMENTS, ENVIRONMENT, FLEET, MODEL, NAMES, SLOTS, launcher, new_server
from soak import soak
from test_engines import free_port

from loraforge.errors import InputError
from loraforge.serving.client import Options, replay
from loraforge.serving.metrics import failures, over_seeds
from loraforge.serving.records import Run, read_run, write_run
from loraforge.serving.workload import make_workload

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(3600)]
WORD_LANG = FLEET / "word_lang"

# fault -> (what makes such an adapter in a folder, what the server answers)
FAULTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated": (partial(truncated, WORD_LANG), "not a whole safetensors file"),
    "configuration": (partial(no_json, WORD_LANG), "not valid JSON at line 1"),
    "not finite": (partial(copy, WORD_LANG, change=not_finite), "holds NaN or infinite values"),
    "no tensor": (partial(copy, WORD_LANG, change=lambda _: {}), "has no tensor of a LoRA layer"),
    "half a pair": (
        partial(copy, WORD_LANG, change=half_a_pair),
        r"layers\.2\.self_attn\.q_proj: has no lora_B",
    ),
    "narrower base model": (
        partial(copy, WORD_LANG, change=sized(512)),
        r"q_proj: maps 512 inputs to 512 outputs, the model's layer 576 to 576",
    ),
    "wider base model": (
        partial(copy, WORD_LANG, change=sized(1024)),
        r"q_proj: maps 1024 inputs to 1024 outputs, the model's layer 576 to 576",
    ),
    "deeper base model": (
        partial(copy, WORD_LANG, change=deeper),
        r"layers\.40\.self_attn\.[qv]_proj: the model has no such layer",
    ),
    "larger rank": (
        partial(copy, WORD_LANG, change=repeated),
        "has 256 directions, lora_B 256, the engine room for 128",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_adapter_is_refused_and_the_server_lives(
    smol_server: LiveServer, tmp_path: Path, fault: str
) -> None:
    make, says = FAULTS[fault]
    before = [smol_server.complete(name) for name in (MODEL, "word_lang")]
    answer = smol_server.load("bad", make(tmp_path / "bad"))
    assert answer.status == 500
    assert re.search(says, json.loads(answer.text)["error"]["message"])
    assert smol_server.post("/v1/completions", model="bad", prompt="x", max_tokens=1).status == 404
    # also what has nothing to do with it: values that are not finite spread through a shared cache
    assert [smol_server.complete(name) for name in (MODEL, "word_lang")] == before
    assert smol_server.load("bad", FLEET / "word_lang").status == 200  # the name is free
    assert smol_server.complete("bad") == before[1]
    assert smol_server.unload("bad").status == 200


def test_a_manifest_that_disagrees_is_refused_at_run_time(smol_server: LiveServer, tmp_path: Path) -> None:
    from loraforge.allocate.budget import parse_budget
    from loraforge.compress import compress

    compress([FLEET / "word_lang"], parse_budget("1/4"), tmp_path / "out", cache=None)
    good = tmp_path / "out" / "ragged" / "word_lang"
    assert smol_server.load("quarter", good).status == 200
    assert smol_server.complete("quarter")
    assert smol_server.unload("quarter").status == 200
    manifest = json.loads((good / "loraforge_manifest.json").read_text(encoding="utf-8"))
    module = next(iter(manifest["adapter"]["modules"].values()))
    module.update(k=1, compact_parameters=module["d_in"] + module["d_out"])
    (good / "loraforge_manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    answer = smol_server.load("wrong", good)
    assert answer.status == 500
    assert re.search(r"the manifest retains 1 directions, the tensors hold \d+", answer.text)
    assert smol_server.complete(MODEL)


def test_an_adapter_that_the_pool_cannot_hold_is_refused(smol_server: LiveServer, tmp_path: Path) -> None:
    """The server's pool has room for six of the largest adapter, and not for one of rank 128 in all modules as well."""
    smol = {"q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576)}
    smol |= {"gate_proj": (1536, 576), "up_proj": (1536, 576), "down_proj": (576, 1536)}
    tensors = {}
    for layer in range(30):
        for name, (d_out, d_in) in smol.items():
            part = "mlp" if "gate" in name or "up" in name or "down" in name else "self_attn"
            key = f"base_model.model.model.layers.{layer}.{part}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.ones(128, d_in, dtype=torch.bfloat16)
            tensors[f"{key}.lora_B.weight"] = torch.ones(d_out, 128, dtype=torch.bfloat16)
    shutil.copytree(FLEET / "word_lang", tmp_path / "large")
    save_file(tensors, tmp_path / "large" / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((FLEET / "word_lang" / "adapter_config.json").read_text(encoding="utf-8"))
    config |= {"r": 128, "target_modules": list(smol)}
    (tmp_path / "large" / "adapter_config.json").write_text(json.dumps(config))
    answer = smol_server.load("large", tmp_path / "large")
    assert answer.status == 500
    assert re.search(r"adapter \d+ needs \d+ bytes of the pool;", answer.text)
    assert "--max-loras" in answer.text
    assert smol_server.complete("word_lang")


def test_an_unknown_adapter_is_named(smol_server: LiveServer, make_load: Any) -> None:
    workload = make_workload(make_load("word_lang", "nobody", each=2, tokens=2), 1, 20.0)
    run = replay(workload, {"fleet": smol_server.engine.url}, Options(timeout_s=60))
    assert {row.adapter for row in run.requests if row.failure is None} == {"word_lang"}
    (reason,) = failures(run.requests)
    assert reason.startswith("HTTP 404: ")
    assert "nobody" in reason
    assert run.run.ended is None


def test_a_timeout_of_the_client_is_in_the_record(
    smol_server: LiveServer, make_load: Any, tmp_path: Path
) -> None:
    workload = make_workload(make_load("word_lang", each=3, tokens=100), 1, 20.0)
    run = replay(workload, {"fleet": smol_server.engine.url}, Options(timeout_s=0.2))
    assert failures(run.requests) == {"timeout after 0.2 s": 3}
    assert run.run.ended is None  # the server is well
    write_run(tmp_path / "run.jsonl", run)
    assert read_run(tmp_path / "run.jsonl") == run
    assert smol_server.complete("word_lang")


def test_unloading_waits_for_the_last_request_and_gives_the_room_back(smol_server: LiveServer) -> None:
    assert smol_server.load("leaving", FLEET / "udhr_lid").status == 200
    before = smol_server.counts()
    text: list[str] = []
    asking = threading.Thread(target=lambda: text.append(smol_server.complete("leaving", tokens=40)))
    asking.start()
    time.sleep(0.5)
    assert smol_server.unload("leaving").status == 200
    asking.join(timeout=5)  # it ended before the unloading did
    assert text
    assert text[0]
    after = smol_server.counts()
    assert after["adapters"] == before["adapters"] - 1
    assert after["live_bytes"] < before["live_bytes"]


def test_the_launcher_becomes_the_engine(smol_server: LiveServer) -> None:
    """The first line of the log is the process's own command line; its process is the one that was started."""
    import shlex

    first = smol_server.engine.log.read_text(encoding="utf-8").splitlines()[0]
    own = Path(f"/proc/{smol_server.engine.pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    assert shlex.split(first) == own
    assert own[own.index("--max-loras") + 1] == str(SLOTS)
    assert f"word_lang={FLEET / 'word_lang'}" in own
    assert smol_server.counts()["capacity_bytes"] == int(own[own.index("--loraforge-pool-bytes") + 1])


def test_a_port_in_use_is_said_before_anything_starts(smol_server: LiveServer) -> None:
    port = str(smol_server.engine.port)
    line = launcher(str(FLEET / "word_lang"), "--base", str(BASE), "--port", port)
    done = subprocess.run(
        line, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False
    )
    assert done.returncode == 2
    assert f"port {port} is in use" in done.stderr
    assert smol_server.complete(MODEL)


def test_thousands_of_requests_over_adapters_that_come_and_go(
    smol_server: LiveServer, tmp_path: Path
) -> None:
    soak(smol_server, tmp_path, [FLEET / name for name in NAMES])
    assert smol_server.complete("word_lang")


def _killed_run(server: LiveServer, make_load: Any, *, requests: int, rate: float, after_s: float) -> Run:
    workload = make_workload(make_load("word_lang", each=requests, tokens=60), 1, rate)
    assert server.engine.pid is not None
    killer = threading.Timer(after_s, os.killpg, (server.engine.pid, signal.SIGKILL))
    killer.start()
    run = replay(workload, {"fleet": server.engine.url}, Options(timeout_s=120))
    killer.join()
    return run


@pytest.mark.parametrize(
    ("rate", "after_s", "says"),
    [(2.0, 2.0, "nobody listens at"), (100.0, 1.5, "no engine answers at")],
    ids=["while requests are sent", "after the last"],
)
def test_a_server_killed_in_a_run_is_in_the_record(
    tmp_path: Path, make_load: Any, rate: float, after_s: float, says: str
) -> None:
    server = new_server(tmp_path, FLEET / "word_lang")
    server.engine.start()
    try:
        server.engine.wait_healthy()
        counts = server.counts()
        assert counts["live_bytes"] == counts["capacity_bytes"]  # the launcher foresaw it to the byte
        run = _killed_run(server, make_load, requests=10, rate=rate, after_s=after_s)
    finally:
        server.engine.stop()
    assert run.run.ended is not None
    assert run.run.ended.startswith(says)
    reasons = failures(run.requests)
    assert sum(reasons.values()) >= 1
    assert len(run.requests) == 10
    with pytest.raises(InputError, match=r"the run of seed 1 ended early"):
        over_seeds([run])


def test_options_that_mean_nothing_end_the_server_before_a_model_is_loaded() -> None:
    options = ("--additional-config", '{"loraforge_pool": 5}', *ENGINE_ARGUMENTS)
    done = subprocess.run(
        launcher(str(FLEET / "word_lang"), "--base", str(BASE), "--port", str(free_port()), "--", *options),
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "loraforge_pool: 5 in the engine's additional_config; give ragged or shadow" in said
    assert "EngineCore" not in said
