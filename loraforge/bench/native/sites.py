"""Site directories of engines: made from wheels, and imported module by module, several versions in one process.

An engine's package initialisers import serving stacks that a benchmark machine does not have. Here the packages on the
way to a module are empty, the module itself is the engine's file, and the few names it wants from the serving stack are
stand-ins that its driver states. ``sys.modules`` holds an engine's modules only while one of its calls runs.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

from loraforge.errors import LoraForgeError, MissingDependencyError
from loraforge.files import atomic_folder

# distribution -> the files of its wheel that the baselines need
WANTED: dict[str, tuple[str, ...]] = {
    "sglang-0.5.22": (
        "sglang/srt/environ.py",
        "sglang/srt/lora/utils.py",
        "sglang/kernels/ops/lora/dense/chunked_sgmv_shrink.py",
        "sglang/kernels/ops/lora/dense/chunked_sgmv_expand.py",
        "sglang/kernels/ops/lora/dense/lora_tuning_config.py",
        "sglang/kernels/ops/lora/dense/csgmv_configs/*.json",
    ),
    "sglang-0.5.23": (
        "sglang/srt/environ.py",
        "sglang/srt/lora/utils.py",
        "sglang/srt/lora/workspace.py",
        "sglang/srt/lora/dense/plan.py",
        "sglang/srt/lora/dense/runner.py",
        "sglang/srt/lora/dense/configs/*.json",
        "sglang/kernels/ops/lora/common/*.py",
    ),
    "vllm-0.26.0": (
        "vllm/envs.py",
        "vllm/utils/math_utils.py",
        "vllm/lora/ops/triton_ops/utils.py",
        "vllm/lora/ops/triton_ops/kernel_utils.py",
        "vllm/lora/ops/triton_ops/lora_kernel_metadata.py",
        "vllm/lora/ops/triton_ops/lora_shrink_op.py",
        "vllm/lora/ops/triton_ops/lora_expand_op.py",
    ),
}
# wheels for the platform of the benchmark machines, whatever this one is: only Python and JSON files are taken
_PLATFORM = [
    "--python-version=3.12",
    "--only-binary=:all:",
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 28, 31, 34, 35)),
    "--platform=manylinux2014_x86_64",
]


def fetch(out: Path, *, force: bool = False) -> None:
    """Make ``out``/<distribution> for every engine by pip. Raises LoraForgeError where pip cannot get a wheel."""
    with atomic_folder(out, force=force) as folder, tempfile.TemporaryDirectory() as downloads:
        for distribution in WANTED:
            name, version = distribution.rsplit("-", 1)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *_PLATFORM]
            done = subprocess.run(
                [*command, "--dest", downloads, f"{name}=={version}"],
                capture_output=True,
                text=True,
                check=False,
            )
            wheels = list(Path(downloads).glob(f"{distribution}-*.whl"))
            if done.returncode != 0 or not wheels:
                reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
                raise LoraForgeError(
                    f"pip cannot download it: {reason}",
                    key=distribution,
                    remedy="run where pip reaches a registry, and carry the folder",
                )
            unpack(wheels[0], folder / distribution, WANTED[distribution])
            wheels[0].unlink()


def unpack(wheel: Path, out: Path, wanted: tuple[str, ...]) -> None:
    """Extract the wanted files of a wheel, and the metadata that names its version and licence."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if any(fnmatch(name, pattern) for pattern in (*wanted, "*.dist-info/METADATA")):
                archive.extract(name, out)


@dataclass(frozen=True)
class Site:
    """Modules of one distribution. ``active`` makes them importable while it lasts."""

    distribution: str
    modules: dict[str, ModuleType]

    @contextmanager
    def active(self) -> Iterator[None]:
        """For calls that import lazily."""
        package = self.distribution.rsplit("-", 1)[0]
        hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == package}
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(self.modules)
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                self.modules[name] = sys.modules.pop(name)
            sys.modules.update(hidden)

    def __getitem__(self, name: str) -> Any:
        return self.modules[name]


def open_site(
    engines: Path, distribution: str, names: list[str], stand_ins: Mapping[str, Mapping[str, Any]]
) -> Site:
    """Import ``names`` from ``engines``/<distribution> (a site directory of that version, whole or in part).

    stand_ins: modules that are made of the given names instead of being imported. Raises MissingDependencyError
    where the directory, a file or a package that it needs is absent, LoraForgeError for another version.
    """
    root = Path(engines) / distribution
    remedy = "loraforge bench engines DIR makes it, and --engines DIR names it"
    package, version = distribution.rsplit("-", 1)
    if not (root / package).is_dir():
        raise MissingDependencyError(f"no {package} there", path=root, remedy=remedy)
    if not (root / f"{distribution}.dist-info").is_dir():
        raise LoraForgeError(f"is not {package} {version}", path=root, remedy=remedy)
    site = Site(distribution, {})
    for name in [*names, *stand_ins]:
        for parent in _parents(name):
            if parent not in site.modules:
                empty = ModuleType(parent)
                empty.__path__ = [str(root.joinpath(*parent.split(".")))]
                site.modules[parent] = empty
    for name, members in stand_ins.items():
        module = site.modules.get(name) or ModuleType(name)
        module.__dict__.update(members)
        site.modules[name] = module
        parent, _, last = name.rpartition(".")
        setattr(site.modules[parent], last, module)
    with site.active():
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise MissingDependencyError(
                    f"cannot import {name} ({error})", path=root, remedy=remedy
                ) from error
    return site


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
