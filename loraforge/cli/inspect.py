"""``loraforge inspect``: what a compressed fleet keeps, from its manifest alone."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from loraforge.allocate.allocation import BudgetEntry
    from loraforge.config import Layout
    from loraforge.export.manifest import AdapterEntry, Manifest

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def inspect(
    out: Annotated[Path, typer.Argument(help="a compressed fleet, or its manifest.json", show_default=False)],
    worst: Annotated[int, typer.Option(min=0, help="modules of least retained energy to list")] = 5,
) -> None:
    """Show ranks, energy, parameters and bytes of each adapter, and the modules that lost most."""
    from rich.console import Console

    from loraforge.export.manifest import load_manifest

    manifest = load_manifest(out)
    fleet = manifest.fleet
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # a file has no width: fold nothing that 80 columns would
        console = Console(highlight=False, markup=False, width=160)
    for line in (
        f"{fleet.name} on {fleet.base_model or 'an unnamed base model'}: {fleet.policy} at {_budget(fleet.budget)}, "
        f"rank floor {fleet.floor}",
        f"{fleet.spent:,} of {fleet.budget.params:,} parameters (slack {fleet.slack:,}), "
        f"{fleet.retained_energy:.1%} of the energy",
    ):
        console.print(line, soft_wrap=not console.is_terminal)
    console.print(_ranks(manifest))
    console.print(_sizes(manifest))
    if worst:
        console.print(_worst(manifest, worst))


def _budget(budget: BudgetEntry) -> str:
    return budget.value if budget.kind == "fraction" else f"{budget.value} {budget.kind}"


def _table(title: str, names: tuple[str, ...], numbers: tuple[str, ...], caption: str | None = None) -> Table:
    """A table whose names fold and whose numbers do not, narrow enough for 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, caption=caption, box=box.SIMPLE, title_justify="left", caption_justify="left")
    for name in names:
        table.add_column(name, overflow="fold", min_width=8)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _ranks(manifest: Manifest) -> Table:
    table = _table(
        "ranks and energy",
        ("adapter",),
        ("modules", "ranks", "of", "energy"),
        "ranks: least / median / most; energy: least / median over modules",
    )
    for name, adapter in manifest.adapters.items():
        ranks = [module.k for module in adapter.modules.values()]
        energy = [module.certificate.retained_energy for module in adapter.modules.values()]
        table.add_row(
            name,
            str(len(ranks)),
            f"{min(ranks)} / {median(ranks):g} / {max(ranks)}",
            str(max(module.r for module in adapter.modules.values())),
            f"{min(energy):.1%} / {median(energy):.1%}",
        )
    return table


def _sizes(manifest: Manifest) -> Table:
    table = _table("sizes", ("adapter",), ("parameters", *manifest.fleet.layouts))
    for name, adapter in manifest.adapters.items():
        share = adapter.compact_parameters / adapter.original_parameters
        table.add_row(
            name,
            f"{adapter.compact_parameters:,} ({share:.1%})",
            *(_bytes(adapter, layout) for layout in manifest.fleet.layouts),
        )
    return table


def _bytes(adapter: AdapterEntry, layout: Layout) -> str:
    size = adapter.layouts[layout].bytes
    return f"{size / 1e3:,.1f} kB ({size / adapter.original_bytes:.1%})"


def _worst(manifest: Manifest, count: int) -> Table:
    table = _table(
        "least retained energy",
        ("adapter", "module"),
        ("rank", "energy", "error"),
        "error: Frobenius norm lost by truncation, over that of the original update",
    )
    modules = [
        (module.certificate.retained_energy, adapter, name, module)
        for adapter, entry in manifest.adapters.items()
        for name, module in entry.modules.items()
    ]
    for energy, adapter, name, module in sorted(modules, key=lambda row: row[:3])[:count]:
        table.add_row(
            adapter,
            name,
            f"{module.k} of {module.r}",
            f"{energy:.1%}",
            f"{module.certificate.relative_error:.3f}",
        )
    return table
