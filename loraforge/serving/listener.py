"""Whose a listening port is: between the look at a free port and an engine's own, another program may take it.

Needs Linux's /proc.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from loraforge.serving.watchdog import members

_LISTEN = "0A"  # state of a row of /proc/net/tcp
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def listens(session: int, port: int) -> bool:
    """Whether a process of a session holds a socket that listens at a port, of whatever address."""
    wanted = _sockets(port)
    for process in members(session):
        with suppress(OSError):  # gone meanwhile
            for file in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    found = _SOCKET.fullmatch(str(file.readlink()))
                    if found is not None and found[1] in wanted:
                        return True
    return False


def _sockets(port: int) -> set[str]:
    """Inodes of the sockets that listen at a port."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without it
            for row in Path("/proc/net", table).read_text().splitlines()[1:]:
                cells = row.split()
                if cells[3] == _LISTEN and int(cells[1].rpartition(":")[2], 16) == port:
                    found.add(cells[9])
    return found
