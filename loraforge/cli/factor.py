"""``loraforge factor``: build the cache of ordered factors, and write the spectra it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.cli.reading import AllowPickle, BaseFolder

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def factor(
    source: Annotated[
        list[Path], typer.Argument(help="a fleet lock, or adapter folders", show_default=False)
    ],
    cache: Annotated[Path, typer.Option(help="folder of the factor cache")] = Path(".cache/loraforge"),
    method: Annotated[str, typer.Option(help="auto, gram, tsqr or reference")] = "auto",
    records: Annotated[Path | None, typer.Option(help="write spectra and timing here (JSON Lines)")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="threads; default: the available CPUs")] = None,
    devices: Annotated[
        int, typer.Option(min=1, help="how many GPUs to use, each for some of the adapters")
    ] = 1,
    keep: Annotated[
        str,
        typer.Option(
            help="factors, or spectra alone: 30 kB an adapter, enough to allocate; export builds the rest"
        ),
    ] = "factors",
    part: Annotated[
        str | None, typer.Option(help="the second of eight parts of the fleet's adapters: 2/8")
    ] = None,
    allow_pickle: AllowPickle = False,
    base: BaseFolder = None,
) -> None:
    """Build the cache of ordered factors and spectra; only what is missing is computed."""
    from loraforge.cli.outputs import refuse_records
    from loraforge.export.options import parse_keep, parse_method
    from loraforge.files import write_jsonl
    from loraforge.fleet.parts import parse_part

    chosen, kept, share = parse_method(method), parse_keep(keep), parse_part(part)
    if records is not None:
        refuse_records(records)

    from loraforge.factor.gpu import device_names
    from loraforge.factor.spectra import spectra_records
    from loraforge.factor.streaming import stream_source
    from loraforge.fleet.options import ReadOptions
    from loraforge.progress import Timer, say

    with Timer() as timer:
        done = stream_source(
            source,
            cache,
            need=kept,
            keep=kept,
            part=share,
            method=chosen,
            workers=workers,
            devices=device_names(devices),
            options=ReadOptions(allow_pickle, base),
        )
    if records is not None:
        write_jsonl(records, spectra_records(done.entries))
    modules = sum(len(adapter.modules) for adapter in done.entries)
    say(
        f"{len(done.entries)} adapters, {modules} modules in {cache} after {timer.s:.1f} s"
        f" ({done.factorised} factorised)"
    )
