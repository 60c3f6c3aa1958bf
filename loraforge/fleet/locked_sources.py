"""Where a locked adapter comes from: a folder beside the lock, a hub at a commit, a folder at a URL, an archive."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from loraforge.fleet.download.address import check_folder_url, check_url
from loraforge.fleet.untrusted_path import plain_name


class Strict(BaseModel):
    """What a lock or a fleet specification is made of."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


def _plain(name: str) -> str:
    if not plain_name(name):
        raise ValueError("must be one plain name, no path")
    return name


def _folder(path: str) -> str:
    if path.startswith("/") or not all(map(plain_name, path.split("/"))):
        raise ValueError("must be plain folder names with / between")
    return path


def _revision(text: str) -> str:
    if not text.isprintable() or " " in text or ".." in text:
        raise ValueError("must be a branch, a tag or a commit")
    return text


Name = Annotated[str, AfterValidator(_plain)]
Folder = Annotated[str, AfterValidator(_folder)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Repository = Annotated[str, Field(pattern=r"^\w([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?$"), Field(max_length=96)]
Revision = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_revision)]
Url = Annotated[str, AfterValidator(check_url)]
FolderUrl = Annotated[str, AfterValidator(check_folder_url)]


class PathSource(Strict):
    """A folder, relative to the lock file (POSIX separators)."""

    path: str = Field(min_length=1)

    @model_validator(mode="after")
    def _relative(self) -> PathSource:
        if Path(self.path).is_absolute():
            raise ValueError("must be relative to the lock file")
        if not all(map(plain_name, PurePosixPath(self.path).parts)) and self.path != ".":
            raise ValueError("must stay in the lock file's folder: put the lock beside or above its adapters")
        return self


class HubSource(Strict):
    """A repository of the hub at a commit; ``revision`` is what was asked for when the lock was made."""

    hub: Repository
    commit: Commit
    revision: Revision
    subfolder: Folder | None = None


class UrlSource(Strict):
    """A folder on a web server: the file names are put after the address."""

    url: FolderUrl


class ArchiveSource(Strict):
    """An archive on a web server, and the folder in it."""

    archive: Url
    bytes: int = Field(ge=0)
    sha256: Sha256
    folder: Folder | None = None


_KINDS = ("hub", "url", "archive", "path")


def _kind(value: Any) -> str:
    given = value if isinstance(value, dict) else getattr(type(value), "model_fields", ())
    return next((kind for kind in _KINDS if kind in given), "path")


Source = Annotated[
    Annotated[PathSource, Tag("path")]
    | Annotated[HubSource, Tag("hub")]
    | Annotated[UrlSource, Tag("url")]
    | Annotated[ArchiveSource, Tag("archive")],
    Discriminator(_kind),
]


def key_parts(location: Iterable[str | int]) -> list[str]:
    """The place of a validation error as the file's writer sees it: without the kinds that pydantic puts between."""
    parts = [str(part) for part in location]
    return [part for i, part in enumerate(parts) if part not in _KINDS or i == 0 or parts[i - 1] != "source"]
