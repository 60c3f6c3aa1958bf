"""Making a fleet lock: adapters are fetched and opened, so that nothing unusable is locked, and their files hashed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loraforge.errors import InputError, UsageError
from loraforge.files import sha256_file
from loraforge.fleet.download.archive import folder_of, is_archive, open_archive
from loraforge.fleet.download.fleet import CONNECTIONS
from loraforge.fleet.download.http import Http, tokens_of_environment
from loraforge.fleet.download.hub import Hub
from loraforge.fleet.download.origins import HISTORY, ArchiveOrigin, HubOrigin, Origin, UrlOrigin, collect
from loraforge.fleet.download.remote import Remote
from loraforge.fleet.download.transfer import Stored, fetch_file, run_all
from loraforge.fleet.lock import FleetLock, LockedAdapter, LockedBase, LockedFile
from loraforge.fleet.locked_sources import ArchiveSource, HubSource, PathSource, Source, UrlSource
from loraforge.fleet.offline import is_offline
from loraforge.fleet.options import DEFAULT, ReadOptions
from loraforge.fleet.peft_config import CONFIG_NAME
from loraforge.fleet.peft_io import Adapter, check_fleet, find_adapters, open_adapter
from loraforge.fleet.spec import FleetSpec, HubEntry, PathEntry, UrlEntry, parse_spec
from loraforge.fleet.store import Store
from loraforge.fleet.untrusted_path import plain_name
from loraforge.fleet.untrusted_yaml import read_untrusted_yaml
from loraforge.progress import Ticker, progress, track


def make_lock(
    adapters: Sequence[Path],
    path: Path,
    *,
    name: str,
    base: Path | None = None,
    options: ReadOptions = DEFAULT,
) -> FleetLock:
    """Open and hash adapter folders (or folders of them) for a lock that will be written to ``path``.

    ``base`` is a folder with the base model's safetensors files, to be hashed too; without it the base model
    is described by name, and by its pins where this package ships them. Raises InputError for whatever
    :func:`open_fleet` refuses, for a ``base`` without safetensors, and for an adapter outside the lock's folder.
    """
    spec = parse_spec({"adapters": [{"path": str(folder)} for folder in adapters]}, None)
    return lock_spec(spec, Path(), path, name=name, base=base, options=options)


def lock_spec(
    spec: FleetSpec,
    place: Path,
    path: Path,
    *,
    name: str,
    base: Path | None = None,
    options: ReadOptions = DEFAULT,
    connections: int = CONNECTIONS,
) -> FleetLock:
    """Fetch, open and hash what ``spec`` lists, for a lock that will be written to ``path``; its folders are relative
    to the folder ``place``.

    Revisions become commits. What is fetched stays in the user's store, so that the lock can be used at once. Raises as
    :func:`make_lock` does and :func:`~loraforge.fleet.download.transfer.fetch_file`; InputError for adapters of another
    base model than ``spec`` states, and offline for what is elsewhere.
    """
    if not plain_name(name):
        raise UsageError("cannot name a fleet: it must be one plain name", key=ascii(name))
    found = [found for one in _found(spec, place, path, options, connections) for found in one]
    fleet = check_fleet(_distinct([_opened(one, options) for one in found], found))
    if spec.base_model not in (None, fleet[0].base_model):
        raise InputError(
            f"base model is {fleet[0].base_model!r}, but the specification has {spec.base_model!r}",
            path=found[0].shown,
            key="base_model_name_or_path",
            remedy="list adapters of that base model",
        )
    described = _pinned_base(fleet[0].base_model) if base is None else _hashed_base(fleet[0].base_model, base)
    pairs = zip(fleet, found, strict=True)
    locked = [_lock_adapter(adapter, one, path) for adapter, one in track(pairs, "hash", len(fleet))]
    return FleetLock(name=name, base_model=described, adapters=tuple(locked))


@dataclass(frozen=True)
class _Found:
    """An adapter's folder here; ``source`` where it came from elsewhere, and ``shown`` as messages name that."""

    folder: Path
    name: str | None
    source: Source | None
    shown: str


def _found(
    spec: FleetSpec, place: Path, lock: Path, options: ReadOptions, connections: int
) -> Iterator[list[_Found]]:
    remote = [entry for entry in spec.adapters if not isinstance(entry, PathEntry)]
    fetched: dict[HubEntry | UrlEntry, _Found] = {}
    if remote:
        if is_offline():
            raise InputError(
                f"{len(remote)} adapters are elsewhere, and the network is off",
                path=lock,
                remedy="make the lock where there is one",
            )
        store = Store.of_user()
        store.prepare()
        with (
            Http(tokens_of_environment(), connections=connections) as http,
            progress("fetch", len(remote)) as ticker,
        ):
            hub = Hub(http) if any(isinstance(entry, HubEntry) for entry in remote) else None
            archives = sorted({e.url for e in remote if isinstance(e, UrlEntry) and is_archive(e.url)})
            whole = run_all(
                http, [partial(fetch_file, Remote(url), store, http) for url in archives], connections
            )
            elsewhere = _Elsewhere(store, http, hub, dict(zip(archives, whole, strict=True)), options, ticker)
            calls = [partial(elsewhere.bring, entry) for entry in remote]
            fetched = dict(zip(remote, run_all(http, calls, connections), strict=True))
    for entry in spec.adapters:
        if not isinstance(entry, PathEntry):
            yield [fetched[entry]]
            continue
        folders = find_adapters([place / entry.path])
        if entry.name is not None and len(folders) > 1:
            raise InputError(
                f"holds {len(folders)} adapters, which cannot all be named {entry.name!r}",
                path=place / entry.path,
                remedy="name one of its folders, or leave the name out",
            )
        yield [_Found(folder, entry.name, None, str(folder)) for folder in folders]


@dataclass(frozen=True)
class _Elsewhere:
    """What it takes to bring entries here; ``archives``: by address, and in the store already."""

    store: Store
    http: Http
    hub: Hub | None
    archives: Mapping[str, Stored]
    options: ReadOptions
    ticker: Ticker

    def bring(self, entry: HubEntry | UrlEntry) -> _Found:
        """The adapter of an entry as a folder of the store."""
        if isinstance(entry, HubEntry):
            return self._from_hub(entry)
        if not is_archive(entry.url):
            origin = UrlOrigin(entry.url, entry.files, self.store, self.http)
            return self._collected(entry, origin, UrlSource(url=entry.url))
        whole = self.archives[entry.url]
        with open_archive(self.store.blob(whole.sha256), entry.url) as archive:
            folder = folder_of(archive, entry.folder, CONFIG_NAME)
            source = ArchiveSource(archive=entry.url, bytes=whole.bytes, sha256=whole.sha256, folder=folder)
            return self._collected(entry, ArchiveOrigin(archive, folder, self.store), source)

    def _from_hub(self, entry: HubEntry) -> _Found:
        assert self.hub is not None  # it is there for the first such entry
        repository = self.hub.repository(entry.hub, entry.revision)
        origin = HubOrigin(self.hub, repository, entry.subfolder, self.store, self.http)
        source = HubSource(
            hub=entry.hub, commit=repository.commit, revision=entry.revision, subfolder=entry.subfolder
        )
        return self._collected(entry, origin, source)

    def _collected(self, entry: HubEntry | UrlEntry, origin: Origin, source: Source) -> _Found:
        files = collect(origin, self.store, allow_pickle=self.options.allow_pickle)
        folder = self.store.link({name: file.sha256 for name, file in sorted(files.items())})
        self.ticker.advance(origin.shown)
        return _Found(folder, entry.default_name, source, origin.shown)


def _distinct(adapters: list[Adapter], found: Sequence[_Found]) -> list[Adapter]:
    """Raise InputError where an adapter from elsewhere has another's name: it is no folder that can be renamed."""
    by_name: dict[str, _Found] = {}
    for adapter, one in zip(adapters, found, strict=True):
        other = by_name.setdefault(adapter.name, one)
        if other is not one and (other.source is not None or one.source is not None):
            raise InputError(
                f"two adapters are named {adapter.name!r} (the other is {other.shown})",
                path=one.shown,
                remedy="list them in a file, with a `name` for one (docs/downloads.md)",
            )
    return adapters


def _opened(found: _Found, options: ReadOptions) -> Adapter:
    if found.source is None:
        return open_adapter(found.folder, name=found.name, options=options)
    try:
        return open_adapter(found.folder, name=found.name, options=options)
    except InputError as error:  # a folder of the store tells nobody which adapter it is
        file = "" if error.path is None else f"/{Path(error.path).name}"
        raise InputError(
            error.problem, path=f"{found.shown}{file}", key=error.key, remedy=error.remedy
        ) from error


def _lock_adapter(adapter: Adapter, found: _Found, lock: Path) -> LockedAdapter:
    deciding = (CONFIG_NAME, *(file.name for file in (*adapter.weights.others, *adapter.weights.files)))
    present = [name for name in HISTORY if (adapter.path / name).is_file()]
    files = [
        LockedFile(name=name, bytes=path.stat().st_size, sha256=sha256_file(path))
        for name, path in ((name, adapter.path / name) for name in (*deciding, *present))
    ]
    return LockedAdapter(
        name=adapter.name,
        task=_task(adapter.path / "recipe.yaml"),
        source=_relative(adapter, lock) if found.source is None else found.source,
        files=tuple(files),
    )


def _relative(adapter: Adapter, lock: Path) -> PathSource:
    place = Path(lock).resolve().parent
    if not adapter.path.resolve().is_relative_to(place):
        raise InputError(
            f"is not in the folder of {lock}, and a lock names nothing outside its own",
            path=adapter.path,
            remedy="put the lock beside or above its adapters",
        )
    relative = Path(os.path.relpath(adapter.path.resolve(), place))
    if not all(map(plain_name, relative.parts)):
        raise InputError(
            "is below a folder whose name no lock can hold",
            path=ascii(str(adapter.path)),
            remedy="rename that folder",
        )
    return PathSource(path=relative.as_posix())


def _task(recipe: Path) -> str | None:
    """The task that a recipe names, which may be a stranger's."""
    if not recipe.is_file():
        return None
    value = read_untrusted_yaml(recipe)
    task = value.get("task") if isinstance(value, dict) else None
    if task is not None and not isinstance(task, str | int):
        raise InputError("must be one word", path=recipe, key="task")
    return None if task is None else str(task)


def _pinned_base(name: str) -> LockedBase:
    from loraforge.fleet.base_model import SMOLLM2

    if name != SMOLLM2.name:
        return LockedBase(name=name)
    return LockedBase(
        name=name,
        source=SMOLLM2.source,
        files={Path(SMOLLM2.member).name: SMOLLM2.gguf_sha256},
        tensors_sha256=SMOLLM2.tensors_sha256,
    )


def _hashed_base(name: str, folder: Path) -> LockedBase:
    from loraforge.fleet.base_model import tensors_sha256

    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise InputError("holds no safetensors file", path=folder, remedy="name the folder of the base model")
    return LockedBase(
        name=name,
        files={path.name: sha256_file(path) for path in weights},
        tensors_sha256=tensors_sha256(weights[0]) if len(weights) == 1 else None,
    )
