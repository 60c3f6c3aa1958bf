"""A process in a session of its own that is gone when this process is, however that went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from loraforge.serving import watchdog

_TAIL = 20  # log lines that an error quotes


class Guarded:
    """A process that runs from here on, with a watchdog beside it.

    line: command line. env: whole environment. output: file that takes both its output streams. stop_s: seconds it has
    to end by itself after SIGTERM before it is killed. ask: command that ends it in its own way, tried before any
    signal. folder: what the watchdog removes once it had to end it.

    Raises OSError where the program cannot be run. Signals that are exceptions have to wait until whoever is to end the
    process has it.
    """

    def __init__(
        self,
        line: Sequence[str],
        *,
        env: Mapping[str, str],
        output: IO[bytes],
        stop_s: float,
        ask: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        self.stop_s, self.ask = stop_s, tuple(ask)
        # before there is anything to leave behind
        self._guard: subprocess.Popen[bytes] | None = _guard(stop_s, folder, ask)
        try:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                # said by the new process itself: this one may be killed before it could
                preexec_fn=self._announce,
            )
        except OSError:
            self._dismiss()
            raise

    @property
    def pid(self) -> int:
        """Process id, which is its session's too."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def end(self) -> bool:
        """End every process of the session as :func:`~loraforge.serving.watchdog.end` does; whether all are gone."""
        if not watchdog.end(self.pid, self.stop_s, lambda: self.poll() is not None, self.ask):
            return False
        self._dismiss()
        return True

    def _announce(self) -> None:
        """Tell the watchdog of the new process, which runs this. Popen has restored SIGPIPE by now: it would be the end
        of it where somebody has killed the watchdog."""
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self._tell(f"{os.getpid()}\n")
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)

    def _tell(self, words: str) -> None:
        """Write to the watchdog; nothing where somebody has killed it."""
        guard = self._guard
        if guard is not None and guard.stdin is not None:
            with suppress(BrokenPipeError):
                guard.stdin.write(words.encode())

    def _dismiss(self) -> None:
        """Let the watchdog go: there is nothing left to watch."""
        self._tell("done\n")
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            guard.wait()


def _guard(stop_s: float, folder: Path | None, ask: Sequence[str]) -> subprocess.Popen[bytes]:
    """A watchdog in a session of its own, which interrupts from a terminal do not reach; this process alone holds the
    other end of its pipe."""
    line = [sys.executable, "-I", "-S", watchdog.__file__, str(stop_s), str(folder or ""), *ask]
    return subprocess.Popen(
        line,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back, and send this process afterwards what came. A thread gets none: nothing to hold."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[signal.Signals] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {
        number: signal.signal(number, lambda number, _: came.append(signal.Signals(number)))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


def status_words(status: int) -> str:
    """An exit status as an error says it: ``exit status 1``, or ``SIGKILL``."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def last_lines(log: Path) -> str:
    """The end of a log, for an error; empty where there is nothing in it, or no log."""
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:])
    except OSError:
        return ""
