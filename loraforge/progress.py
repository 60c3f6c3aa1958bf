"""Progress that suits its reader: a live bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")

console = Console(stderr=True)


def say(message: str) -> None:
    """Print one line for a person on standard error."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)


class Pace:
    """How far a run of ``total`` like units is and how long the rest will take at the pace so far."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._started = total, 0, time.monotonic()

    def step(self) -> str:
        """Count a unit; the words for it."""
        self._done += 1
        spent = time.monotonic() - self._started
        left = spent / self._done * (self._total - self._done)
        return f"{self._done}/{self._total} after {spent:.1f} s, about {left:.0f} s left:"


class Ticker(Protocol):
    """What ``progress`` gives: call ``advance`` once a unit of work, with a few words about it."""

    def advance(self, note: str = "", step: int = 1) -> None: ...


class _Lines:
    """Plain lines for logs: the first, the last, and at most one every ``every_s`` seconds between."""

    def __init__(self, title: str, total: int, every_s: float = 10.0) -> None:
        self.title, self.total, self.every_s = title, total, every_s
        self.done = 0
        self.started = time.monotonic()
        self.printed = self.started

    def advance(self, note: str = "", step: int = 1) -> None:
        self.done += step
        now = time.monotonic()
        if self.done < self.total and now - self.printed < self.every_s:
            return
        self.printed = now
        suffix = f"  {note}" if note else ""
        print(
            f"{self.title}: {self.done}/{self.total} after {now - self.started:.1f} s{suffix}",
            file=sys.stderr,
            flush=True,
        )


class _Bar:
    def __init__(self, bar: Progress, task: int, title: str) -> None:
        self.bar, self.task, self.title = bar, task, title

    def advance(self, note: str = "", step: int = 1) -> None:
        self.bar.update(self.task, advance=step, description=f"{self.title} {note}".rstrip())  # type: ignore[arg-type]


@contextmanager
def progress(title: str, total: int) -> Iterator[Ticker]:
    """Show progress over ``total`` units on standard error; yields a :class:`Ticker`."""
    if not console.is_terminal:
        yield _Lines(title, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield _Bar(bar, bar.add_task(title, total=total), title)


def track(items: Iterable[T], title: str, total: int) -> Iterator[T]:
    """Iterate over ``items`` with progress."""
    with progress(title, total) as ticker:
        for item in items:
            yield item
            ticker.advance()


class Timer:
    """Wall-clock seconds of a ``with`` block, in ``.s``."""

    def __enter__(self) -> Timer:
        self.started = time.perf_counter()
        self.s = 0.0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.s = time.perf_counter() - self.started
