"""Addresses that a lock may hold: plain http(s) URLs without secrets. No network here, and no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlsplit

_PORTS = {"http": 80, "https": 443}
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")
_SECRET = re.compile(r"token|auth|key|sig|secret|passw|credential|cookie|session", re.IGNORECASE)
_FORBIDDEN = re.compile(r"[^\x21-\x7e]|[\"<>\\^`{|}]")
MAX_LENGTH = 2048


@dataclass(frozen=True)
class Host:
    """Whom a token belongs to: scheme, name and port."""

    scheme: str
    name: str
    port: int

    @property
    def private(self) -> bool:
        """Whether nobody between here and there can read what is sent."""
        return self.scheme == "https" or _LOOPBACK.fullmatch(self.name) is not None

    @property
    def variable(self) -> str:
        """Environment variable that may hold a token for this host: dots as ``_``, hyphens as ``__``."""
        name = re.sub(r"[.:]", "_", self.name.replace("-", "__")).upper()
        port = "" if self.port == _PORTS[self.scheme] else f"_{self.port}"
        return f"LORAFORGE_TOKEN_{name}{port}"


def host_of(url: str) -> Host:
    """The host of an address that :func:`check_url` takes."""
    parts = urlsplit(url)
    return Host(parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme])


def check_url(url: str) -> str:
    """Return ``url``; raise ValueError, which repeats nothing of it, where it is no address for a lock."""
    if len(url) > MAX_LENGTH or _FORBIDDEN.search(url):
        raise ValueError("must be one address in plain ASCII, with other characters percent-encoded")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError("is not an address") from error
    if parts.scheme not in _PORTS or not parts.hostname or port == 0:
        raise ValueError("must begin with https:// or http:// and name a host")
    if "@" in parts.netloc:
        raise ValueError("must hold no user name or password: put a token into the environment")
    if parts.fragment:
        raise ValueError("must have no part after #")
    if any(_SECRET.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        raise ValueError("must not be signed or hold a token: put the token into the environment")
    return url


def check_folder_url(url: str) -> str:
    """As :func:`check_url`, for an address that file names are put after."""
    if urlsplit(check_url(url)).query:
        raise ValueError("must have no part after ?, for it is a folder")
    return url


def shown_url(url: str) -> str:
    """An address as logs and errors may show it: without its query, which may be signed."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def inside(folder: str, name: str) -> str:
    """The address of the file ``name`` in the folder at the address ``folder``."""
    return f"{folder.rstrip('/')}/{quote(name)}"
