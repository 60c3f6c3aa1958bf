"""``loraforge serve``: a fleet of adapters in a serving engine of this environment."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Serve a fleet of adapters."""


@app.command()
def vllm(
    fleet: Annotated[
        Path,
        typer.Argument(
            help="what loraforge compress wrote, or a folder of PEFT adapters", show_default=False
        ),
    ],
    extra: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ENGINE ARGUMENTS]", help="the engine's own, last", show_default=False),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="base model: folder or org/model; default: what the fleet states"),
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen at")] = 8000,
    slots: Annotated[
        int | None, typer.Option(min=1, help="adapters of one batch; default: all of the fleet")
    ] = None,
    pool_bytes: Annotated[
        int | None, typer.Option(min=1, help="room for live directions; default: what the fleet needs")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command line, run nothing")] = False,
) -> None:
    """Serve a compressed fleet or a folder of PEFT adapters in vLLM.

    The engine is the one of this environment. Prints its command line, then becomes it: signals and the exit code
    are the engine's.
    """
    from loraforge.errors import UsageError
    from loraforge.runtime.vllm import SWITCH, switch
    from loraforge.runtime.vllm.version import require, require_any, require_plugin
    from loraforge.serving.engines import is_free
    from loraforge.serving.launch import command, launch, read_fleet

    said = switch()
    plugin = said == "1"
    if pool_bytes is not None and not plugin:
        raise UsageError(
            f"is room in LoRAForge's pool, and {SWITCH}={said} serves without it",
            key="--pool-bytes",
            remedy=f"leave it out, or unset {SWITCH}",
        )
    if plugin and not dry_run:  # before anything is read
        require()
        require_plugin()
    arguments = extra or []
    decided = launch(
        read_fleet(fleet),
        base=base,
        host=host,
        port=port,
        slots=slots,
        pool_bytes=pool_bytes,
        plugin=plugin,
        extra=arguments,
    )
    line = command(decided, sys.executable, arguments)
    typer.echo(shlex.join(line))
    if dry_run:
        return
    require_any()
    if not is_free(host, port):
        raise UsageError(
            f"port {port} is in use", key="--port", remedy="end what listens there, or choose another port"
        )
    sys.stdout.flush()
    os.execv(line[0], line)
