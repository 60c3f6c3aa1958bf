"""Whose a listening port is: between the look at a free port and an engine's own, another program may take it.

Reads Linux's /proc, as far as it tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from loraforge.serving.watchdog import members

_LISTEN = "0A"  # state of a row of /proc/net/tcp
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def stranger(session: int, port: int) -> int | None:
    """A process of another session that listens at a port, of whatever address, where none of ``session`` does.

    None also where nobody can be told to: sandboxes hide whose a socket is, and so do other users' processes.
    """
    found = list(_listeners(port))
    return None if not found or set(found) & set(members(session)) else found[0]


def _listeners(port: int) -> Iterator[int]:
    wanted = _sockets(port)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if any(_inode(file) in wanted for file in (process / "fd").iterdir()):
                yield int(process.name)


def _inode(file: Path) -> str | None:
    with suppress(OSError):  # closed meanwhile
        if (found := _SOCKET.fullmatch(str(file.readlink()))) is not None:
            return found[1]
    return None


def _sockets(port: int) -> set[str]:
    """Inodes of the sockets that listen at a port."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # a kernel without it
            for row in Path("/proc/net", table).read_text().splitlines()[1:]:
                cells = row.split()
                if cells[3] == _LISTEN and int(cells[1].rpartition(":")[2], 16) == port:
                    found.add(cells[9])
    return found
