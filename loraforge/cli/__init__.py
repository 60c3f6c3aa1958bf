"""The command line: one file a subcommand, imported only when it is called.

Exit codes are those of :mod:`loraforge.errors`, 130 where interrupted, 143 where terminated; ``loraforge --help`` lists
them, ``docs/compress.md`` explains them.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from loraforge import __version__
from loraforge.errors import InputError, LoraForgeError, UsageError, one_line

EXIT_CODES = (
    "Exit codes: 0 done; 1 a check failed; 2 usage; 3 bad input; 4 changed bytes; 5 output; 6 budget; "
    "7 a missing package or device; 130 interrupted; 143 terminated."
)

# name -> (module, help line); each module has an ``app`` (a typer.Typer with subcommands or one callback)
COMMANDS: dict[str, tuple[str, str]] = {
    "compress": ("compress", "Compress a folder of PEFT adapters, or a locked fleet, under one budget"),
    "inspect": ("inspect", "Show ranks, energy, bytes and the worst modules of a compressed fleet"),
    "fleet": ("fleet", "Lock, verify and train fleets; fetch the base model"),
    "factor": ("factor", "Build the cache of ordered factors and spectra"),
    "moments": ("moments", "Collect moments for the activation and the fisher policies"),
    "allocate": ("allocate", "Choose the retained rank of every module"),
    "refine": ("refine", "Teach a compressed fleet its originals' own answers; this trains"),
    "cts": ("cts", "Fit shared bases to a whole fleet, the baseline that is compared with"),
    "export": ("export", "Write PEFT folders and the retained-rank manifest"),
    "tasks": ("tasks", "Build the task data from the packages that hold them"),
    "eval": ("eval", "Score base, original and compressed adapters with lm-eval"),
    "serve": ("serve", "Serve a fleet of adapters in vLLM"),
    "bench": ("bench", "Time factor construction, serving kernels and serving"),
    "evidence": ("evidence", "Make, promote and index evidence bags"),
    "figure": ("figure", "Draw a figure from an evidence bag"),
    "audit": ("audit", "Re-hash the evidence and recompute every claim"),
    "doctor": ("doctor", "Say what this machine can run and what is missing"),
}


class _LazyGroup(TyperGroup):
    """Lists every command, imports one: ``loraforge --help`` must not import torch."""

    def __init__(self, **stated):  # type: ignore[no-untyped-def]
        super().__init__(**stated)
        names: Any = dict.fromkeys(COMMANDS)
        self.commands = names  # without the commands: what a misspelt one may have meant

    def list_commands(self, ctx):  # type: ignore[no-untyped-def]
        return list(COMMANDS)

    def get_command(self, ctx, name):  # type: ignore[no-untyped-def]
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"loraforge.cli.{COMMANDS[name][0]}")
        command = typer.main.get_command(module.app)
        command.name = name
        return command

    def invoke(self, ctx):  # type: ignore[no-untyped-def]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # here, since typer would exit without a word
            print("interrupted; run the same command again to resume", file=sys.stderr)
            raise typer.Exit(130) from None

    def format_commands(self, ctx, formatter):  # type: ignore[no-untyped-def]
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in COMMANDS.items()])


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=True,  # here alone: every command's own app would add the same options again
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Compress a fleet of LoRA adapters under one shared budget.",
    epilog=EXIT_CODES,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"loraforge {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="print the version and exit")
    ] = False,
) -> None:
    """Compress a fleet of LoRA adapters under one shared budget."""


def _terminate(number: int, frame: FrameType | None) -> None:
    """Leave as an exception, so that nothing half-written remains: schedulers end jobs by SIGTERM.

    At once, though, while a module is imported: torch's own initialisation aborts on an exception, with a core dump.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(128 + number)
        frame = frame.f_back
    sys.exit(128 + number)


@contextmanager
def _whole_output() -> Iterator[None]:
    """Raise OutputError where standard output does not take all that was printed (a full disk)."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        # every file is written through loraforge.files, which translates its errors: this is the stream
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        from loraforge.files import output_error

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again at its end
        raise output_error(error, Path("standard output")) from error


@contextmanager
def _readable_input() -> Iterator[None]:
    """Raise InputError for a place that cannot even be looked at: in a folder that may not be entered, too long a name.

    Whoever asks whether a file is there may meet one, at any depth of what was named.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or error.errno not in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
            raise
        raise InputError(
            f"cannot be read ({error.strerror})",
            path=os.fsdecode(error.filename),
            remedy="name a place that this user may read",
        ) from error


_Misused: Any = typer.BadParameter.__bases__[0]  # typer's UsageError, for which it exports no name


def _run(arguments: list[str] | None) -> Any:
    """Run the command line; what typer has to say about it becomes an error like all others. Gives the exit code, or
    what the command returned."""
    try:
        return app(args=arguments, prog_name="loraforge", standalone_mode=False)
    except _Misused as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # a group without a command: its help
            print(message, file=sys.stderr)
            return error.exit_code
        command = error.ctx.command_path if error.ctx is not None else "loraforge"
        problem, _, guess = " ".join(message.split()).rstrip(".?").partition(". Did you mean ")
        raise UsageError(
            problem,
            remedy=f"{f'did you mean {guess}? ' if guess else ''}`{command} --help` lists what there is",
        ) from error


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; every :class:`LoraForgeError` becomes one line on stderr and its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    if sys.stderr is None:  # closed: what is printed there would go to standard output
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    # names are strangers', and not every terminal takes all of Unicode
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _whole_output(), _readable_input():
            code = _run(arguments)
    except LoraForgeError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
