"""What a check is: it looks at one concern and yields the claims that failed, with the file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from loraforge.errors import LoraForgeError
from loraforge.evidence.bag import Bag


@dataclass(frozen=True)
class Failure:
    """A claim that does not hold, and the file that shows it."""

    path: Path
    claim: str


@dataclass(frozen=True)
class Scope:
    """What is audited: a root with its index (or None for a lone bag), its bags, fleet locks, figure folders."""

    root: Path | None
    bags: tuple[Bag, ...]
    locks: tuple[Path, ...] = ()
    figures: tuple[Path, ...] = ()


class Check(ABC):
    """One concern of the audit; ``title`` is what the report calls it."""

    title: ClassVar[str]

    @abstractmethod
    def run(self, scope: Scope) -> Iterator[Failure]:
        """Yield every claim that failed. Bad bytes must be a failure, never an exception."""

    @abstractmethod
    def count(self, scope: Scope) -> int:
        """How many things the check looks at; a check of nothing is not reported as passed."""


def guarded(path: Path, look: Callable[[], Iterator[Failure]]) -> Iterator[Failure]:
    """Run one look at ``path``; what a broken file raises becomes a failure of that file.

    LoraForgeError is what readers raise. The rest is what arbitrary bytes can still provoke in JSON, numbers and
    text (too deep nesting, an integer too long, a surrogate); programming errors are not among them.
    """
    try:
        yield from look()
    except LoraForgeError as error:
        claim = f"{error.key}: {error.problem}" if error.key else error.problem
        yield Failure(Path(error.path) if error.path else path, claim)
    except (OSError, ValueError, RecursionError, OverflowError) as error:
        yield Failure(
            path,
            f"cannot be read ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})",
        )
