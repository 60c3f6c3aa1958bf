"""What the plugin in an experiment's engine is told: arguments and environment, in each engine's own way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraforge.runtime import sglang, vllm
from loraforge.runtime.sglang import options as sglang_options
from loraforge.runtime.vllm import options as vllm_options
from loraforge.serving.arms import Arm
from loraforge.serving.experiment import Experiment
from loraforge.serving.points import EngineState


@dataclass(frozen=True)
class Told:
    """Further arguments of an engine, and its environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def tell(
    experiment: Experiment, arm: Arm, state: EngineState, hints: Mapping[str, int], trace: Path | None
) -> Told:
    """What the plugin is told in an arm. hints: typical retained ranks, for the choice of kernels. trace: file for what
    the scheduler admits, None for none."""
    return (_vllm if experiment.engine == "vllm" else _sglang)(experiment, arm, state, hints, trace)


def _vllm(
    experiment: Experiment, arm: Arm, state: EngineState, hints: Mapping[str, int], trace: Path | None
) -> Told:
    options: dict[str, Any] = {}
    if experiment.decode_steps:
        options["loraforge_decode_steps"] = experiment.decode_steps
    if trace is not None:
        options["loraforge_admission_trace"] = str(trace)
    scheduled = bool(options)
    if arm.execution == "loraforge":
        options |= {vllm_options.POOL: state.pool, vllm_options.RANKS: dict(hints)}
        if state.pool_bytes is not None:
            options[vllm_options.POOL_BYTES] = state.pool_bytes
    line = ("--additional-config", json.dumps(options, sort_keys=True)) if options else ()
    return Told(line, {vllm.SWITCH: _switch(arm, scheduled)})


def _sglang(
    experiment: Experiment, arm: Arm, state: EngineState, hints: Mapping[str, int], trace: Path | None
) -> Told:
    environment = {}
    if trace is not None:
        environment[sglang.TRACE] = str(trace)
    if "early" in experiment.contracts:
        environment[sglang.EARLY_STOP] = "1"
    environment[sglang.SWITCH] = _switch(arm, bool(environment))
    if arm.execution == "loraforge":
        environment |= {
            sglang_options.POOL: str(state.pool),
            sglang_options.RANKS: json.dumps(dict(hints), sort_keys=True),
        }
        if state.pool_bytes is not None:
            environment[sglang_options.POOL_BYTES] = str(state.pool_bytes)
    interval = ("--prefill-decode-interval", str(experiment.decode_steps))  # deferred admission is its own
    return Told(interval if experiment.decode_steps else (), environment)


def _switch(arm: Arm, scheduled: bool) -> str:
    """Whether LoRAForge executes, counts or traces, or is not there at all. scheduled: whether the plugin has to do
    with when requests come in."""
    if arm.execution == "loraforge":
        return "1"
    return "native" if arm.execution == "native" or scheduled else "0"
