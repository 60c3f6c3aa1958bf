"""The hub, through its own library: revisions resolved to commits, what a commit holds, and where its files lie.

``HF_ENDPOINT``, ``HF_TOKEN`` and the login of ``hf auth login`` are that library's, and honoured as there. The token
goes to the endpoint's host alone. Bytes come as from any other host (:mod:`~loraforge.fleet.download.transfer`).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from loraforge import __version__
from loraforge.errors import InputError, MissingDependencyError, UsageError
from loraforge.fleet.download.address import check_url, host_of
from loraforge.fleet.download.http import PASSING, Http, PassingError, RefusedError, asked_to_wait
from loraforge.fleet.download.remote import Remote

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HubFile:
    """What the hub says of a file: its size, and SHA-256 (large files) or the SHA-1 of its git object (small ones)."""

    bytes: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True)
class Repository:
    """A repository at a commit: its files by path."""

    name: str
    commit: str
    files: Mapping[str, HubFile]


class Hub:
    """The hub at its endpoint. Asks of one revision once; threads may share it."""

    def __init__(self, http: Http) -> None:
        """Raises MissingDependencyError without huggingface_hub, UsageError for an endpoint or token that is none."""
        try:
            import huggingface_hub
            from huggingface_hub import constants
        except ImportError as error:
            raise MissingDependencyError(
                f"{error.name} is not installed, which the hub needs", remedy="pip install 'loraforge[hub]'"
            ) from error
        self._http, self._lock = http, threading.Lock()
        self._asking: dict[tuple[str, str], threading.Lock] = {}
        self._asked: dict[tuple[str, str], Repository] = {}
        self.endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        try:
            if urlsplit(check_url(self.endpoint)).query:
                raise ValueError("must have no part after ?")
        except ValueError as error:
            raise UsageError(str(error), key="HF_ENDPOINT") from error
        try:
            token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else huggingface_hub.get_token()
        except Exception as error:  # an exchange of tokens that its library was told to make, in many ways
            raise UsageError(
                f"the hub's token cannot be had ({type(error).__name__})",
                remedy="set HF_TOKEN, or log in again",
            ) from None
        if token:
            http.tokens.add_hub(self.endpoint, token)
        private = host_of(self.endpoint).private
        self._api: HfApi = huggingface_hub.HfApi(
            self.endpoint,
            token=token if token and private else False,
            library_name="loraforge",
            library_version=__version__,
        )

    def repository(self, name: str, revision: str) -> Repository:
        """What ``name`` is at ``revision`` (a branch, tag or commit) now.

        Raises RefusedError where the hub does not say, InputError where it says what cannot be.
        """
        with self._lock:
            once = self._asking.setdefault((name, revision), threading.Lock())
        with once:
            if (name, revision) not in self._asked:
                shown = f"hub:{name}@{revision}"
                self._asked[name, revision] = self._http.patiently(
                    lambda: self._ask(name, revision, shown), shown
                )
            return self._asked[name, revision]

    def remote(self, repository: str, commit: str, path: str, file: HubFile) -> Remote:
        """The file ``path`` of a repository at ``commit``, to download."""
        from huggingface_hub import hf_hub_url

        return Remote(
            hf_hub_url(repository, path, revision=commit, endpoint=self.endpoint),
            name=f"hub:{repository}@{commit[:12]}/{path}",
            bytes=file.bytes,
            sha256=file.sha256,
            git_sha1=file.git_sha1,
            commit=commit,
        )

    def _ask(self, name: str, revision: str, shown: str) -> Repository:
        import httpx
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            OfflineModeIsEnabled,
            RevisionNotFoundError,
        )

        timeout = self._http.patience.read_s
        try:
            info = self._api.model_info(name, revision=revision, files_metadata=True, timeout=timeout)
        except RevisionNotFoundError as error:
            raise RefusedError(
                404, "has no such revision (404)", path=shown, remedy="name a branch, tag or commit of it"
            ) from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in PASSING:
                raise PassingError(f"answers {status}", asked_to_wait(error.response.headers)) from None
            if isinstance(error, GatedRepoError):
                status = 403
            raise self._http.refused(
                status, self.endpoint, Remote(self.endpoint, name=shown, commit=revision)
            ) from None
        except httpx.TransportError as error:
            raise PassingError(f"the connection failed ({type(error).__name__})") from None
        except OfflineModeIsEnabled as error:
            raise InputError(
                "cannot be asked in offline mode", path=shown, remedy="unset HF_HUB_OFFLINE"
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._nonsense(shown) from error
        if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha) or info.siblings is None:
            raise self._nonsense(shown)
        if _COMMIT.fullmatch(revision) and info.sha != revision:
            raise InputError(f"the hub answers with another commit, {info.sha}", path=shown)
        try:
            return Repository(name, info.sha, {file.rfilename: _stated(file) for file in info.siblings})
        except (TypeError, ValueError) as error:
            raise self._nonsense(shown) from error

    def _nonsense(self, shown: str) -> InputError:
        return InputError(
            "the endpoint does not answer as the hub does", path=shown, remedy="check HF_ENDPOINT"
        )


def _stated(file: Any) -> HubFile:
    """Raises ValueError for sizes and hashes that are none."""
    if file.lfs is not None:
        if not isinstance(file.lfs.size, int) or not _SHA256.fullmatch(file.lfs.sha256):
            raise ValueError("not an LFS object")
        return HubFile(file.lfs.size, file.lfs.sha256, None)
    if not isinstance(file.size, int) or not _COMMIT.fullmatch(file.blob_id):
        raise ValueError("not a git object")
    return HubFile(file.size, None, file.blob_id)
