"""The backend in the engine's own LoRA manager and layers on a CPU, against FP64 sums of the adapters' files.

Needs SGLang's Python code, no GPU: layers have zero weights, so that what comes out of them is the adapters' part.
Tolerance: 1/64 of the largest sum, four BF16 roundings (scaled B, and the sum).
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import SEVEN, write_adapter
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

TOLERANCE = 1 / 64
Scale = Callable[[str], float]


def _fleet(root: Path) -> dict[str, tuple[Path, Scale]]:
    """Adapters that the engine alone cannot load or gets wrong, and one that it can, each with its scales."""
    import sglang_model as model

    def write(name: str, **options: Any) -> Path:
        return write_adapter(
            root / name, **{"targets": SEVEN, "shapes": model.SHAPES, "dtype": torch.bfloat16, **options}
        )

    mixed = write(
        "mixed", r=4, seed=1, rank_pattern={"q_proj": 7, "up_proj": 2}, alpha_pattern={"v_proj": 32}
    )
    ranks, alphas = {"q_proj": 7, "up_proj": 2}, {"v_proj": 32}
    return {
        "plain": (write("plain", r=8, lora_alpha=16), lambda _: 2.0),
        "mixed": (mixed, lambda leaf: alphas.get(leaf, 8) / ranks.get(leaf, 4)),
        "rooted": (write("rooted", r=3, seed=2, use_rslora=True), lambda _: 8 / math.sqrt(3)),
        "v_alone": (write("v_alone", r=2, seed=3, targets=["v_proj", "up_proj"]), lambda _: 4.0),
        "one_layer": (write("one_layer", r=5, seed=4, layers=[1]), lambda _: 8 / 5),
    }


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    from loraforge.runtime import sglang

    sglang.register()
    import sglang_model as model

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in model.REPLACED:  # put back at the end
            patch.setattr(owner, name, getattr(owner, name))
        model.start(0, 1, _free_port())
        yield model


@pytest.fixture(scope="module")
def fleet(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Scale]]:
    return _fleet(tmp_path_factory.mktemp("fleet"))


def _folders(fleet: dict[str, tuple[Path, Scale]]) -> dict[str, Path]:
    return {name: folder for name, (folder, _) in fleet.items()}


def test_a_layer_whose_factors_attention_reads_itself_stays_the_engines(
    engine: Any, fleet: dict[str, tuple[Path, Scale]]
) -> None:
    from loraforge.runtime.sglang.projections import _describe

    model = engine.Model()
    engine.manager(model, _folders(fleet), slots=6)
    layer = model.layer(0, "self_attn.o_proj")
    assert _describe("model.layers.0.self_attn.o_proj", layer, model, "o_proj") is not None
    assert _describe("model.layers.0.self_attn.kv_b_proj", layer, model, "kv_b_proj") is None


def _step(manager: Any, adapters: Sequence[str | None], lengths: Sequence[int]) -> None:
    import sglang_model as model

    manager.fetch_new_loras(set(adapters))
    manager.prepare_lora_batch(model.batch(adapters, lengths))


def _wanted(folder: Path, scale: Scale, layer: int, name: str, x: Tensor) -> Tensor:
    """FP64 [T, channels]: what an adapter adds for ``x``."""
    import sglang_model as model

    tensors = load_file(folder / "adapter_model.safetensors")
    parts = []
    for part in model.PARTS[name]:
        key = f"base_model.model.model.layers.{layer}.{part}.lora_"
        if f"{key}A.weight" not in tensors:
            parts.append(torch.zeros(len(x), model.SHAPES[part][0], dtype=torch.float64))
            continue
        a, b = (tensors[f"{key}{side}.weight"].double() for side in "AB")
        parts.append(scale(part.rpartition(".")[2]) * (x.double() @ a.T) @ b.T)
    return torch.cat(parts, 1)


def _check(
    served: Any,
    fleet: dict[str, tuple[Path, Scale]],
    adapters: Sequence[str | None],
    lengths: Sequence[int],
) -> None:
    """Every layer of the model in one forward pass over a batch."""
    import sglang_model as model

    generator = torch.Generator().manual_seed(sum(lengths))
    for layer in range(model.LAYERS):
        for name in model.PARTS:
            width = model.SHAPES[model.PARTS[name][0]][1]
            x = torch.randn(sum(lengths), width, generator=generator).to(model.DTYPE)
            y, _ = served.layer(layer, name)(x)
            first = 0
            for adapter, length in zip(adapters, lengths, strict=True):
                rows = slice(first, first + length)
                first += length
                if adapter is None:
                    assert not y[rows].any()
                    continue
                wanted = _wanted(*fleet[adapter], layer, name, x[rows])
                assert (y[rows].double() - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), (
                    adapter,
                    layer,
                    name,
                )


MIXED = ["mixed", None, "v_alone", "rooted", "mixed", "plain", "one_layer"]
LENGTHS = [3, 2, 17, 1, 4, 9, 5]


@pytest.mark.parametrize("pool", ["ragged", "shadow"])
def test_a_mixed_batch_gives_each_token_its_adapter(
    engine: Any, fleet: dict[str, Any], pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAFORGE_POOL", pool)
    served = engine.Model()
    manager = engine.manager(served, _folders(fleet), slots=6)
    _step(manager, MIXED, LENGTHS)
    _check(served, fleet, MIXED, LENGTHS)
    _check(
        served, fleet, MIXED, LENGTHS
    )  # a second forward pass over the same batch, as in warming up and capturing


def test_the_engine_keeps_no_buffers(engine: Any, fleet: dict[str, Any]) -> None:
    from loraforge.runtime.sglang.counted import native_bytes

    manager = engine.manager(engine.Model(), _folders(fleet), slots=6)
    assert native_bytes(manager.memory_pool) == 0
    _step(manager, ["v_alone"], [1])
    module = engine.SHAPES["self_attn.v_proj"], engine.SHAPES["mlp.up_proj"]
    live = sum(2 * (rows + columns) for rows, columns in module) * engine.LAYERS * 2
    assert manager.memory_pool.pool.counters.source_bytes == live


def test_the_engine_itself_serves_adapters_that_lack_parts_of_attention(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As arms of native execution do: the engine alone fails at the one without v_proj, and ends at the other."""
    from sglang.srt.lora import lora_manager

    from loraforge.runtime.sglang.completed import CompletedAdapter
    from loraforge.runtime.sglang.counted import NativeMemoryPool

    monkeypatch.setattr(lora_manager, "LoRAAdapter", CompletedAdapter)
    monkeypatch.setattr(lora_manager, "LoRAMemoryPool", NativeMemoryPool)
    fleet: dict[str, tuple[Path, Scale]] = {}
    for name, absent in (("no_q", {"q_proj", "k_proj"}), ("no_v", {"v_proj"}), ("whole", set())):
        folder = write_adapter(
            tmp_path / name,
            r=4,
            seed=len(fleet),
            targets=[target for target in SEVEN if target not in absent],
            shapes=engine.SHAPES,
            dtype=torch.bfloat16,
        )
        fleet[name] = folder, lambda _: 2.0
    served = engine.Model()
    manager = engine.manager(served, _folders(fleet), backend="torch_native")
    names = ["no_q", None, "whole", "no_v"]
    _step(manager, names, LENGTHS[:4])
    _check(served, fleet, names, LENGTHS[:4])


def test_eviction_and_return(
    engine: Any, fleet: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAFORGE_COUNTERS", str(tmp_path / "counters.json"))
    served = engine.Model()
    manager = engine.manager(served, _folders(fleet), slots=2)
    order = ["plain", "mixed", "rooted", "plain", "one_layer", "v_alone", "mixed"]
    for name in order:
        _step(manager, [name], [5])
        _check(served, fleet, [name], [5])
    _step(manager, [None], [3])
    _check(served, fleet, [None], [3])
    told = json.loads((tmp_path / "counters.json").read_text())
    assert told["execution"] == "loraforge"
    assert told["loads"] == len(order)
    assert told["loads"] - told["unloads"] == told["adapters"] == 1
    assert told["live_bytes"] == manager.memory_pool.pool.live_bytes > 0


def test_a_pinned_adapter_stays(engine: Any, fleet: dict[str, Any]) -> None:
    served = engine.Model()
    manager = engine.manager(served, {}, slots=3, rank=8)
    for name, folder in _folders(fleet).items():
        assert manager.load_lora_adapter(engine.ref(name, folder, pinned=name == "mixed")).success
    for name in ("mixed", "plain", "rooted", "v_alone"):
        _step(manager, [name], [2])
    loads = manager.memory_pool.pool.counters.loads
    _step(manager, ["mixed", "v_alone"], [2, 3])
    assert manager.memory_pool.pool.counters.loads == loads
    _check(served, fleet, ["mixed", "v_alone"], [2, 3])


def test_unloading_frees_the_pool(engine: Any, fleet: dict[str, Any]) -> None:
    manager = engine.manager(engine.Model(), _folders(fleet), slots=4)
    _step(manager, ["plain"], [2])
    assert manager.memory_pool.pool.live_bytes > 0
    assert manager.unload_lora_adapter(engine.ref("plain", fleet["plain"][0])).success
    assert manager.memory_pool.pool.live_bytes == 0


def test_a_longer_step_than_the_engine_announced(engine: Any, fleet: dict[str, Any]) -> None:
    served = engine.Model()
    manager = engine.manager(served, _folders(fleet), slots=6)
    usual = manager.lora_backend._usual.tokens
    for lengths in ([usual, 40], [3, 4], [usual, 90]):
        _step(manager, ["mixed", "plain"], lengths)
        _check(served, fleet, ["mixed", "plain"], lengths)


def test_an_adapter_from_tensors(engine: Any, fleet: dict[str, Any]) -> None:
    served = engine.Model()
    manager = engine.manager(served, {}, rank=8)
    folder, _ = fleet["mixed"]
    answer = manager.load_lora_adapter_from_tensors(
        engine.ref("mixed", Path("memory")),
        load_file(folder / "adapter_model.safetensors"),
        json.loads((folder / "adapter_config.json").read_text()),
    )
    assert answer.success, answer.error_message
    _step(manager, ["mixed"], [4])
    _check(served, fleet, ["mixed"], [4])


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{Q}B.weight"), r"q_proj: has no lora_B"),
        (lambda t: t[f"{Q}A.weight"].fill_(math.nan), r"q_proj.*holds NaN or infinite values"),
        (lambda t: t.update({f"{Q}A.weight": torch.ones(4, 96)}), r"q_proj: maps 96 inputs .* layer 64"),
        (lambda t: t.update({f"{Q}A.weight": torch.ones(3, 64)}), r"q_proj: lora_A is \[3, 64\].* rank 4"),
        (lambda t: t.update({Q.replace(".1.", ".9.") + "A.weight": torch.ones(4, 64)}), r"no such layer"),
        (
            lambda t: t.update({Q.replace("self_attn.q_proj", "mlp.router") + "A.weight": torch.ones(4, 64)}),
            r"router.*no module that is served",
        ),
        (lambda t: t.update({f"{Q}magnitude": torch.ones(4)}), r"magnitude: is no LoRA factor"),
    ],
    ids=["half", "nan", "shape", "rank", "layer", "module", "tensor"],
)
def test_what_cannot_be_served_is_refused_when_it_is_loaded(
    engine: Any,
    fleet: dict[str, Any],
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], None],
    says: str,
) -> None:
    bad = write_adapter(tmp_path / "bad", targets=SEVEN, shapes=engine.SHAPES)
    _rewrite(bad, change)
    served = engine.Model()
    manager = engine.manager(served, {}, rank=8)
    answer = manager.load_lora_adapter(engine.ref("bad", bad))
    assert not answer.success
    assert answer.error_message.count("\n") == 0
    assert re.search(says, answer.error_message), answer.error_message
    assert manager.load_lora_adapter(engine.ref("plain", fleet["plain"][0])).success
    _step(manager, ["plain"], [3])
    _check(served, fleet, ["plain"], [3])


def test_a_rank_above_the_servers_is_refused(engine: Any, tmp_path: Path) -> None:
    high = write_adapter(
        tmp_path / "high", targets=SEVEN, shapes=engine.SHAPES, rank_pattern={"layers.1.mlp.up_proj": 12}
    )
    manager = engine.manager(engine.Model(), {}, rank=8)
    answer = manager.load_lora_adapter(engine.ref("high", high))
    assert not answer.success
    assert "rank 12" in answer.error_message


def test_a_full_pool_refuses_what_no_batch_could_hold(
    engine: Any, fleet: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAFORGE_POOL_BYTES", "20000")
    manager = engine.manager(engine.Model(), {}, rank=8)
    assert manager.load_lora_adapter(engine.ref("v_alone", fleet["v_alone"][0])).success
    answer = manager.load_lora_adapter(engine.ref("plain", fleet["plain"][0]))
    assert not answer.success
    assert "LORAFORGE_POOL_BYTES" in answer.error_message


def test_two_processes_share_the_layers(engine: Any, tmp_path: Path) -> None:
    port = str(_free_port())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), port, str(tmp_path)],
            env=environment | {"RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            output, _ = worker.communicate(timeout=240)
            assert worker.returncode == 0, output[-3000:]
    finally:
        for worker in workers:
            worker.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _share(rank: int, port: int, root: Path) -> None:
    """One of two processes: the parts of all layers that it has, against the whole."""
    from loraforge.runtime import sglang

    sglang.register()
    import sglang_model as model

    model.start(rank, 2, port)
    fleet = _fleet(root / str(rank))
    served = model.Model()
    manager = model.manager(served, _folders(fleet), slots=6)
    _step(manager, MIXED, LENGTHS)
    generator = torch.Generator().manual_seed(5)
    for layer in range(model.LAYERS):
        for name, parts in model.PARTS.items():
            width = model.SHAPES[parts[0]][1]
            x = torch.randn(sum(LENGTHS), width, generator=generator).to(model.DTYPE)
            whole = name in ("self_attn.o_proj", "mlp.down_proj")
            mine = x.chunk(2, 1)[rank].contiguous() if whole else x
            y, _ = served.layer(layer, name)(mine)
            first = 0
            for adapter, length in zip(MIXED, LENGTHS, strict=True):
                rows = slice(first, first + length)
                first += length
                if adapter is None:
                    assert not y[rows].any()
                    continue
                wanted = _wanted(*fleet[adapter], layer, name, x[rows])
                if not whole:
                    sizes = [model.SHAPES[part][0] for part in parts]
                    wanted = torch.cat([part.chunk(2, 1)[rank] for part in wanted.split(sizes, 1)], 1)
                error = (y[rows].double() - wanted).abs().max()
                assert error <= TOLERANCE * wanted.abs().max(), (adapter, layer, name)


if __name__ == "__main__":
    _share(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
