"""One HTTP request as a download needs it: ranges, redirects that leave tokens behind, and patience.

Bodies are taken as they are sent (no content coding), so that offsets are those of the file. Redirects are followed
here and not by the library: each hop gets the token of its own host, and an address that the hub has signed is shown
nowhere.
"""

from __future__ import annotations

import email.utils
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import urljoin, urlsplit

from loraforge import __version__
from loraforge.errors import InputError, IntegrityError, MissingDependencyError
from loraforge.fleet.download.address import host_of, shown_url
from loraforge.fleet.download.remote import Remote
from loraforge.fleet.download.tokens import Tokens
from loraforge.progress import say

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses that may be another a moment later
_MAX_REDIRECTS = 10
_PROGRESS = 1 << 16  # bytes: a host that gives fewer before it fails again is not getting better
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_SIZE = re.compile(r"bytes \*/(\d+)")


@dataclass(frozen=True)
class Patience:
    """How long to go on: ``attempts`` without progress, pauses of ``first_s`` doubled up to ``longest_s`` (a host may
    ask for up to ``asked_s``), ``connect_s`` and ``read_s`` of silence."""

    attempts: int = 6
    first_s: float = 0.5
    longest_s: float = 30.0
    asked_s: float = 300.0
    connect_s: float = 15.0
    read_s: float = 30.0


class PassingError(Exception):
    """What may go better the next time; ``wait_s`` where the host has said when."""

    def __init__(self, problem: str, wait_s: float | None = None) -> None:
        super().__init__(problem)
        self.problem, self.wait_s = problem, wait_s


class RefusedError(InputError):
    """The host will not give the file; ``status`` says why."""

    def __init__(self, status: int, problem: str, *, path: str, remedy: str) -> None:
        super().__init__(problem, path=path, remedy=remedy)
        self.status = status


class StoppedError(Exception):
    """Another download has failed, or the user has had enough."""


@dataclass(frozen=True)
class Answer:
    """The begin of a body: the ``ranged`` bytes that were asked for, or the whole file; ``size`` is the whole file's,
    where the host says it, and ``validator`` stands for the version that it is of."""

    ranged: bool
    size: int | None
    validator: str | None
    pieces: Iterator[bytes]


class Route:
    """Where a file's bytes lie: its address, and where that led the last time, so that a hub is asked once."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.found: str | None = None


class Http:
    """Connections, shared by threads. A context manager."""

    def __init__(self, tokens: Tokens, *, connections: int = 8, patience: Patience | None = None) -> None:
        """Raises MissingDependencyError without httpx."""
        try:
            import httpx
        except ImportError as error:
            raise MissingDependencyError(
                "httpx is not installed, which downloads need", remedy="pip install 'loraforge[hub]'"
            ) from error
        # they write whole addresses, and redirects lead to signed ones
        for name in ("httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self.tokens, self.connections, self.patience = tokens, connections, patience or Patience()
        self.stop = threading.Event()
        wait = httpx.Timeout(self.patience.read_s, connect=self.patience.connect_s, pool=None)
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.Client(follow_redirects=False, timeout=wait, limits=limits)
        self._errors = httpx.TransportError
        self._unreachable, self._silent = httpx.ConnectError, httpx.ReadTimeout
        self._no_address = (httpx.InvalidURL, UnicodeError)  # the latter of international names

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop.set()
        self._client.close()

    @contextmanager
    def get(
        self, route: Route, start: int = 0, stop: int | None = None, validator: str | None = None
    ) -> Iterator[Answer]:
        """Ask for the bytes of a file from ``start`` (to ``stop``, exclusive); of the version ``validator``, or whole.

        Raises PassingError for what is worth another try, also while the body is read; RefusedError for a status that
        is not, IntegrityError for a file of another size or commit.
        """
        remote, known = route.remote, route.found
        url = known or remote.url
        for _ in range(_MAX_REDIRECTS):
            headers = {
                "Accept-Encoding": "identity",
                "User-Agent": f"loraforge/{__version__}",
                "Range": f"bytes={start}-{'' if stop is None else stop - 1}",
                **({} if validator is None else {"If-Range": validator}),
                **self.tokens.header(url),
            }
            with (
                self._errors_told(remote.shown),
                self._client.stream("GET", url, headers=headers) as response,
            ):
                self._check_commit(remote, response)
                if response.has_redirect_location:
                    url = _followed(url, response.headers["Location"], remote)
                    continue
                if response.status_code in (401, 403, 404, 410) and known is not None:
                    if route.found == known:
                        route.found = None  # a signed address has run out: its owner is asked again
                    raise PassingError(f"no longer gives the file ({response.status_code})", wait_s=0)
                answer = self._answer(response, url, remote, start)
                route.found = None if url == remote.url else url
                yield answer
                return
        raise InputError(
            f"redirects more than {_MAX_REDIRECTS} times", path=remote.shown, remedy="check the address"
        )

    def patiently(self, ask: Callable[[], T], shown: str) -> T:
        """What ``ask`` returns, tried again where it raises PassingError. Raises InputError when patience is out."""
        tries = Tries(self, shown)
        while True:
            try:
                return ask()
            except PassingError as error:
                tries.failed(error)

    @contextmanager
    def _errors_told(self, shown: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            said = str(error)
            if "CERTIFICATE_VERIFY_FAILED" in said:
                raise InputError(
                    "the host's certificate is not trusted here",
                    path=shown,
                    remedy="install the certificate of its authority, or name it in SSL_CERT_FILE",
                ) from None
            # other messages may quote an address that is signed
            why = _one_line(said) if isinstance(error, self._unreachable) else "broke off, or spoke no HTTP"
            if isinstance(error, self._silent):
                why = f"nothing came for {self.patience.read_s:g} s"
            raise PassingError(f"the connection failed ({why})") from None
        except self._no_address:
            raise InputError("is, or leads to, a host of no valid name", path=shown) from None

    def _check_commit(self, remote: Remote, response: httpx.Response) -> None:
        said = response.headers.get("X-Repo-Commit")
        if remote.commit is not None and said not in (None, remote.commit):
            raise IntegrityError(
                f"the hub gives the file of commit {_one_line(said)}, locked is {remote.commit}",
                path=remote.shown,
                remedy="make the lock anew with `loraforge fleet lock`",
            )

    def _answer(self, response: httpx.Response, url: str, remote: Remote, start: int) -> Answer:
        status, headers = response.status_code, response.headers
        if status in PASSING:
            raise PassingError(f"answers {status}", asked_to_wait(headers))
        if status == 416:
            sized = _SIZE.fullmatch(headers.get("Content-Range", ""))
            return Answer(True, int(sized[1]) if sized else start, _validator(headers), iter(()))
        if status not in (200, 206):
            raise self.refused(status, url, remote)
        if headers.get("Content-Encoding", "identity") != "identity":
            raise InputError(
                "is sent in another coding than asked for",
                path=remote.shown,
                remedy="serve the file as it is",
            )
        length = headers.get("Content-Length", "")
        size = int(length) if re.fullmatch(r"\d{1,18}", length) else None
        if status == 206:
            given = _RANGE.fullmatch(headers.get("Content-Range", ""))
            if given is None or int(given[1]) != start:
                raise InputError("answers another range than asked for", path=remote.shown)
            size = None if given[2] == "*" else int(given[2])
        return Answer(status == 206, size, _validator(headers), response.iter_raw())

    def refused(self, status: int, url: str, remote: Remote) -> RefusedError:
        """The error for a status that will not pass."""
        hub = remote.commit is not None
        variable = "HF_TOKEN" if hub else host_of(remote.url).variable
        problem, remedy = {
            401: ("wants a token (401)", f"check the name, and set {variable} to a token that may read it"),
            403: (
                "is forbidden (403)",
                ("accept the terms on the repository's page, and " if hub else "")
                + f"set {variable} to a token that may read it",
            ),
            404: ("was not found (404)", "check the name" + (" and the revision" if hub else "")),
        }.get(status, (f"cannot be had (the host answers {status})", "check the address"))
        if self.tokens.withheld(url):
            remedy = f"use an https address: the token in {variable} is not sent in the clear"
        return RefusedError(status, problem, path=remote.shown, remedy=remedy)


class Tries:
    """Attempts at one thing, and the pauses between."""

    def __init__(self, http: Http, shown: str) -> None:
        self._http, self._shown, self._failed, self._came = http, shown, 0, 0

    def progressed(self, size: int) -> None:
        """Bytes have come: once there are enough, patience is new."""
        self._came += size
        if self._came >= _PROGRESS:
            self._failed = self._came = 0

    def failed(self, error: PassingError) -> None:
        """Wait for the next attempt. Raises InputError where there is none, StoppedError where nobody waits for it."""
        patience = self._http.patience
        self._failed += 1
        if self._failed >= patience.attempts:
            raise InputError(
                f"{error.problem}, and has {self._failed} times in a row",
                path=self._shown,
                remedy="run the same command again later: what has come is kept",
            ) from None
        pause = min(patience.longest_s, patience.first_s * 2 ** (self._failed - 1)) * random.uniform(0.5, 1)
        wait = pause if error.wait_s is None else error.wait_s
        if wait > patience.asked_s:
            raise InputError(
                f"{error.problem} and asks to wait {wait:.0f} s",
                path=self._shown,
                remedy="run the same command again then: what has come is kept",
            ) from None
        if wait >= 5:
            say(f"{self._shown}: {error.problem}; trying again in {wait:.0f} s")
        if self._http.stop.wait(wait):
            raise StoppedError


def tokens_of_environment() -> Tokens:
    """The tokens that this process was started with."""
    return Tokens(os.environ)


def _followed(url: str, location: str, remote: Remote) -> str:
    target = urljoin(url, location)
    try:
        parts = urlsplit(target)
        named = parts.hostname is not None and parts.port != 0
    except ValueError:
        named = False
    if not named or parts.scheme not in ("http", "https") or "@" in parts.netloc or not target.isascii():
        raise InputError("redirects to what is no address", path=remote.shown)
    if parts.scheme == "http" and host_of(url).scheme == "https":
        raise InputError(
            f"redirects from https to plain http ({shown_url(target)})",
            path=remote.shown,
            remedy="name a host that keeps to https",
        )
    return target


def _validator(headers: httpx.Headers) -> str | None:
    """A strong ETag or, failing that, nothing: only the former vouches for every byte."""
    etag: str = headers.get("ETag", "")
    return etag if re.fullmatch(r'"[\x21\x23-\x7e]{1,200}"', etag) else None


def asked_to_wait(headers: httpx.Headers) -> float | None:
    """Seconds that ``Retry-After`` asks for, as a number or a date, or the hub's ``RateLimit``."""
    text: str = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    if text:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None
    limit = re.search(r";\s*r=0\s*;\s*t=(\d{1,9})", headers.get("RateLimit", ""))
    return float(limit[1]) if limit else None


def _one_line(text: str | None) -> str:
    return "".join(character if character.isprintable() else " " for character in text or "")[:200]
