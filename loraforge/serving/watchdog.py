"""End a session of processes when whoever started it is gone, however it went: SIGKILL leaves no one to end an engine.

A process of its own: ``python watchdog.py STOP_S [FOLDER [ASK ...]]``, whose standard input is a pipe that the starter
alone holds the other end of. What it hears first is the session's id, from the session's first process; the pipe's end
without a further word says that the starter died. ASK is a command that asks the session to end; FOLDER, unless empty,
is removed after that. Needs the standard library alone, and Linux's /proc.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.1
GONE_S = 10.0  # for the kernel to take away what was killed
ASK_S = 60.0  # for a command that asks a session to end


def members(session: int) -> list[int]:
    """Processes of a session that are not ended: what was reparented is found there too."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            state, _, _, of = entry.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(entry.parent.name))
    return found


def wait(holds: Callable[[], bool], for_s: float) -> bool:
    """Whether ``holds`` came true within so many seconds."""
    deadline = time.monotonic() + for_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def end(
    session: int, stop_s: float, gone: Callable[[], bool] = lambda: True, ask: Sequence[str] = ()
) -> bool:
    """SIGTERM to every process of a session, SIGKILL after ``stop_s`` seconds; whether all ended, and ``gone``.

    ask: command that asks it to end in its own way, before that.
    """
    if ask and members(session):
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ask,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=ASK_S,
            )
    for number, for_s in ((signal.SIGTERM, stop_s), (signal.SIGKILL, GONE_S)):
        for member in members(session):
            with suppress(ProcessLookupError):
                os.kill(member, number)
        if wait(lambda: gone() and not members(session), for_s):
            return True
    return False


def watch(pipe: int, stop_s: float, folder: str = "", *ask: str) -> None:
    """Read the session's id, wait, and end it where nothing more is said before the pipe ends; remove the folder."""
    said = b""
    while piece := os.read(pipe, 64):
        said += piece
    words = said.split()
    if b"done" in words:
        return
    if words:
        end(int(words[0]), stop_s, ask=ask)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.stdin.fileno(), float(sys.argv[1]), *sys.argv[2:])
