"""A fleet of an experiment as its engines are to serve it: adapter folders, slots, pool, and the engine's options."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from loraforge.errors import InputError, UsageError
from loraforge.export.manifest import (
    ADAPTER_MANIFEST_FILE,
    MANIFEST_FILE,
    load_adapter_manifest,
    load_manifest,
)
from loraforge.files import read_json
from loraforge.fleet.peft_io import Adapter, open_fleet
from loraforge.serving import residency
from loraforge.serving.arms import Arm, Weights
from loraforge.serving.counters import ENVIRONMENT
from loraforge.serving.engines import EngineConfig, LoraConfig
from loraforge.serving.experiment import Experiment, FleetConfig
from loraforge.serving.points import EngineState
from loraforge.threads import in_threads

SWITCH = "LORAFORGE_VLLM"  # 1: LoRAForge executes; native: it counts alone; 0: it does nothing
_DTYPE = torch.bfloat16  # engines serve in it
# the names under which engines fuse modules
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


@dataclass(frozen=True)
class ServedWeights:
    """One set of weights of a fleet.

    live_bytes: what each adapter takes in a ragged pool. rank: the largest that a loader sees. shapes: (d_in, d_out) of
    every module that any adapter changes. typical: median retained rank by the engine's name of a projection.
    """

    folders: Mapping[str, Path]
    hashes: Mapping[str, str]
    live_bytes: Mapping[str, int]
    rank: int
    shapes: tuple[residency.Shape, ...]
    targets: tuple[str, ...]
    typical: Mapping[str, int]


def open_weights(folder: Path, fleet: FleetConfig) -> ServedWeights:
    """Open and hash the adapters in ``folder``: PEFT folders, or a compressed fleet's of the declared layout.

    Raises InputError as :func:`~loraforge.fleet.peft_io.open_adapter` does, and for a name that is not there.
    """
    compressed = (folder / MANIFEST_FILE).is_file()
    if compressed and fleet.layout not in load_manifest(folder).fleet.layouts:
        raise InputError(
            f"has no layout {fleet.layout}", path=folder, remedy="export it, or serve another layout"
        )
    adapters = open_fleet([folder / fleet.layout if compressed else folder])
    if fleet.only is not None:
        known = {adapter.name: adapter for adapter in adapters}
        if missing := [name for name in fleet.only if name not in known]:
            raise InputError(f"has no adapter {missing[0]!r}", path=folder, key="only")
        adapters = [known[name] for name in fleet.only]
    hashes = list(in_threads(lambda adapter: adapter.weights_sha256, adapters))
    live = [_retained(adapter) for adapter in adapters]
    shapes = {module.name: (module.d_in, module.d_out) for adapter in adapters for module in adapter.modules}
    ranks: dict[str, list[int]] = {}
    for adapter, retained in zip(adapters, live, strict=True):
        for module, rank in zip(adapter.modules, retained, strict=True):
            tail = module.name.rpartition(".")[2]
            ranks.setdefault(_FUSED.get(tail, tail), []).append(rank)
    return ServedWeights(
        folders={adapter.name: adapter.path.resolve() for adapter in adapters},
        hashes={adapter.name: sha256 for adapter, sha256 in zip(adapters, hashes, strict=True)},
        live_bytes={
            adapter.name: residency.ragged_bytes(adapter.modules, retained, _DTYPE)
            for adapter, retained in zip(adapters, live, strict=True)
        },
        rank=max(module.rank for adapter in adapters for module in adapter.modules),
        shapes=tuple(shapes.values()),
        targets=tuple(sorted({name.rpartition(".")[2] for name in shapes})),
        typical={name: round(median(found)) for name, found in sorted(ranks.items())},
    )


def _retained(adapter: Adapter) -> list[int]:
    """Retained rank of each module: the manifest's, or without one the nominal."""
    if not (adapter.path / ADAPTER_MANIFEST_FILE).is_file():
        return [module.rank for module in adapter.modules]
    modules = load_adapter_manifest(adapter.path).adapter.modules
    if missing := [module.name for module in adapter.modules if module.name not in modules]:
        raise InputError("is not in the manifest", path=adapter.path / ADAPTER_MANIFEST_FILE, key=missing[0])
    return [modules[module.name].k for module in adapter.modules]


@dataclass(frozen=True)
class ServedFleet:
    """A fleet with all the weights that the arms of an experiment serve."""

    name: str
    config: FleetConfig
    base: Path
    weights: Mapping[Weights, ServedWeights]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names, the same for all weights."""
        return tuple(next(iter(self.weights.values())).folders)


def open_fleets(experiment: Experiment, root: Path) -> dict[str, ServedFleet]:
    """Open what the arms of an experiment serve. Raises InputError where two weights name other adapters."""
    used = {arm.weights for name in experiment.arms if (arm := Arm.parse(name)).weights is not None}
    fleets = {}
    for name, config in experiment.fleets.items():
        if not (base := root / config.base).is_dir():
            raise InputError("folder not found", path=base, key=f"fleets.{name}.base")
        # base_only alone still asks for the adapters' prompts
        kinds = [kind for kind in config.adapters if kind in used] or list(config.adapters)[:1]
        weights = {kind: open_weights(root / config.adapters[kind], config) for kind in kinds}
        first = weights[kinds[0]].folders
        for kind in kinds[1:]:
            if odd := sorted(first.keys() ^ weights[kind].folders.keys()):
                raise InputError(
                    f"adapter {odd[0]!r} is not in both {kinds[0]} and {kind} weights",
                    path=root / config.adapters[kind],
                    key=f"fleets.{name}.adapters",
                )
        fleets[name] = ServedFleet(name, config, base.resolve(), weights)
    return fleets


def kv_token_bytes(base: Path, width: int = 2) -> int:
    """Bytes of keys and values of one token, from the ``config.json`` of a dense model. Raises InputError."""
    path = base / "config.json"
    config = read_json(path)
    try:
        heads = int(config["num_attention_heads"])
        head = int(config.get("head_dim") or config["hidden_size"] // heads)
        return 2 * width * int(config["num_hidden_layers"]) * int(config["num_key_value_heads"]) * head
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"has no {error}", path=path, remedy="leave kv_tokens out") from error


def state(experiment: Experiment, fleet: ServedFleet, arm: Arm) -> EngineState:
    """Slots, rank and pool of one fleet's engine in an arm. Raises BudgetError where no adapter fits."""
    if arm.weights is None:
        return EngineState(slots=None, max_rank=None)
    served, config = fleet.weights[arm.weights], fleet.config
    rank = config.max_rank or residency.engine_rank(experiment.engine, served.rank)
    base_slots = int(experiment.engine == "sglang")  # which gives the base model one
    wanted = len(served.folders) + base_slots
    budget = None if arm.full or config.budget_gib is None else int(config.budget_gib * residency.GIB)
    if arm.execution == "loraforge" and experiment.pool == "ragged":
        needs = list(served.live_bytes.values())
        fits = len(needs) if budget is None else residency.ragged_slots(budget, needs)
        return EngineState(
            slots=fits + base_slots,
            max_rank=rank,
            pool="ragged",
            pool_bytes=residency.ragged_pool_bytes(budget, fits, needs),
        )
    shadow = arm.execution == "loraforge"
    slot_bytes = (residency.shadow_slot_bytes if shadow else residency.native_slot_bytes)(served.shapes, rank)
    return EngineState(
        slots=wanted if budget is None else residency.uniform_slots(budget, slot_bytes, wanted),
        max_rank=rank,
        pool="shadow" if shadow else "native",
    )


def engine_config(
    experiment: Experiment, fleet: ServedFleet, arm: Arm, state: EngineState, root: Path, counters: Path
) -> EngineConfig:
    """One fleet's engine in an arm. counters: file that the plugin writes."""
    config, vllm = fleet.config, experiment.engine == "vllm"
    env = {**experiment.env, **config.env, ENVIRONMENT: str(counters.resolve())}
    extra = [*experiment.extra, *config.extra]
    lora = None
    if arm.weights is not None and arm.execution is not None:
        served = fleet.weights[arm.weights]
        assert state.slots is not None
        assert state.max_rank is not None
        lora = LoraConfig(
            adapters=dict(served.folders),
            slots=state.slots,
            max_rank=state.max_rank,
            targets=served.targets,
            backend=None if vllm else experiment.lora_backends[arm.execution],
        )
    if vllm:
        counts_only = arm.execution == "native" or experiment.decode_steps > 0
        env[SWITCH] = "1" if arm.execution == "loraforge" else "native" if counts_only else "0"
        if options := _options(experiment, fleet, arm, state):
            extra += ["--additional-config", json.dumps(options, sort_keys=True)]
    return EngineConfig(
        engine=experiment.engine,
        model=str(fleet.base),
        python=interpreter(experiment, root),
        port=config.port,
        context=config.context,
        running=config.running,
        kv_tokens=config.kv_tokens,
        kv_bytes=config.kv_tokens * kv_token_bytes(fleet.base) if vllm and config.kv_tokens else None,
        lora=lora,
        extra=tuple(extra),
        env=env,
    )


def _options(experiment: Experiment, fleet: ServedFleet, arm: Arm, state: EngineState) -> dict[str, Any]:
    """What the plugin for vLLM reads of the engine's ``additional_config``."""
    options: dict[str, Any] = {}
    if experiment.decode_steps:
        options["loraforge_decode_steps"] = experiment.decode_steps
    if arm.execution == "loraforge" and arm.weights is not None:
        options["loraforge_pool"] = state.pool
        options["loraforge_ranks"] = dict(fleet.weights[arm.weights].typical)
        if state.pool_bytes is not None:
            options["loraforge_pool_bytes"] = state.pool_bytes
    return options


def interpreter(experiment: Experiment, root: Path) -> Path:
    """The interpreter that has the engine; not resolved, since an environment's is a link."""
    return Path(sys.executable) if experiment.python is None else (root / experiment.python).absolute()


_FIND = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        print(name, importlib.metadata.version(name))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""


def engine_version(python: Path, names: Sequence[str]) -> str:
    """The first of these distributions that an interpreter has, with its version.

    Raises UsageError where the interpreter cannot be run, or has none of them.
    """
    try:
        done = subprocess.run(
            [python, "-c", _FIND, *names], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"cannot be run ({error})", path=python, key="python", remedy="name the engine's interpreter"
        ) from error
    if not (found := done.stdout.strip()):
        raise UsageError(f"has no {' or '.join(names)}", path=python, key="python", remedy="install it there")
    return found
