"""``loraforge figure``: draw a figure from an evidence bag."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="spectra, allocation, quality, selection, retention, regressions, budget_share, recompression,"
            " shrink_ablation, expand_ablation, expand_native, dispatch, dispatch_map, dispatch_layers, cpu_ops, scale,"
            " mixed_serving_vllm, mixed_serving_sglang, six_cell, fixed_work, residency, stopping_contract,"
            " single_fleet, adapters_500, cpu_serving, quality_tables, or a _table of those",
            show_default=False,
        ),
    ],
    bag: Annotated[Path, typer.Option(help="evidence bag that holds the records", show_default=False)],
    out: Annotated[Path, typer.Option(help="folder for NAME.csv, .svg, .png and .json", show_default=False)],
) -> None:
    """Draw a figure from an evidence bag and print what was written."""
    from loraforge.evidence.bag import open_bag
    from loraforge.figures.write import write_figure

    for path in write_figure(name, open_bag(bag), out):
        typer.echo(path)
