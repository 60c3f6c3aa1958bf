"""``loraforge audit``: re-hash the evidence and recompute every claim."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def audit(
    path: Annotated[Path, typer.Argument(help="root of bags with its index, or one bag")] = Path("evidence"),
    fleet: Annotated[
        Path | None, typer.Option(help="fleet lock whose adapters are re-hashed", show_default=False)
    ] = None,
    figures: Annotated[
        list[Path] | None, typer.Option(help="folder of drawn figures; may be repeated", show_default=False)
    ] = None,
) -> None:
    """Exit 0 only if every byte and every claim holds; else name each file and the claim that failed."""
    from loraforge.evidence.audit import audit as examine
    from loraforge.evidence.audit import scope_of

    failures = examine(scope_of(path, lock=fleet, figures=figures or []), typer.echo)
    for failure in failures:
        typer.echo(f"FAILED {failure.path}: {failure.claim}")
    if failures:
        raise typer.Exit(1)
    typer.echo("every byte and every claim holds")
