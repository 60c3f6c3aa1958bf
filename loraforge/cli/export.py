"""``loraforge export``: the stage that turns an allocation and the factor cache into PEFT folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.cli.reading import AllowPickle, BaseFolder

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def export(
    allocation: Annotated[
        Path, typer.Argument(help="allocation file of `loraforge allocate`", show_default=False)
    ],
    source: Annotated[
        list[Path], typer.Argument(help="the fleet lock, or the adapter folders", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="folder to write; must be absent or empty", show_default=False)],
    cache: Annotated[Path, typer.Option(help="folder of the factor cache")] = Path(".cache/loraforge"),
    layout: Annotated[str, typer.Option(help="ragged (PEFT, vLLM), padded (SGLang) or both")] = "both",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32, or source for each one's own")
    ] = "bfloat16",
    method: Annotated[str, typer.Option(help="auto, gram, tsqr or reference, of the factors")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="replace what is in OUT")] = False,
    allow_pickle: AllowPickle = False,
    base: BaseFolder = None,
) -> None:
    """Write PEFT folders and the retained-rank manifest; factorise what the cache lacks."""
    from loraforge.allocate.allocation import load_allocation
    from loraforge.export.options import parse_dtype, parse_layouts, parse_method
    from loraforge.files import refuse_non_empty, refuse_to_replace
    from loraforge.progress import say

    chosen, layouts = parse_method(method), parse_layouts(layout)
    parse_dtype(dtype)
    refuse_non_empty(out, force=force)
    refuse_to_replace(out, [allocation, *source, cache])

    from loraforge.export.directions import cached_source
    from loraforge.export.writer import export_fleet, require_same_modules
    from loraforge.factor.fleet import factorise_fleet
    from loraforge.fleet.options import ReadOptions
    from loraforge.fleet.source import open_source

    ranks = load_allocation(allocation)
    fleet = open_source(source, ReadOptions(allow_pickle, base))
    require_same_modules(fleet, ranks)
    manifest = export_fleet(
        fleet,
        cached_source(fleet, factorise_fleet(fleet, cache, method=chosen), method=chosen),
        ranks,
        out,
        layouts=layouts,
        dtype=dtype,
        force=force,
    )
    say(
        f"{out}: {len(manifest.adapters)} adapters, {manifest.fleet.spent:,} parameters, {' and '.join(layouts)}"
    )
