"""Which token goes where: each to its own host, over a connection that nobody can read."""

from __future__ import annotations

from collections.abc import Mapping

from loraforge.errors import UsageError
from loraforge.fleet.download.address import Host, host_of


class Tokens:
    """Tokens of the environment, one a host, and the hub's.

    ``environment`` is read for the variables of :attr:`Host.variable` when a host is first asked.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._hub: dict[Host, str] = {}

    def add_hub(self, endpoint: str, token: str, variable: str = "HF_TOKEN") -> None:
        """Take the hub's ``token`` for the host of ``endpoint``, and no other."""
        self._hub[host_of(endpoint)] = _checked(token, variable)

    def header(self, url: str) -> dict[str, str]:
        """The header that authorises a request of ``url``; none where no token belongs to its host, or where it would
        travel in the clear. Raises UsageError, which names the variable alone, for a token that is none."""
        host = host_of(url)
        if not host.private or (token := self._of(host)) is None:
            return {}
        return {"Authorization": f"Bearer {token}"}

    def withheld(self, url: str) -> bool:
        """Whether a token for the host of ``url`` is not sent because the address is plain http."""
        host = host_of(url)
        return not host.private and self._of(host) is not None

    def _of(self, host: Host) -> str | None:
        if host in self._hub:
            return self._hub[host]
        given = self._environment.get(host.variable, "").strip()
        return _checked(given, host.variable) if given else None


def _checked(token: str, variable: str) -> str:
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("is not a token: one word of plain characters", key=variable)
    return token
