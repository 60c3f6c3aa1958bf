"""One file elsewhere: its address, and all that is known of its bytes before they come."""

from __future__ import annotations

from dataclasses import dataclass

from loraforge.fleet.download.address import shown_url


@dataclass(frozen=True)
class Remote:
    """A file to download.

    Parameters
    ----------
    url: its address.
    name: how messages name it; default: the address without its query.
    bytes, sha256: as locked, or as the hub states them; None where nobody does.
    git_sha1: the hash of its git object, which the hub states of small files.
    commit: what the hub must say that the file is of.
    """

    url: str
    name: str = ""
    bytes: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    commit: str | None = None

    @property
    def shown(self) -> str:
        return self.name or shown_url(self.url)
