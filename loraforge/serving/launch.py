"""The command line that serves a fleet of adapters in vLLM: ranks, pool and hints, from headers and manifests alone."""

from __future__ import annotations

import heapq
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from loraforge.errors import InputError, UsageError
from loraforge.export.manifest import (
    ADAPTER_MANIFEST_FILE,
    MANIFEST_FILE,
    load_adapter_manifest,
    load_manifest,
)
from loraforge.fleet.peft_io import Adapter, find_adapters, open_fleet
from loraforge.runtime.packed import Layout
from loraforge.runtime.ranks import Projection
from loraforge.runtime.vllm.options import POOL, POOL_BYTES, RANKS
from loraforge.serving.engines import VLLM_SERVER, lora_module

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the only ones that vLLM takes as --max-lora-rank
# a projection that a checkpoint stores in parts and the engine runs as one
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_SLICES = {"qkv_proj": 3, "gate_up_proj": 2}
# engine arguments that contradict what is decided here -> what to do instead
_OURS = {
    "--model": "pass --base before the --",
    "--host": "pass it before the --",
    "--port": "pass it before the --",
    "--max-loras": "pass --slots before the --",
    "--loraforge-pool-bytes": "pass --pool-bytes before the --",
    "--lora-modules": "put the adapters into one folder",
    "--no-enable-lora": "serve the base model with the engine's own command",
}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Served:
    """One adapter that will be served. live: retained rank by module name."""

    adapter: Adapter
    live: Mapping[str, int]

    @property
    def rank(self) -> int:
        """The largest that its files state, padding included: what the engine's own loader needs room for."""
        stated: int = self.adapter.config["r"]
        return max(stated, *(module.rank for module in self.adapter.modules))

    def pool_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of its live directions in a ragged pool of ``dtype``, alignment included."""
        projections, ranks = [], {}
        for module in self.adapter.modules:
            # a checkpoint's own fused matrix lies in the pool once a slice, each with all of A
            slices = _SLICES.get(_suffix(module.name), 1)
            projections.append(Projection(module.name, module.d_in, (module.d_out, *(0,) * (slices - 1))))
            ranks[module.name] = [self.live[module.name]] * slices
        return Layout(projections, dtype).bytes(ranks)


@dataclass(frozen=True)
class Launch:
    """What a server is started with. slots: adapters of one batch. pool_bytes: None leaves it to the plugin. ranks:
    :func:`rank_hints`, None for an engine without the plugin, which gets none of its options."""

    base: str
    served_name: str
    host: str
    port: int
    slots: int
    max_rank: int
    pool_bytes: int | None
    ranks: Mapping[str, int] | None
    adapters: Mapping[str, Path]


def read_fleet(path: Path, layout: str | None = None) -> list[Served]:
    """The adapters of a compressed fleet (in ``layout``, by default ragged, or else padded), or of a folder of PEFT
    adapters, or the one adapter that ``path`` is.

    Raises InputError where there is none, one cannot be read, or they are of different base models.
    """
    live: dict[str, dict[str, int]] = {}
    path = path.parent if path.name == MANIFEST_FILE else path
    if (path / MANIFEST_FILE).is_file():
        manifest = load_manifest(path)
        layout = layout or min(manifest.fleet.layouts, key=("ragged", "padded").index)
        if layout not in manifest.fleet.layouts:
            raise InputError(
                f"has no layout {layout}", path=path, remedy="export it, or serve another layout"
            )
        folders = [path / layout / name for name in manifest.adapters]
        if not folders:
            raise InputError(
                "retains no adapter", path=path / MANIFEST_FILE, remedy="compress a fleet that has some"
            )
        for name, entry in manifest.adapters.items():
            live[name] = {key: module.k for key, module in entry.modules.items()}
    else:
        folders = find_adapters([path])
    return [Served(adapter, live.get(adapter.name) or _live(adapter)) for adapter in open_fleet(folders)]


def _live(adapter: Adapter) -> dict[str, int]:
    """Retained rank of each module: what the adapter's manifest says, where there is one, or else the rank it has."""
    if (adapter.path / ADAPTER_MANIFEST_FILE).is_file():
        modules = load_adapter_manifest(adapter.path).adapter.modules
        return {name: module.k for name, module in modules.items()}
    return {module.name: module.rank for module in adapter.modules}


def find_base(stated: str, asked: str | None) -> str:
    """The base model to serve: ``asked``, or else what the adapters state. A folder, or a name ``org/model`` of a hub,
    which the engine finds itself. Raises InputError where it can be neither."""
    base = asked or stated
    if not base:
        raise InputError("the adapters name no base model", key="--base", remedy="pass its folder or name")
    folder = Path(os.path.expanduser(base))  # leaves a ~user that there is not as it is
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError("is no model: it has no config.json", path=folder, key="--base")
        return str(folder.resolve())
    if _HUB_NAME.fullmatch(base):
        return base
    raise InputError(
        "base model not found: neither a folder nor a hub's org/model",
        path=base,
        key="--base",
        remedy="pass the folder that holds it",
    )


def launch(
    served: Sequence[Served],
    *,
    base: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    slots: int | None = None,
    pool_bytes: int | None = None,
    plugin: bool = True,
    extra: Sequence[str] = (),
    max_ranks: Sequence[int] | None = MAX_RANKS,
    pool: str | None = None,
) -> Launch:
    """Decide what a fleet is served with. slots: all adapters by default. pool_bytes: what they need by default.
    max_ranks: largest ranks that the engine can be told, None for any. pool: kind that the plugin is told to make where
    ``extra`` does not say.

    Raises InputError for a rank that the engine does not have or a base model that is not there, UsageError for a pool
    that is too small.
    """
    stated = served[0].adapter.base_model
    slots = len(served) if slots is None else slots
    needs = {item.adapter.name: item.pool_bytes(_dtype(extra)) for item in served}
    # a shadow pool has the engine's buffers besides, whose size the plugin knows
    options, others = _take_json("--additional-config", extra)
    flags = _split("--loraforge-pool", others)[1]
    shadow = (flags[-1] if flags else options.get(POOL, pool)) == "shadow"
    # as the plugin counts: any adapters may meet in one batch
    least = sum(heapq.nlargest(slots, needs.values()))
    if pool_bytes is not None and pool_bytes < least:
        raise UsageError(
            f"{pool_bytes} bytes cannot hold the {min(slots, len(served))} largest adapters, which need {least} "
            f"({max(needs, key=needs.__getitem__)} alone {max(needs.values())})",
            key="--pool-bytes",
            remedy="give the pool more bytes or fewer --slots",
        )
    return Launch(
        base=find_base(stated, base),
        served_name=stated or "base",
        host=host,
        port=port,
        slots=slots,
        max_rank=_max_rank(served, max_ranks),
        pool_bytes=least if pool_bytes is None and not shadow else pool_bytes,
        ranks=rank_hints(served) if plugin else None,
        adapters={item.adapter.name: item.adapter.path.resolve() for item in served},
    )


def rank_hints(served: Sequence[Served]) -> dict[str, int]:
    """Live rank by module suffix, as the engine names it, that a dispatch table is asked for: the mean over adapters
    and layers, rounded up; of a fused projection, over the largest of its parts."""
    ranks: dict[tuple[str, str, str], int] = {}
    for item in served:
        for name, rank in item.live.items():
            parent, _, suffix = name.rpartition(".")
            place = (item.adapter.name, parent, _FUSED.get(suffix, suffix))
            ranks[place] = max(rank, ranks.get(place, 0))
    by_suffix = defaultdict(list)
    for (_, _, suffix), rank in ranks.items():
        by_suffix[suffix].append(rank)
    return {suffix: ceil(fmean(found)) for suffix, found in sorted(by_suffix.items())}


def command(launch: Launch, python: str, extra: Sequence[str] = ()) -> list[str]:
    """The server's command line. extra: further arguments, last; additional_config in them is taken over ours.

    Raises UsageError for an argument that is decided here, or an additional_config that is no JSON object.
    """
    refuse_decided(extra, _OURS, "vllm")
    line = [python, "-m", VLLM_SERVER, "--model", launch.base, "--served-model-name", launch.served_name]
    line += ["--host", launch.host, "--port", str(launch.port)]
    line += ["--enable-lora", "--max-loras", str(launch.slots), "--max-lora-rank", str(launch.max_rank)]
    line += ["--max-cpu-loras", str(max(launch.slots, len(launch.adapters)))]
    if launch.ranks is not None:
        stated, extra = _take_json("--additional-config", extra)
        if POOL_BYTES in stated:
            raise UsageError("is decided by loraforge serve vllm", key=POOL_BYTES, remedy="pass --pool-bytes")
        hints = {RANKS: dict(launch.ranks), **stated}
        if launch.pool_bytes is not None:
            line += ["--loraforge-pool-bytes", str(launch.pool_bytes)]
        line += ["--additional-config", json.dumps(hints, sort_keys=True)]
    line += ["--lora-modules", *(lora_module(name, folder) for name, folder in launch.adapters.items())]
    return [*line, *extra]


def refuse_decided(
    extra: Sequence[str], decided: Mapping[str, str], engine: str, others: Sequence[str] | None = None
) -> None:
    """Raise UsageError for an argument that the launcher decides. decided: such arguments -> what to do instead.
    others: of an engine that takes the beginning of a name for it, names that begin one of these and mean another."""
    for argument in filter(_is_option, extra):
        given = _name(argument)
        meant = [name for name in decided if name == given]
        if not meant and others is not None and given not in others:
            meant = [name for name in decided if name.startswith(given)]
        if meant:
            raise UsageError(
                f"is decided by loraforge serve {engine}", key=meant[0], remedy=decided[meant[0]]
            )


def at_least(rank: int, known: Sequence[int]) -> int | None:
    """The least of the ascending ``known`` ranks at or above ``rank``; None where there is none."""
    return next((one for one in known if one >= rank), None)


def _max_rank(served: Sequence[Served], known: Sequence[int] | None) -> int:
    largest = max(served, key=lambda item: item.rank)
    if known is None:
        return largest.rank
    if (rank := at_least(largest.rank, known)) is not None:
        return rank
    raise InputError(
        f"rank {largest.rank} is more than the engine's largest, {known[-1]}",
        path=largest.adapter.path,
        remedy="compress the fleet, or leave this adapter out",
    )


def _dtype(extra: Sequence[str]) -> torch.dtype:
    """What the engine will hold adapters in: two bytes wide, unless it is told to compute in FP32."""
    asked = _split("--lora-dtype", extra)[1] or ["auto"]
    if asked[-1] == "auto":
        asked = _split("--dtype", extra)[1] or ["auto"]
    return torch.float32 if asked[-1] in ("float", "float32") else torch.bfloat16


def _take_json(name: str, extra: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The objects that ``extra`` gives for an argument, as one, and the other arguments."""
    others, values = _split(name, extra)
    found: dict[str, Any] = {}
    for text in values:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UsageError(f"is no JSON ({error})", key=name) from error
        if not isinstance(value, dict):
            raise UsageError("is no JSON object", key=name)
        found |= value
    return found, others


def _split(name: str, extra: Sequence[str]) -> tuple[list[str], list[str]]:
    """(other arguments, values of ``name``), which is written ``name value`` or ``name=value``."""
    others, values = [], []
    arguments = iter(extra)
    for argument in arguments:
        _, has_value, value = argument.partition("=")
        if _name(argument) == name:
            values.append(value if has_value else next(arguments, ""))
        else:
            others.append(argument)
    return others, values


def _is_option(argument: str) -> bool:
    return len(argument) > 2 and argument.startswith("--")


def _name(argument: str) -> str:
    """What an argument is called: the engine takes - and _ alike."""
    return argument.partition("=")[0].replace("_", "-")


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
