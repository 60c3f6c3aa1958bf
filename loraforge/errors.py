"""Errors that a user can mend. Each has an exit code and one line: what, where, remedy.

Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

from pathlib import Path


def one_line(text: str) -> str:
    """``text`` with every character that is not printed, or that turns the direction of what follows, as its number."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else f"\\u{ord(character):04x}" for character in text)


class LoraForgeError(Exception):
    """A user's mistake or a broken input; the CLI prints it as one line and exits with ``exit_code``.

    Parameters
    ----------
    problem: what is wrong, without a final full stop.
    path: the file or folder concerned.
    key: the tensor, JSON key, module or option concerned.
    remedy: what to do about it, without a final full stop.
    """

    exit_code = 1

    def __init__(
        self,
        problem: str,
        *,
        path: str | Path | None = None,
        key: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        self.path = None if path is None else str(path)
        self.key = key
        self.remedy = remedy
        where = ": ".join(part for part in (self.path, self.key) if part)
        line = f"{where}: {problem}" if where else problem
        super().__init__(f"{line}; {remedy}" if remedy else line)


class UsageError(LoraForgeError):
    """The command line or a configuration file asks for something that does not exist."""

    exit_code = 2


class InputError(LoraForgeError):
    """An input file is missing, malformed or holds values that cannot be used."""

    exit_code = 3


class IntegrityError(LoraForgeError):
    """Bytes differ from the hash or size that a lock, manifest or bag states."""

    exit_code = 4


class OutputError(LoraForgeError):
    """The output cannot be written: it exists, is read-only, or the disk is full."""

    exit_code = 5


class BudgetError(LoraForgeError):
    """A budget that is not a budget, or that the rank floor alone exceeds."""

    exit_code = 6


class MissingDependencyError(LoraForgeError):
    """This machine lacks a package, compiler or device that the command needs."""

    exit_code = 7
