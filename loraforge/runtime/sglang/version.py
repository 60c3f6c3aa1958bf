"""Which SGLang is installed, and whether the plugin knows it. Imports no engine."""

from __future__ import annotations

import importlib.metadata
import os

from loraforge.errors import MissingDependencyError

# versions whose LoRA layers, manager and memory pool the plugin was written against
SUPPORTED = ("0.5.22",)
PLUGINS = "sglang.srt.plugins"  # group of entry points that the engine loads


def find() -> str | None:
    """The version of the installed SGLang, or None."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def problem() -> str | None:
    """Why the plugin refuses the installed SGLang; None where it does not, or where there is none."""
    version = find()
    if version is None or version.partition("+")[0] in SUPPORTED:
        return None
    return f"sglang {version} is not a version that the plugin was written for ({', '.join(SUPPORTED)})"


def require_any() -> str:
    """The version of the installed SGLang, supported or not. Raises MissingDependencyError where there is none."""
    version = find()
    if version is None:
        raise MissingDependencyError("SGLang is not installed", remedy="pip install 'loraforge[sglang]'")
    return version


def require() -> str:
    """The version of the installed SGLang. Raises MissingDependencyError where there is none, or one that is not
    supported."""
    version = require_any()
    if refused := problem():
        raise MissingDependencyError(
            refused, remedy="install that version, or serve with another --lora-backend"
        )
    return version


def plugin_problem() -> str | None:
    """Why the engine, started from here, would not find the plugin; None where it loads it."""
    if not any(point.name == "loraforge" for point in importlib.metadata.entry_points(group=PLUGINS)):
        return "loraforge is not installed as a package here, so that the engine does not find its plugin"
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and "loraforge" not in (name.strip() for name in allowed.split(",")):
        return f"SGLANG_PLUGINS is {allowed!r}, which leaves the plugin out"
    return None


def require_plugin() -> None:
    """Raise MissingDependencyError where the engine would not load the plugin."""
    if found := plugin_problem():
        raise MissingDependencyError(
            found,
            remedy="pip install loraforge beside the engine, and name it in SGLANG_PLUGINS if that is set",
        )
