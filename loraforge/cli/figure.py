"""``loraforge figure``: draw a figure from an evidence bag."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.figures import FIGURES

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def figure(
    name: Annotated[
        str,
        typer.Argument(help=", ".join(FIGURES), show_default=False),
    ],
    bag: Annotated[Path, typer.Option(help="evidence bag that holds the records", show_default=False)],
    out: Annotated[Path, typer.Option(help="folder for NAME.csv, .svg, .png and .json", show_default=False)],
) -> None:
    """Draw a figure from an evidence bag and print what was written."""
    from loraforge.evidence.bag import open_bag
    from loraforge.figures.write import write_figure

    for path in write_figure(name, open_bag(bag), out):
        typer.echo(path)
