"""``loraforge serve``: a fleet of adapters in a serving engine of this environment."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)

Fleet = Annotated[
    Path,
    typer.Argument(help="what loraforge compress wrote, or a folder of PEFT adapters", show_default=False),
]
Extra = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ENGINE ARGUMENTS]", help="the engine's own, last", show_default=False),
]
Base = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="base model: folder or org/model; default: what the fleet states"),
]
Host = Annotated[str, typer.Option(help="address to listen at")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="port to listen at")]
Slots = Annotated[int | None, typer.Option(min=1, help="adapters of one batch; default: all of the fleet")]
PoolBytes = Annotated[
    int | None, typer.Option(min=1, help="room for live directions; default: what the fleet needs")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the command line, run nothing")]


@app.callback()
def _group() -> None:
    """Serve a fleet of adapters."""


@app.command()
def vllm(
    fleet: Fleet,
    extra: Extra = None,
    base: Base = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    slots: Slots = None,
    pool_bytes: PoolBytes = None,
    dry_run: DryRun = False,
) -> None:
    """Serve a compressed fleet or a folder of PEFT adapters in vLLM.

    The engine is the one of this environment. Prints its command line, then becomes it: signals and the exit code
    are the engine's.
    """
    from loraforge.runtime.vllm import SWITCH, switch
    from loraforge.runtime.vllm.version import require, require_any, require_plugin, require_torchvision
    from loraforge.serving.launch import command, launch, read_fleet

    plugin = _has_pool(switch(), SWITCH, pool_bytes)
    if plugin and not dry_run:  # before anything is read
        require()
        require_plugin()
        require_torchvision()
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
    if not dry_run:
        require_any()
    _become(command(decided, sys.executable, arguments), host, port, dry_run=dry_run)


@app.command()
def sglang(
    fleet: Fleet,
    extra: Extra = None,
    base: Base = None,
    host: Host = "127.0.0.1",
    port: Port = 30000,
    slots: Slots = None,
    pool_bytes: PoolBytes = None,
    dry_run: DryRun = False,
) -> None:
    """Serve a compressed fleet or a folder of PEFT adapters in SGLang.

    The engine is the one of this environment. Prints its command line, then becomes it: signals and the exit code
    are the engine's.
    """
    from loraforge.errors import UsageError
    from loraforge.runtime.sglang import SWITCH, switch
    from loraforge.runtime.sglang.options import POOL_BYTES, Options
    from loraforge.runtime.sglang.version import require, require_any, require_plugin
    from loraforge.serving.launch import launch, read_fleet
    from loraforge.serving.launch_sglang import BASE_SLOTS, command

    plugin = _has_pool(switch(), SWITCH, pool_bytes)
    if plugin and POOL_BYTES in os.environ:
        raise UsageError("is decided by loraforge serve sglang", key=POOL_BYTES, remedy="pass --pool-bytes")
    pool = (
        Options.of(os.environ).pool if plugin else None
    )  # what means nothing is refused before anything is read
    if plugin and not dry_run:
        require()
        require_plugin()
    arguments, served = extra or [], read_fleet(fleet)
    decided = launch(
        served,
        base=base,
        host=host,
        port=port,
        slots=(slots or len(served)) + BASE_SLOTS,
        pool_bytes=pool_bytes,
        plugin=plugin,
        extra=arguments,
        max_ranks=None,
        pool=pool,
    )
    if not dry_run:
        require_any()
    _become(command(decided, sys.executable, arguments), host, port, dry_run=dry_run)


def _has_pool(said: str, switch: str, pool_bytes: int | None) -> bool:
    """Whether the engine is served through LoRAForge. said: value of ``switch``. Raises UsageError for room in a pool
    that there is not."""
    from loraforge.errors import UsageError

    if pool_bytes is not None and said != "1":
        raise UsageError(
            f"is room in LoRAForge's pool, and {switch}={said} serves without it",
            key="--pool-bytes",
            remedy=f"leave it out, or unset {switch}",
        )
    return said == "1"


def _become(line: Sequence[str], host: str, port: int, *, dry_run: bool) -> None:
    """Print the engine's command line and replace this process by it."""
    from loraforge.errors import UsageError
    from loraforge.serving.engines import is_free

    typer.echo(shlex.join(line))
    if dry_run:
        return
    if not is_free(host, port):
        raise UsageError(
            f"port {port} is in use", key="--port", remedy="end what listens there, or choose another port"
        )
    sys.stdout.flush()
    os.execv(line[0], list(line))
