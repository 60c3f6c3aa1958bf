"""``loraforge compress``: a folder of adapters, or a locked fleet, in; servable folders and a manifest out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraforge.cli.reading import AllowPickle, BaseFolder

if TYPE_CHECKING:
    from loraforge.compress import Compressed

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def compress(
    source: Annotated[
        list[Path],
        typer.Argument(help="a fleet lock, or PEFT adapter folders, or folders of them", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="folder to write; must be absent or empty", show_default=False)],
    budget: Annotated[
        str | None, typer.Option(help="share of the nominal ranks to keep: 1/12 or 0.25")
    ] = None,
    params: Annotated[int | None, typer.Option(help="most parameters of the whole fleet, instead")] = None,
    bytes_: Annotated[int | None, typer.Option("--bytes", help="most bytes of all factors, instead")] = None,
    policy: Annotated[str, typer.Option(help="spectral, uniform or spectral-nofloor")] = "spectral",
    layout: Annotated[str, typer.Option(help="ragged (PEFT, vLLM), padded (SGLang) or both")] = "both",
    cache: Annotated[Path, typer.Option(help="folder of the factor cache")] = Path(".cache/loraforge"),
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32, or source for each one's own")
    ] = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="replace what is in OUT")] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="keep no factors: faster on a GPU where one budget is all")
    ] = False,
    devices: Annotated[
        int, typer.Option(min=1, help="how many GPUs to use, each for some of the adapters")
    ] = 1,
    allow_pickle: AllowPickle = False,
    base: BaseFolder = None,
) -> None:
    """Compress a folder of PEFT adapters, or a locked fleet, under one budget."""
    from loraforge.allocate.budget import parse_budget
    from loraforge.export.options import parse_dtype, parse_layouts, parse_policy
    from loraforge.files import refuse_non_empty, refuse_to_replace

    # everything that the command line alone can get wrong, before torch is imported
    wanted = parse_budget(budget, params=params, bytes_=bytes_)
    chosen, layouts = parse_policy(policy), parse_layouts(layout)
    parse_dtype(dtype)
    refuse_non_empty(out, force=force)
    refuse_to_replace(out, [*source] if no_cache else [*source, cache])

    from loraforge.compress import compress as run
    from loraforge.factor.gpu import device_names
    from loraforge.fleet.options import ReadOptions

    result = run(
        source,
        wanted,
        out,
        cache=None if no_cache else cache,
        policy=chosen,
        layouts=layouts,
        dtype=dtype,
        force=force,
        devices=device_names(devices),
        options=ReadOptions(allow_pickle=allow_pickle, base=base),
    )
    show_summary(result, out)


def show_summary(result: Compressed, out: Path) -> None:
    """Print what was done, how well, where it is and what to do next."""
    from rich.console import Console
    from rich.table import Table

    manifest = result.manifest
    fleet, adapters = manifest.fleet, manifest.adapters.values()
    before = sum(adapter.original_parameters for adapter in adapters)
    bytes_before = sum(adapter.original_bytes for adapter in adapters)
    ranks = sorted(module.k for adapter in adapters for module in adapter.modules.values())
    name, module, worst = max(
        (
            (name, module, entry.certificate.relative_error)
            for name, adapter in manifest.adapters.items()
            for module, entry in adapter.modules.items()
        ),
        key=lambda row: row[2],
    )
    error = max(entry.certificate.action_error for adapter in adapters for entry in adapter.modules.values())
    table = Table(title=f"{fleet.name} over {fleet.base_model}", title_justify="left", show_header=False)
    table.add_row("adapters", f"{len(manifest.adapters)}, {len(ranks)} modules")
    table.add_row(
        "policy", f"{fleet.policy}, {fleet.budget.kind} {fleet.budget.value}, rank floor {fleet.floor}"
    )
    table.add_row(
        "parameters", f"{before:,} -> {fleet.spent:,} ({fleet.spent / before:.2%}, {fleet.slack:,} to spare)"
    )
    for layout in fleet.layouts:
        size = sum(adapter.layouts[layout].bytes for adapter in adapters)
        table.add_row(f"bytes, {layout}", f"{bytes_before:,} -> {size:,} ({size / bytes_before:.2%})")
    table.add_row("ranks", f"{ranks[0]} to {ranks[-1]}, median {ranks[len(ranks) // 2]}")
    table.add_row("retained energy", f"{fleet.retained_energy:.2%} of the fleet's")
    table.add_row("worst module", f"{name}: {module}, loses {worst:.3f} of its norm by truncation")
    table.add_row("certificate", f"rounding to {fleet.dtype} moves what is kept by at most {error:.1e}")
    table.add_row("seconds", ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in result.seconds.items()))
    console = Console()
    console.print(table, markup=False)
    places = {"ragged": "PEFT, vLLM", "padded": "SGLang, any loader that knows one rank"}
    lines = [f"{out / layout}/<adapter>  for {places[layout]}" for layout in fleet.layouts]
    lines += [f"{out / 'manifest.json'}  retained ranks and certificates", f"next: loraforge inspect {out}"]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
