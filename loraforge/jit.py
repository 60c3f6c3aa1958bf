"""Build the kernels once a machine and load them: no torch headers, a plain C interface, ctypes.

There are two GPU libraries, ``factor`` and ``lora`` (serving), so that work on serving leaves alone the factor cache,
whose keys hold the hash of the factor sources, and ``cpu``, the serving operations on the processor. A library is
named by the hash of everything it is made of (sources, flags, compiler version), built beside its final place under a
lock, and renamed into it. A library built ahead of time lies in the package with a record of the same sources and
needs no compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from loraforge.errors import LoraForgeError, MissingDependencyError
from loraforge.files import canonical_json, read_json, sha256_file, sha256_text, write_json

PACKAGE = Path(__file__).resolve().parent
# a folder of its own in a wheel, a link to the repository's in a checkout; a copy may have lost the link
KERNELS = next(
    (p for p in (PACKAGE / "kernels", PACKAGE.parent / "kernels") if p.is_dir()), PACKAGE / "kernels"
)
DEFAULT_FOLDER = Path(".cache/loraforge/kernels")
PREBUILT_FOLDER = PACKAGE

Library = Literal["factor", "lora", "cpu"]
LIBRARIES: tuple[Library, ...] = ("factor", "lora")  # for GPUs; these are built ahead of time too
_SHARED = ("portable.cuh",)  # factor headers that the lora library includes

_COMPILERS = {
    "nvcc": ("/usr/local/cuda/bin/nvcc",),
    "hipcc": ("/opt/rocm/bin/hipcc",),
    "g++": ("/usr/bin/g++",),
}
_FLAGS: dict[str, tuple[str, ...]] = {
    "nvcc": (
        "-O3",
        "-std=c++17",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
        "--shared",
        "-Xcompiler=-fPIC",
        "--threads=0",
    ),
    "hipcc": ("-O3", "-std=c++17", "--offload-arch=gfx90a", "-shared", "-fPIC", "-x", "hip"),
    # OpenMP for the compiler proper alone: its runtime is not linked, but found in the process, where torch has put
    # its own, and a process without one does not load the library. A second runtime would have threads of its own that
    # compete with torch's.
    "g++": (
        "-O3",
        "-std=gnu++17",
        "-march=native",
        "-Xpreprocessor",
        "-fopenmp",
        "-shared",
        "-fPIC",
        "-Wl,-z,now",
        "-w",  # GCC 12 warns of its own AVX-512 header
    ),
}
_UNITS = (".cu", ".cpp")


@dataclass(frozen=True)
class Compiler:
    """A compiler of this machine: ``nvcc``, ``hipcc`` or ``g++``, where it is, and its version text.

    target: what the compiler takes this machine's processor for, where the flags leave that to it.
    """

    kind: str
    path: str
    version: str
    target: str = ""


def find_compiler(kind: str = "nvcc") -> Compiler | None:
    """The compiler on the PATH or at its usual place, or None."""
    path = shutil.which(kind) or next((p for p in _COMPILERS[kind] if os.access(p, os.X_OK)), None)
    if path is None:
        return None
    try:
        version = _ask(path, "--version")
        target = _ask(path, "-march=native", "-Q", "--help=target") if kind == "g++" else ""
    except (OSError, subprocess.SubprocessError):
        return None
    return Compiler(kind, path, version, target)


def _ask(path: str, *arguments: str) -> str:
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def sources(library: Library = "factor", kernels: Path = KERNELS) -> list[Path]:
    """Translation units and headers of a library, sorted by path: ``lora`` and ``cpu`` have what lies in folders of
    those names.

    Raises MissingDependencyError where there are none.
    """

    def belongs(path: Path) -> bool:
        for name in ("lora", "cpu"):
            if name in path.relative_to(kernels).parts[:-1]:
                return library == name
        return library == "factor" or (library == "lora" and path.name in _SHARED)

    found = sorted(
        path for path in kernels.rglob("*") if path.suffix in (*_UNITS, ".cuh", ".h") and belongs(path)
    )
    if not any(path.suffix in _UNITS for path in found):
        raise MissingDependencyError(
            f"the {library} kernel sources are missing", path=kernels, remedy="install loraforge again"
        )
    return found


@cache
def source_hash(library: Library = "factor", kernels: Path = KERNELS) -> str:
    """Hex SHA-256 of the names and contents of a library's sources."""
    digest = hashlib.sha256()
    for path in sources(library, kernels):
        digest.update(path.relative_to(kernels).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def library_key(compiler: Compiler, library: Library = "factor", kernels: Path = KERNELS) -> str:
    """The hash that names a library: sources, flags, compiler version, and the processor where flags leave it open."""
    parts = {
        "sources": source_hash(library, kernels),
        "flags": _FLAGS[compiler.kind],
        "compiler": compiler.version,
    } | ({"target": compiler.target} if compiler.target else {})
    return sha256_text(canonical_json(parts))


def prebuilt(library: Library = "factor") -> Path | None:
    """The library in the package, where it is whole and of the present sources and flags."""
    path = _ahead(library)
    record = path.with_suffix(".json")
    if not path.is_file() or not record.is_file():
        return None
    stated = read_json(record)
    wanted = {
        "sources": source_hash(library),
        "flags": list(_FLAGS.get(stated.get("kind", ""), ())),
        "library_sha256": sha256_file(path),
    }
    return path if all(stated.get(name) == value for name, value in wanted.items()) else None


def find_library(
    library: Library = "factor", folder: Path = DEFAULT_FOLDER, *, kind: str = "nvcc"
) -> Path | None:
    """The library that :func:`build` would return, where it need not be built."""
    if (ahead := prebuilt(library)) is not None:
        return ahead
    compiler = find_compiler(kind)
    if compiler is None:
        return None
    path = _place(library, folder, compiler)
    return path if path.is_file() else None


def build(library: Library = "factor", folder: Path = DEFAULT_FOLDER, *, kind: str = "nvcc") -> Path:
    """The library in ``folder``, built if it is not there.

    Raises MissingDependencyError without a compiler, LoraForgeError with the compiler's first error where the
    build fails.
    """
    if (found := find_library(library, folder, kind=kind)) is not None:
        return found
    compiler = find_compiler(kind)
    if compiler is None:
        raise MissingDependencyError(
            f"the {library} kernels are not built and {kind} is not found",
            remedy=f"install what has {kind} and put it on the PATH, or work without these kernels",
        )
    target = _place(library, folder, compiler)
    with _locked(target.parent):
        if not target.is_file():  # another process may have built it while this one waited
            _compile(library, compiler, target)
    return target


def build_ahead(*, kind: str = "nvcc") -> list[Path]:
    """Build the GPU libraries into the package, with the records that :func:`prebuilt` checks: for wheels and for
    machines without a compiler. Raises as :func:`build` does."""
    compiler = find_compiler(kind)
    if compiler is None:
        raise MissingDependencyError(f"{kind} is not found", remedy=f"put {kind} on the PATH")
    for library in LIBRARIES:
        path = _ahead(library)
        _compile(library, compiler, path)
        record = {
            "kind": kind,
            "sources": source_hash(library),
            "flags": list(_FLAGS[kind]),
            "compiler": compiler.version.splitlines()[-1],
            "library_sha256": sha256_file(path),
        }
        write_json(path.with_suffix(".json"), record)
    return [_ahead(library) for library in LIBRARIES]


@cache
def load(library: Library = "factor", folder: Path = DEFAULT_FOLDER, *, kind: str = "nvcc") -> ctypes.CDLL:
    """Build if need be and load. Raises as :func:`build` does, and LoraForgeError where loading fails."""
    path = build(library, folder, kind=kind)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LoraForgeError(
            f"the {library} kernels do not load ({error})",
            path=path,
            remedy="remove the file to build it again",
        ) from error


def state(
    library: Library = "factor", folder: Path = DEFAULT_FOLDER, *, kind: str = "nvcc"
) -> dict[str, Any]:
    """What ``loraforge doctor`` says of a library: whether it is built, where, and whether it can be."""
    try:
        path = find_library(library, folder, kind=kind)
        names = [source.name for source in sources(library) if source.suffix in _UNITS]
    except LoraForgeError as error:
        return {"built": False, "path": None, "buildable": False, "sources": [], "problem": str(error)}
    return {
        "built": path is not None,
        "path": None if path is None else str(path),
        "buildable": find_compiler(kind) is not None,
        "sources": names,
        "problem": None,
    }


def _ahead(library: Library) -> Path:
    return PREBUILT_FOLDER / f"libloraforge_{library}.so"


def _place(library: Library, folder: Path, compiler: Compiler) -> Path:
    return Path(folder) / f"libloraforge_{library}-{library_key(compiler, library)[:32]}.so"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl  # POSIX only, as the compilers here are

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, whatever happened


def _compile(library: Library, compiler: Compiler, target: Path) -> None:
    units = [str(path) for path in sources(library) if path.suffix in _UNITS]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        command = [
            compiler.path,
            *_FLAGS[compiler.kind],
            f"-I{KERNELS / 'include'}",
            "-o",
            str(fresh),
            *units,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).splitlines()
            first = next((line for line in lines if "error" in line), f"exit status {done.returncode}")
            raise LoraForgeError(
                f"the {library} kernels do not compile: {first.strip()}",
                path=KERNELS,
                remedy=f"try another version of {compiler.kind} ({compiler.version.splitlines()[-1]})",
            )
        os.replace(fresh, target)
