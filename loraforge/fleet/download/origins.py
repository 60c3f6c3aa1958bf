"""An adapter's files where they are: which there are, and each of them into the store.

One class a place. What is not known beforehand is found out here, while a lock is made; a locked fleet is fetched in
:mod:`~loraforge.fleet.download.fleet` by what its lock says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loraforge.errors import InputError
from loraforge.fleet.download.address import inside, shown_url
from loraforge.fleet.download.archive import Archive, member
from loraforge.fleet.download.http import Http, RefusedError
from loraforge.fleet.download.hub import Hub, Repository
from loraforge.fleet.download.remote import Remote
from loraforge.fleet.download.transfer import Stored, fetch_file
from loraforge.fleet.peft_config import CONFIG_NAME, WEIGHTS_NAME
from loraforge.fleet.store import Store
from loraforge.fleet.untrusted_json import read_untrusted_json
from loraforge.fleet.untrusted_path import plain_name
from loraforge.fleet.weight_files import INDEX_NAME, MAX_SHARDS, PICKLES

HISTORY = ("recipe.yaml", "training.json")  # of an adapter, beside what decides it


class Origin(Protocol):
    """A place with one adapter. ``shown``: how messages name it."""

    shown: str

    def lists(self, name: str) -> bool:
        """Whether the place says, unasked, that it has this file."""

    def get(self, name: str) -> Stored | None:
        """The file ``name`` in the store; None where the place has none."""


def collect(origin: Origin, store: Store, *, allow_pickle: bool) -> dict[str, Stored]:
    """Bring what an adapter consists of into the store, by name: configuration, weights, and its history where that is
    listed. Raises InputError where something is missing, and as :func:`fetch_file` does."""
    found = {CONFIG_NAME: _need(origin, CONFIG_NAME)}
    if (single := origin.get(WEIGHTS_NAME)) is not None:
        found[WEIGHTS_NAME] = single
    elif (index := origin.get(INDEX_NAME)) is not None:
        found[INDEX_NAME] = index
        for name in _shards(origin, store, index):
            found[name] = _need(origin, name)
    else:
        name = _pickle(origin, allow_pickle)
        found[name] = _need(origin, name)
    for name in HISTORY:
        if origin.lists(name):
            found[name] = _need(origin, name)
    return found


def _need(origin: Origin, name: str) -> Stored:
    if (stored := origin.get(name)) is None:
        raise InputError(
            f"holds no {name}",
            path=origin.shown,
            remedy="name the folder of a PEFT adapter (see docs/downloads.md)",
        )
    return stored


def _shards(origin: Origin, store: Store, index: Stored) -> list[str]:
    value = read_untrusted_json(store.blob(index.sha256))
    table = value.get("weight_map") if isinstance(value, dict) else None
    names = sorted({str(name) for name in table.values()}) if isinstance(table, dict) else []
    if not names or len(names) > MAX_SHARDS or not all(map(plain_name, names)):
        raise InputError(
            f"{INDEX_NAME} does not map tensors to files", path=origin.shown, remedy="save the adapter again"
        )
    return names


def _pickle(origin: Origin, allowed: bool) -> str:
    if not allowed:
        raise InputError(
            f"holds no {WEIGHTS_NAME}",
            path=origin.shown,
            remedy="name the folder of a PEFT adapter; --allow-pickle takes an adapter_model.bin too",
        )
    return next((name for name in PICKLES if origin.lists(name)), PICKLES[0])


class HubOrigin:
    """A folder of a repository at a commit."""

    def __init__(
        self, hub: Hub, repository: Repository, subfolder: str | None, store: Store, http: Http
    ) -> None:
        self._hub, self._repository, self._subfolder = hub, repository, subfolder
        self._store, self._http = store, http
        where = "" if subfolder is None else f"/{subfolder}"
        self.shown = f"hub:{repository.name}@{repository.commit[:12]}{where}"

    def lists(self, name: str) -> bool:
        return member(self._subfolder, name) in self._repository.files

    def get(self, name: str) -> Stored | None:
        path = member(self._subfolder, name)
        file = self._repository.files.get(path)
        if file is None:
            return None
        remote = self._hub.remote(self._repository.name, self._repository.commit, path, file)
        return fetch_file(remote, self._store, self._http)


class UrlOrigin:
    """A folder on a web server, whose files are asked for by name; ``named``: those that it is known to have."""

    def __init__(self, url: str, named: Sequence[str], store: Store, http: Http) -> None:
        self._url, self._named, self._store, self._http = url, frozenset(named), store, http
        self.shown = shown_url(url)

    def lists(self, name: str) -> bool:
        return name in self._named

    def get(self, name: str) -> Stored | None:
        if self._named and name not in self._named:
            return None
        try:
            return fetch_file(Remote(inside(self._url, name)), self._store, self._http)
        except RefusedError as error:
            # a store of objects says 403 of one that is not there; of what must be there, the reason matters
            if error.status in (403, 404, 410) and name not in self._named and name != CONFIG_NAME:
                return None
            raise


class ArchiveOrigin:
    """A folder of an archive that is in the store."""

    def __init__(self, archive: Archive, folder: str | None, store: Store) -> None:
        self._archive, self._folder, self._store = archive, folder, store
        self.shown = archive.shown if folder is None else f"{archive.shown}: {folder}"

    def lists(self, name: str) -> bool:
        return member(self._folder, name) in self._archive.sizes

    def get(self, name: str) -> Stored | None:
        path = member(self._folder, name)
        if path not in self._archive.sizes:
            return None
        sha256 = self._store.put(lambda: self._archive.pieces(path), f"{self._archive.shown}: {path}")
        return Stored(sha256, self._archive.sizes[path])
