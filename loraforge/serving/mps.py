"""CUDA's multi-process service (MPS) for the engines of a run: kernels of those that share a GPU run side by side.

A daemon of the run's own, in foreground mode and a session of its own, starts a server for its clients, the engines;
they find it by the folder of its pipes. Source: NVIDIA, Multi-Process Service, and nvidia-cuda-mps-control(1).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from loraforge.errors import LoraForgeError, MissingDependencyError, UsageError
from loraforge.files import output_error
from loraforge.serving.guarded import Guarded, deferred_signals, last_lines, status_words
from loraforge.serving.watchdog import members

TOOL = "nvidia-cuda-mps-control"
PIPES, LOGS, GPUS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
_OUTPUT = "output.log"  # what the daemon says, beside its own control.log
_QUIT_S = 40  # for clients to end by themselves (engines have 30) before servers are forced to
_ANSWER_S = 10.0
_POLL_S = 0.05
_LONGEST = 64  # bytes of the path of temporary files: that of a socket in a folder there has 107 at most


class MpsError(LoraForgeError):
    """The MPS daemon did not start, has ended, or did not go away."""


@dataclass(frozen=True)
class Service:
    """A daemon that runs. environment: what makes processes its clients."""

    environment: Mapping[str, str]
    _tool: str
    _process: Guarded

    def check(self) -> None:
        """Raise MpsError where the daemon no longer runs: what starts then would run without it, and say nothing."""
        if (reason := self._ended()) is not None:
            raise MpsError(reason, key="mps", remedy="run the same command again")

    def trouble(self) -> str | None:
        """Why engines that are healthy do not share their GPU by it; None where they do."""
        if (reason := self._ended()) is not None:
            return reason
        servers = self.servers()
        if servers is None:
            return "the MPS daemon does not answer"
        return None if servers else "the MPS daemon has no server: no engine is its client"

    def servers(self) -> list[int] | None:
        """Process ids of the daemon's servers, the first of which starts for its first client; None for no answer."""
        try:
            done = subprocess.run(
                [self._tool],
                input="get_server_list\n",
                capture_output=True,
                text=True,
                timeout=_ANSWER_S,
                env={**os.environ, **self.environment},
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        words = done.stdout.split()
        return [int(word) for word in words if word.isdigit()] if done.returncode == 0 else None

    def _ended(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"the MPS daemon ended with {status_words(code)}"


def find_tool() -> str:
    """The program that is the daemon, and asks one. Raises MissingDependencyError where it is not on PATH."""
    if (found := shutil.which(TOOL)) is None:
        raise MissingDependencyError(
            f"{TOOL} is not on PATH",
            key="mps",
            remedy="put the folder of NVIDIA's driver that has it on PATH, or leave mps out of the experiment",
        )
    return found


@contextmanager
def service(*, start_s: float = 30.0, stop_s: float = 10.0) -> Iterator[Service]:
    """A daemon for the GPUs that this process sees; it and its folder are gone after the block, and where this process
    is killed.

    start_s: seconds it has to answer. stop_s: seconds it has to end after SIGTERM, where it did not when asked.

    Signals wait while it is ended. Raises MissingDependencyError as :func:`find_tool` does, UsageError where this
    process sees no GPU or temporary files have too long a path for sockets, OutputError where no folder can be made,
    MpsError, with the end of its log, where it does not answer in time, and where it does not go away.
    """
    tool = find_tool()
    seen = _renumbered(os.environ.get(GPUS))
    folder: Path | None = None
    process: Guarded | None = None
    try:
        with deferred_signals():
            folder = _folder()
            process = _start(tool, folder, stop_s)
        found = Service({PIPES: str(folder), **seen}, tool, process)
        _wait(found, folder, start_s)
        yield found
    finally:
        with deferred_signals():
            gone = process is None or process.end()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        if process is not None and not gone:
            raise MpsError(f"the MPS daemon left processes {members(process.pid)} behind", key="mps")


def _start(tool: str, folder: Path, stop_s: float) -> Guarded:
    """A daemon with pipes and logs in ``folder``. Raises MpsError where the program cannot be run."""
    try:
        with open(folder / _OUTPUT, "wb") as output:
            return Guarded(
                [tool, "-f"],
                env={**os.environ, PIPES: str(folder), LOGS: str(folder)},
                output=output,
                stop_s=stop_s,
                ask=_quit(tool, folder),
                folder=folder,
            )
    except OSError as error:
        raise MpsError(f"cannot be run ({error.strerror})", path=tool, key="mps") from error


def _wait(found: Service, folder: Path, start_s: float) -> None:
    """Return once a daemon answers. Raises MpsError where it ends before, or takes longer than ``start_s`` seconds."""
    deadline = time.monotonic() + start_s
    while (reason := found._ended()) is None and found.servers() is None:
        if time.monotonic() > deadline:
            reason = f"the MPS daemon does not answer after {start_s:g} s"
            break
        time.sleep(_POLL_S)
    if reason is not None:
        last = last_lines(folder / _OUTPUT) or last_lines(folder / "control.log")
        raise MpsError(f"{reason}; the end of its log:\n{last}" if last else f"{reason}; its log is empty")


def _renumbered(visible: str | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of clients, for a daemon that has another one: it numbers what it sees from 0, for them.

    Raises UsageError where that names no GPU.
    """
    if visible is None:
        return {}
    # as CUDA reads it: up to the first name that is none
    names = list(takewhile(lambda name: name.strip() not in ("", "-1"), visible.split(",")))
    if not names:
        raise UsageError("names no GPU, which mps needs", key=GPUS, remedy="name one, or unset it")
    return {GPUS: ",".join(map(str, range(len(names))))}


def _folder() -> Path:
    """A private folder for pipes and logs. Raises OutputError, and UsageError where its path is too long."""
    if len(os.fsencode(place := tempfile.gettempdir())) > _LONGEST:
        raise UsageError(
            "is too long a path for sockets", path=place, key="TMPDIR", remedy="name a shorter one"
        )
    try:
        return Path(tempfile.mkdtemp(prefix="loraforge-mps-"))
    except OSError as error:
        raise output_error(error, Path(place)) from error


def _quit(tool: str, folder: Path) -> list[str]:
    """A command that ends a daemon and its servers, once they have no clients any more or their time is over."""
    script = f'exec "$0" <<END\nquit -t {_QUIT_S}\nEND'
    return ["env", f"{PIPES}={folder}", "sh", "-c", script, tool]
