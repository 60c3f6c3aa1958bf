"""The real ``smol`` fleet on its real base model behind a real vLLM server, as ``loraforge serve vllm`` starts it.

Needs an environment with the engine and this package (its interpreter in VLLM_PYTHON, or the one that runs the tests)
and LORAFORGE_BASE, the folder that ``loraforge fleet base`` made.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from live_server import LiveServer
from test_engines import free_port

from loraforge.serving.engines import Engine

ROOT = Path(__file__).parents[2]
FLEET = ROOT / "config" / "fleets" / "smol"
BASE = Path(os.environ.get("LORAFORGE_BASE", "no base model given"))
PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
MODEL = (
    "SmolLM2-135M-Instruct"  # what the adapters call their base model, and so what is served under that name
)
NAMES = sorted(path.parent.name for path in FLEET.glob("*/adapter_config.json"))
SLOTS = 6
ENGINE_ARGUMENTS = (
    *("--dtype", "bfloat16", "--max-model-len", "256", "--max-num-seqs", "16"),
    *("--enforce-eager", "--no-enable-prefix-caching", "--max-cpu-loras", "12"),
)
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}


def launcher(*arguments: str) -> list[str]:
    """Command line of ``loraforge serve vllm`` in the engine's environment; skips where there is none."""
    if PYTHON is None:
        pytest.skip("vLLM is not installed, and VLLM_PYTHON is not set")
    if not (BASE / "config.json").is_file():
        pytest.skip("LORAFORGE_BASE names no base model")
    return [PYTHON, "-m", "loraforge", "serve", "vllm", *arguments]


def new_server(folder: Path, fleet: Path = FLEET, *options: str) -> LiveServer:
    """A server that is yet to be started; its log and its counters lie in ``folder``."""
    port, counters = free_port(), folder / "counters.json"
    line = launcher(str(fleet), "--base", str(BASE), "--port", str(port), *options, "--", *ENGINE_ARGUMENTS)
    environment = {**ENVIRONMENT, "LORAFORGE_COUNTERS": str(counters)}
    engine = Engine(line, port=port, log=folder / "engine.log", env=environment, start_s=300)
    return LiveServer(engine, counters, MODEL)
