"""One file from elsewhere into the store: by ranges, in parallel, from where the last attempt was.

What is not known beforehand (its size, and at the making of a lock its hash) is asked first. The bytes are hashed when
all have come, and only then get a name under which they can be found.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from loraforge.errors import InputError, IntegrityError
from loraforge.files import canonical_json, sha256_text
from loraforge.fleet.download.http import Answer, Http, PassingError, Route, StoppedError, Tries
from loraforge.fleet.download.part import Part, hold
from loraforge.fleet.download.remote import Remote
from loraforge.fleet.store import Store

T = TypeVar("T")

MIN_RUN = 8 << 20  # bytes that are worth a connection of their own
_BUSY_S = 0.05


@dataclass(frozen=True)
class Stored:
    """A file in the store; ``fetched``: whether it came by the call that gives this, and was not found there."""

    sha256: str
    bytes: int
    fetched: bool = field(default=False, compare=False)


def fetch_file(
    remote: Remote,
    store: Store,
    http: Http,
    *,
    lanes: int = 1,
    came: Callable[[int], None] = lambda size: None,
) -> Stored:
    """Put ``remote`` into ``store``, unless it is there; over up to ``lanes`` connections.

    ``came`` is told of bytes as they arrive. Raises RefusedError where the host gives no such file, IntegrityError for
    bytes or a size that are not those stated (nothing of them is kept), InputError where patience is out (what has
    come is kept), OutputError where it cannot be written.
    """
    route, validator = Route(remote), None
    if remote.bytes is None:
        size, validator = _probe(route, http)
        remote = route.remote = replace(remote, bytes=size)
    assert remote.bytes is not None
    path = store.partial / f"{_key(remote, validator)}.part"
    while True:
        if remote.sha256 is not None and store.has(remote.sha256, remote.bytes):
            return Stored(remote.sha256, remote.bytes)
        with hold(path, remote.bytes) as part:
            if part is not None:
                return _Transfer(route, validator, part, http, lanes, came).run(store)
        if http.stop.wait(_BUSY_S):  # another process fetches it
            raise StoppedError


def run_all(http: Http, calls: Sequence[Callable[[], T]], workers: int) -> list[T]:
    """What ``calls`` return, in their order, from ``workers`` threads; where one raises, the others are stopped."""
    with ThreadPoolExecutor(max(1, min(workers, len(calls)))) as pool:
        running = [pool.submit(call) for call in calls]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            if not all(future.done() for future in running):
                http.stop.set()
            for future in running:
                future.cancel()
    ended = [future for future in running if not future.cancelled()]
    if failed := [error for future in ended if (error := future.exception()) is not None]:
        raise next((error for error in failed if not isinstance(error, StoppedError)), failed[0])
    return [future.result() for future in running]


class _Transfer:
    def __init__(
        self,
        route: Route,
        validator: str | None,
        part: Part,
        http: Http,
        lanes: int,
        came: Callable[[int], None],
    ) -> None:
        self._route, self._validator, self._part, self._http = route, validator, part, http
        remote = route.remote
        # whether bytes of two answers are of one version, or will be found out if they are not
        self._sure = any(known is not None for known in (remote.sha256, remote.git_sha1, validator))
        self._lanes, self._came = lanes if self._sure else 1, came
        self._known = threading.Event()  # whether the host gives ranges
        self._whole = False

    def run(self, store: Store) -> Stored:
        remote, part = self._route.remote, self._part
        if remote.sha256 is not None and store.has(remote.sha256, remote.bytes):
            part.drop()  # another process has finished it since
            return Stored(remote.sha256, part.size)
        try:
            self._receive()
        except IntegrityError:
            part.drop()
            raise
        except BaseException:
            if not part.begun:
                part.drop()
            raise
        sha256 = part.hash("sha256")
        self._require("SHA-256", sha256, remote.sha256)
        if remote.git_sha1 is not None:
            self._require("git SHA-1", part.hash("git"), remote.git_sha1)
        part.finish(store.blob(sha256))
        return Stored(sha256, part.size, fetched=True)

    def _require(self, kind: str, found: str, stated: str | None) -> None:
        if stated in (None, found):
            return
        self._part.drop()
        raise IntegrityError(
            f"other bytes came than locked: {kind} is {found}, not {stated}; nothing of them is kept",
            path=self._route.remote.shown,
            remedy="try again; if it stays so, the file was replaced: ask its owner, or lock it anew",
        )

    def _receive(self) -> None:
        runs = _divided(self._part.missing(), self._lanes)
        if not runs:
            return
        calls = [partial(self._first, *runs[0]), *(partial(self._later, *run) for run in runs[1:])]
        run_all(self._http, calls, self._lanes)

    def _first(self, start: int, stop: int) -> None:
        try:
            self._run(start, stop)
        finally:
            self._known.set()

    def _later(self, start: int, stop: int) -> None:
        """A run that waits until the first has shown that there are ranges: else that one brings the whole."""
        self._known.wait()
        if not self._whole:
            self._run(start, stop)

    def _run(self, start: int, stop: int) -> None:
        tries = Tries(self._http, self._route.remote.shown)
        at = furthest = start
        while at < stop:
            try:
                with self._http.get(self._route, at, stop, self._validator) as answer:
                    self._check(answer)
                    if not answer.ranged:
                        self._whole, at, stop = True, 0, self._part.size
                    self._known.set()
                    for piece in answer.pieces:
                        self._take(piece, at, stop)
                        at += len(piece)
                        new = max(0, at - furthest)  # what is sent again is no progress
                        furthest += new
                        self._came(new)
                        tries.progressed(new)
                    if at < stop:
                        raise PassingError(f"ended after {at} of {self._part.size} bytes")
            except PassingError as error:
                tries.failed(error)
                at = at if self._sure else start

    def _take(self, piece: bytes, at: int, stop: int) -> None:
        if self._http.stop.is_set():
            raise StoppedError
        if at + len(piece) > stop:
            raise self._wrong_size(f"more than {stop}")
        self._part.write(at, piece)
        self._part.arrived(at, at + len(piece))

    def _check(self, answer: Answer) -> None:
        if answer.size not in (None, self._part.size):
            raise self._wrong_size(str(answer.size))
        # a host may leave it out of a part, which is of the version that was asked for
        same = (self._validator, None) if answer.ranged else (self._validator,)
        if self._validator is not None and answer.validator not in same:
            raise InputError(
                "changed while it was fetched", path=self._route.remote.shown, remedy="run the command again"
            )

    def _wrong_size(self, found: str) -> IntegrityError:
        return IntegrityError(
            f"is {found} bytes, locked are {self._part.size}",
            path=self._route.remote.shown,
            remedy="the file was replaced: ask its owner, or lock it anew with `loraforge fleet lock`",
        )


def _probe(route: Route, http: Http) -> tuple[int, str | None]:
    """Size and version of a file of which only the address is known."""

    def ask() -> tuple[int | None, str | None]:
        with http.get(route, 0, 1) as answer:
            if answer.ranged:
                deque(answer.pieces, maxlen=0)  # so that the connection can be used again
            return answer.size, answer.validator

    size, validator = http.patiently(ask, route.remote.shown)
    if size is None:
        raise InputError(
            "comes without its size, so that its end could not be told from a lost connection",
            path=route.remote.shown,
            remedy="name a host that sends Content-Length",
        )
    return size, validator


def _key(remote: Remote, validator: str | None) -> str:
    """What a part is called: two attempts share one only where they are of the same bytes for certain."""
    if remote.sha256 is not None:
        return remote.sha256
    if (version := remote.git_sha1 or validator) is None:
        return secrets.token_hex(32)
    return sha256_text(canonical_json([remote.url, version, remote.bytes]))


def _divided(runs: list[tuple[int, int]], lanes: int) -> list[tuple[int, int]]:
    """Split runs of missing bytes, at multiples of :data:`MIN_RUN`, for ``lanes`` connections."""
    total = sum(stop - start for start, stop in runs)
    step = max(MIN_RUN, -(-total // (lanes * MIN_RUN)) * MIN_RUN)
    return [(begin, min(stop, begin + step)) for start, stop in runs for begin in range(start, stop, step)]
