"""``loraforge export``: the stage that turns an allocation and the factor cache into PEFT folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.cli.choosing import MomentsFile
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
    moments: MomentsFile = None,
    method: Annotated[str, typer.Option(help="auto, gram, tsqr or reference, of the factors")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="replace what is in OUT")] = False,
    allow_pickle: AllowPickle = False,
    base: BaseFolder = None,
) -> None:
    """Write PEFT folders and the retained-rank manifest; factorise what the cache lacks."""
    from loraforge.allocate.allocation import load_allocation
    from loraforge.export.options import parse_dtype, parse_layouts, parse_method
    from loraforge.files import refuse_folder
    from loraforge.progress import say

    chosen, layouts = parse_method(method), parse_layouts(layout)
    parse_dtype(dtype)
    refuse_folder(out, [allocation, *source, cache], force=force)

    from loraforge.activation.entries import entries_of, source_of
    from loraforge.compress import settle_policy
    from loraforge.export.writer import export_fleet, require_same_modules
    from loraforge.fleet.options import ReadOptions
    from loraforge.fleet.source import open_source

    ranks = load_allocation(allocation)
    _, known = settle_policy(ranks.policy, moments)
    fleet = open_source(source, ReadOptions(allow_pickle, base))
    require_same_modules(fleet, ranks)
    manifest = export_fleet(
        fleet,
        source_of(
            fleet, entries_of(fleet, cache, moments=known, method=chosen), moments=known, method=chosen
        ),
        ranks,
        out,
        layouts=layouts,
        dtype=dtype,
        force=force,
    )
    say(
        f"{out}: {len(manifest.adapters)} adapters, {manifest.fleet.spent:,} parameters, {' and '.join(layouts)}"
    )
