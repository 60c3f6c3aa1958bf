"""All that a lock names elsewhere into the store: only what is missing, each file once, in parallel."""

from __future__ import annotations

import random
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loraforge.errors import InputError, OutputError
from loraforge.fleet.download import part
from loraforge.fleet.download.address import inside
from loraforge.fleet.download.archive import member, open_archive
from loraforge.fleet.download.http import Http, tokens_of_environment
from loraforge.fleet.download.hub import Hub, HubFile
from loraforge.fleet.download.remote import Remote
from loraforge.fleet.download.transfer import fetch_file, run_all
from loraforge.fleet.lock import FleetLock, LockedAdapter, LockedFile
from loraforge.fleet.locked_sources import ArchiveSource, HubSource, PathSource, UrlSource
from loraforge.fleet.offline import is_offline
from loraforge.fleet.store import Store
from loraforge.progress import progress
from loraforge.threads import in_threads

CONNECTIONS = 8


@dataclass(frozen=True)
class Fetched:
    """What :func:`fetch_fleet` has done: files and bytes that it fetched itself, files that were in the store already,
    and files that came meanwhile by other processes."""

    files: int
    bytes: int
    present: int
    others: int


def fetch_fleet(
    lock: FleetLock,
    path: Path,
    *,
    connections: int = CONNECTIONS,
    offline: bool = False,
    rehash: bool = False,
) -> Fetched:
    """Make every adapter that ``lock`` (of the file ``path``) has elsewhere a folder of the user's store.

    ``offline``, or ``HF_HUB_OFFLINE``: by what the store has alone. ``rehash``: files of the store are read again, and
    what is damaged is fetched anew. Raises InputError where something is missing offline, and as
    :func:`~loraforge.fleet.download.transfer.fetch_file` does.
    """
    store = Store.of_user()
    remote = [adapter for adapter in lock.adapters if not isinstance(adapter.source, PathSource)]
    if rehash:
        known = {sha256 for adapter in remote for sha256 in adapter.hashes.values()}
        deque(in_threads(store.drop_damaged, known), maxlen=0)
    wanted = [(adapter, file) for adapter in remote for file in adapter.files]
    lacking = [(adapter, file) for adapter, file in wanted if not store.has(file.sha256, file.bytes)]
    size = sum({file.sha256: file.bytes for _, file in lacking}.values())
    if lacking and (offline or is_offline()):
        raise InputError(
            f"{len(lacking)} files ({size / 1e6:.1f} MB) are not in the store {store.root}, and the network is off",
            path=path,
            remedy=f"run `loraforge fleet fetch {path}` where there is one",
        )
    came = _fetch(lacking, size, store, connections) if lacking else {}
    for adapter in remote:
        store.link(adapter.hashes)
    others = {file.sha256 for _, file in lacking} - came.keys()
    return Fetched(len(came), sum(came.values()), len(wanted) - len(lacking), len(others))


def _fetch(
    lacking: list[tuple[LockedAdapter, LockedFile]], size: int, store: Store, connections: int
) -> dict[str, int]:
    """Hash and size of the files that came by this process."""
    store.prepare()
    part.sweep(store.partial)
    if size > shutil.disk_usage(store.partial).free:
        raise OutputError(
            f"{size / 1e9:.1f} GB are to come, and there is no room for them",
            path=store.root,
            remedy="free some space, or set LORAFORGE_STORE to a folder on another disk",
        )
    with (
        Http(tokens_of_environment(), connections=connections) as http,
        progress("fetch, kB", -(-size // 1000)) as ticker,
    ):
        jobs = list(_jobs(lacking, store, http, connections, _Kilobytes(ticker.advance)))
        random.shuffle(jobs)  # so that several processes help each other, not wait for each other
        return {sha256: size for job in run_all(http, jobs, connections) for sha256, size in job.items()}


def _jobs(
    lacking: list[tuple[LockedAdapter, LockedFile]],
    store: Store,
    http: Http,
    connections: int,
    came: Callable[[int], None],
) -> Iterator[Callable[[], dict[str, int]]]:
    """One call a file, or an archive of several; it gives hash and size of those that it has fetched itself."""
    hub = Hub(http) if any(isinstance(adapter.source, HubSource) for adapter, _ in lacking) else None
    files: dict[str, Remote] = {}
    archives: dict[ArchiveSource, dict[str, LockedFile]] = {}
    for adapter, file in lacking:
        match adapter.source:
            case HubSource() as source:
                assert hub is not None
                stated = HubFile(file.bytes, file.sha256, None)
                place = member(source.subfolder, file.name)
                files[file.sha256] = hub.remote(source.hub, source.commit, place, stated)
            case UrlSource() as source:
                url = inside(source.url, file.name)
                files[file.sha256] = Remote(url, bytes=file.bytes, sha256=file.sha256)
            case ArchiveSource() as source:
                whole = source.model_copy(update={"folder": None})
                archives.setdefault(whole, {})[member(source.folder, file.name)] = file
    lanes = max(1, connections // max(1, len(files) + len(archives)))
    for remote in files.values():
        yield partial(_fetch_one, remote, store, http, lanes, came)
    for source, members in archives.items():
        yield partial(_unpack, source, members, store, http, lanes, came)


def _fetch_one(
    remote: Remote, store: Store, http: Http, lanes: int, came: Callable[[int], None]
) -> dict[str, int]:
    stored = fetch_file(remote, store, http, lanes=lanes, came=came)
    return {stored.sha256: stored.bytes} if stored.fetched else {}


def _unpack(
    source: ArchiveSource,
    members: dict[str, LockedFile],
    store: Store,
    http: Http,
    lanes: int,
    came: Callable[[int], None],
) -> dict[str, int]:
    new: dict[str, int] = {}
    remote = Remote(source.archive, bytes=source.bytes, sha256=source.sha256)
    fetch_file(remote, store, http, lanes=lanes)
    with open_archive(store.blob(source.sha256), source.archive) as archive:
        for name, file in members.items():
            if archive.sizes.get(name) != file.bytes:
                raise InputError(
                    f"holds no such file of {file.bytes} bytes",
                    path=remote.shown,
                    key=name,
                    remedy="lock it anew",
                )
            if not store.has(file.sha256, file.bytes):
                new[file.sha256] = file.bytes
            store.put(partial(archive.pieces, name), f"{remote.shown}: {name}", file.sha256)
            came(file.bytes)
    return new


class _Kilobytes:
    """Counts bytes of many threads, and tells of whole kilobytes."""

    def __init__(self, advance: Callable[[str, int], None]) -> None:
        self._advance, self._bytes, self._lock = advance, 0, threading.Lock()

    def __call__(self, size: int) -> None:
        with self._lock:
            before, self._bytes = self._bytes, self._bytes + size
            self._advance("", self._bytes // 1000 - before // 1000)
