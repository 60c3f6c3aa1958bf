"""A fleet of an experiment as its engines are to serve it: adapter folders, slots, pool, and the engine's options."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from loraforge.errors import InputError, UsageError
from loraforge.files import read_json
from loraforge.runtime.counters import ENVIRONMENT
from loraforge.serving import residency
from loraforge.serving.arms import Arm, Weights
from loraforge.serving.engines import EngineConfig, LoraConfig
from loraforge.serving.experiment import Experiment, FleetConfig
from loraforge.serving.launch import MAX_RANKS, at_least, rank_hints, read_fleet
from loraforge.serving.plugins import tell
from loraforge.serving.points import EngineState
from loraforge.serving.workload import copy_of
from loraforge.threads import in_threads

T = TypeVar("T")
_DTYPE = torch.bfloat16  # engines serve in it


@dataclass(frozen=True)
class ServedWeights:
    """One set of weights of a fleet.

    live_bytes: what each adapter takes in a ragged pool. rank: the largest that a loader sees. shapes: (d_in, d_out) of
    every module that any adapter changes. targets: last parts of their names. hints: typical retained ranks, for the
    choice of kernels.
    """

    folders: Mapping[str, Path]
    hashes: Mapping[str, str]
    live_bytes: Mapping[str, int]
    rank: int
    shapes: tuple[residency.Shape, ...]
    targets: tuple[str, ...]
    hints: Mapping[str, int]

    def copied(self, copies: int) -> ServedWeights:
        """The same with so many names an adapter, each loaded on its own."""
        return replace(
            self,
            folders=_copies(self.folders, copies),
            hashes=_copies(self.hashes, copies),
            live_bytes=_copies(self.live_bytes, copies),
        )


def _copies(values: Mapping[str, T], copies: int) -> dict[str, T]:
    return {
        copy_of(name, number, copies): value for name, value in values.items() for number in range(copies)
    }


def open_weights(folder: Path, fleet: FleetConfig) -> ServedWeights:
    """Open and hash the adapters in ``folder``: PEFT folders, or a compressed fleet's of the declared layout.

    Raises InputError as :func:`~loraforge.serving.launch.read_fleet` does, and for a name that is not there.
    """
    served = {item.adapter.name: item for item in read_fleet(folder, fleet.layout)}
    if fleet.only is not None:
        if missing := [name for name in fleet.only if name not in served]:
            raise InputError(f"has no adapter {missing[0]!r}", path=folder, key="only")
        served = {name: served[name] for name in fleet.only}
    adapters = [item.adapter for item in served.values()]
    shapes = {module.name: (module.d_in, module.d_out) for adapter in adapters for module in adapter.modules}
    return ServedWeights(
        folders={adapter.name: adapter.path.resolve() for adapter in adapters},
        hashes=dict(zip(served, in_threads(lambda adapter: adapter.weights_sha256, adapters), strict=True)),
        live_bytes={name: item.pool_bytes(_DTYPE) for name, item in served.items()},
        rank=max(item.rank for item in served.values()),
        shapes=tuple(shapes.values()),
        targets=tuple(sorted({name.rpartition(".")[2] for name in shapes})),
        hints=rank_hints(list(served.values())),
    )


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
            raise InputError(
                "folder not found",
                path=base,
                key=f"fleets.{name}.base",
                remedy="put the base model there, or say with --root where relative paths start",
            )
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
    except KeyError as error:
        raise InputError(f"has no {error}", path=path, remedy="leave kv_tokens out") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise InputError(
            f"is of no dense model ({error})", path=path, remedy="leave kv_tokens out"
        ) from error


def state(experiment: Experiment, fleet: ServedFleet, arm: Arm) -> EngineState:
    """Slots, rank and pool of one fleet's engine in an arm. Raises BudgetError where no adapter fits."""
    if arm.weights is None:
        return EngineState(slots=None, max_rank=None)
    served, config = fleet.weights[arm.weights].copied(arm.copies), fleet.config
    rank = config.max_rank or _engine_rank(experiment, served.rank)
    base_slots = int(experiment.engine == "sglang")  # which gives the base model one
    wanted = len(served.folders) + base_slots
    budget = None if arm.full or config.budget_gib is None else int(config.budget_gib * residency.GIB)
    if arm.execution == "loraforge" and experiment.pool == "ragged":
        needs = list(served.live_bytes.values())
        fits = len(needs) if budget is None else residency.ragged_slots(budget, needs)
        return EngineState(
            # where not all adapters fit, a batch of adapters alone takes the base model's slot too
            slots=fits + (base_slots if fits == len(needs) else 0),
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


def _engine_rank(experiment: Experiment, largest: int) -> int:
    """The least rank to start an engine for that adapters of up to ``largest`` load: vLLM takes few.

    Raises InputError where it takes none as large.
    """
    if experiment.engine == "sglang":
        return largest
    if (rank := at_least(largest, MAX_RANKS)) is not None:
        return rank
    raise InputError(
        f"rank {largest} is more than the engine's largest, {MAX_RANKS[-1]}", remedy="leave that adapter out"
    )


def engine_config(
    experiment: Experiment,
    fleet: ServedFleet,
    arm: Arm,
    state: EngineState,
    root: Path,
    counters: Path,
    trace: Path | None = None,
    port_offset: int = 0,
) -> EngineConfig:
    """One fleet's engine in an arm. counters, trace: files that the plugin writes. port_offset: what tells its port
    from those of engines beside it."""
    config, vllm = fleet.config, experiment.engine == "vllm"
    lora, hints = None, {}
    if arm.weights is not None and arm.execution is not None:
        served = fleet.weights[arm.weights].copied(arm.copies)
        hints = dict(served.hints)
        assert state.slots is not None
        assert state.max_rank is not None
        lora = LoraConfig(
            adapters=dict(served.folders),
            slots=state.slots,
            max_rank=state.max_rank,
            targets=served.targets,
            backend=None if vllm else experiment.lora_backends[arm.execution],
        )
    told = tell(experiment, arm, state, hints, None if trace is None else trace.resolve())
    return EngineConfig(
        engine=experiment.engine,
        model=str(fleet.base),
        python=interpreter(experiment, root),
        port=config.port + port_offset,
        context=config.context,
        running=config.running,
        kv_tokens=config.kv_tokens,
        kv_block=config.kv_block,
        kv_bytes=config.kv_tokens * kv_token_bytes(fleet.base) if vllm and config.kv_tokens else None,
        lora=lora,
        extra=(*experiment.extra, *config.extra, *told.arguments),
        env={**experiment.env, **config.env, ENVIRONMENT: str(counters.resolve()), **told.environment},
    )


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
        reason = {
            subprocess.CalledProcessError: "it does not run Python code",
            subprocess.TimeoutExpired: "it does not end",
        }.get(type(error), str(error))
        raise UsageError(
            f"cannot be run ({reason})", path=python, key="python", remedy="name the engine's interpreter"
        ) from error
    if not (found := done.stdout.strip()):
        raise UsageError(f"has no {' or '.join(names)}", path=python, key="python", remedy="install it there")
    return found
