"""``loraforge audit``: re-hash the evidence and recompute every claim."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.errors import InputError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def audit(
    path: Annotated[Path, typer.Argument(help="root of bags with its index, or one bag")] = Path("evidence"),
    fleet: Annotated[
        list[Path] | None,
        typer.Option(
            help="fleet lock whose adapters are re-hashed; may be repeated; with the default PATH, all of "
            "config/fleets unless given",
            show_default=False,
        ),
    ] = None,
    figures: Annotated[
        list[Path] | None,
        typer.Option(
            help="folder of drawn figures; may be repeated; with the default PATH, docs/figures unless given",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Exit 0 only if every byte and every claim holds; else name each file and the claim that failed."""
    from loraforge.evidence import audit as examine

    committed = path == examine.EVIDENCE
    locks = fleet or (examine.fleet_locks(path) if committed else [])
    if committed and not locks:  # or the adapters would go unchecked, and nobody be told
        raise InputError(
            "no fleet lock beside the evidence",
            path="config/fleets",
            remedy="restore it, or name one by --fleet",
        )
    folders = figures or (examine.figure_folders(path) if committed else [])
    failures = examine.audit(examine.scope_of(path, locks=locks, figures=folders), typer.echo)
    for failure in failures:
        typer.echo(f"FAILED {failure.path}: {failure.claim}")
    if failures:
        raise typer.Exit(1)
    typer.echo("every byte and every claim holds")
