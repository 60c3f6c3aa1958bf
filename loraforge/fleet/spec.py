"""Fleet specifications: which adapters a lock is to be made of, as a person writes them.

YAML without hashes: nothing is opened by one. ``loraforge fleet lock`` makes the lock, and that is what is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from loraforge.errors import InputError, UsageError
from loraforge.fleet.download.address import shown_url
from loraforge.fleet.download.archive import is_archive
from loraforge.fleet.locked_sources import Folder, Name, Repository, Revision, Strict, Url
from loraforge.fleet.untrusted_json import shown
from loraforge.fleet.untrusted_yaml import read_untrusted_yaml

SUFFIXES = (".yaml", ".yml")
_KINDS = ("hub", "url", "path")


class PathEntry(Strict):
    """A folder of an adapter, or of several; relative to the specification."""

    path: str = Field(min_length=1)
    name: Name | None = None

    @property
    def default_name(self) -> str | None:
        return self.name


class HubEntry(Strict):
    """A repository of the hub, or a subfolder of one, at a branch, tag or commit."""

    hub: Repository
    revision: Revision = "main"
    subfolder: Folder | None = None
    name: Name | None = None

    @property
    def default_name(self) -> str:
        return self.name or (self.subfolder or self.hub).rpartition("/")[2]


class UrlEntry(Strict):
    """A folder on a web server, of whose files ``files`` may name those that there are; or an archive there, and the
    ``folder`` in it."""

    url: Url
    files: tuple[Name, ...] = ()
    folder: Folder | None = None
    name: Name | None = None

    @model_validator(mode="after")
    def _consistent(self) -> UrlEntry:
        if is_archive(self.url):
            if self.files:
                raise ValueError("files are named for a folder, not for an archive")
        elif self.folder is not None:
            raise ValueError("folder is named for an archive, and this is none by its name")
        elif "?" in self.url:
            raise ValueError("must have no part after ?, for it is a folder")
        return self

    @property
    def default_name(self) -> str:
        if self.name is not None:
            return self.name
        last = (self.folder or shown_url(self.url).rstrip("/")).rpartition("/")[2]
        return last.split(".")[0] if self.folder is None and is_archive(self.url) else last


def _kind(value: Any) -> str:
    given = value if isinstance(value, dict) else getattr(type(value), "model_fields", ())
    return next((kind for kind in _KINDS if kind in given), "path")


Entry = Annotated[
    Annotated[PathEntry, Tag("path")] | Annotated[HubEntry, Tag("hub")] | Annotated[UrlEntry, Tag("url")],
    Discriminator(_kind),
]


class FleetSpec(Strict):
    """A whole fleet; ``base_model``: what its adapters must be over, where that is to be checked."""

    name: Name | None = None
    base_model: str | None = None
    adapters: tuple[Entry, ...] = Field(min_length=1)


def is_spec(path: Path) -> bool:
    """Whether a command takes ``path`` for a fleet specification: a ``.yaml`` that is no folder of that name."""
    return Path(path).suffix in SUFFIXES and not Path(path).is_dir()


def refuse_spec(path: Path) -> None:
    """Raise UsageError where a specification is named in place of a lock."""
    if is_spec(path):
        raise UsageError(
            "is a list of adapters without hashes, and without them nothing is fetched or opened",
            path=path,
            remedy=f"run `loraforge fleet lock {path}` once, and name the lock that it writes",
        )


def load_spec(path: Path) -> FleetSpec:
    """Read a specification. Raises InputError that names the file and the key."""
    return parse_spec(read_untrusted_yaml(path), path)


def parse_spec(value: Any, path: Path | None) -> FleetSpec:
    """Check a specification that came from ``path``, or from the command line. Raises InputError."""
    try:
        return FleetSpec.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        parts = [str(part) for part in first["loc"]]
        key = ".".join(part for i, part in enumerate(parts) if i != 2 or part not in _KINDS)
        raise InputError(
            f"not a fleet specification ({first['msg']})",
            path=path,
            key=shown(key) or None,
            remedy="see docs/downloads.md",
        ) from error


def parse_arguments(arguments: list[str]) -> FleetSpec:
    """The specification of ``hub:owner/name@revision``, addresses and folders on a command line. Raises InputError."""
    entries: list[dict[str, str]] = []
    for argument in arguments:
        if argument.startswith("hub:"):
            repository, at, revision = argument.removeprefix("hub:").partition("@")
            entries.append({"hub": repository} | ({"revision": revision} if at else {}))
        elif argument.startswith(("https://", "http://")):
            entries.append({"url": argument})
        else:
            entries.append({"path": argument})
    return parse_spec({"adapters": entries}, None)
