"""``loraforge bench``: timings of factor construction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.errors import UsageError

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _bench() -> None:
    """Time factor construction."""


@app.command()
def recompression(
    source: Annotated[
        list[Path], typer.Argument(help="a fleet lock, or adapter folders", show_default=False)
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="records (JSON Lines)", show_default=False)],
    methods: Annotated[
        str,
        typer.Option(
            help="comma-separated: florist, spectral_transform, either with _batched, fraq, tsqr, gram"
        ),
    ] = "florist,spectral_transform,fraq,tsqr,gram",
    warmups: Annotated[int, typer.Option(min=0, help="untimed passes")] = 1,
    passes: Annotated[int, typer.Option(min=1, help="timed passes")] = 3,
    adapters: Annotated[str, typer.Option(help="comma-separated adapter names, or all")] = "all",
    workers: Annotated[int | None, typer.Option(min=1, help="threads; default: the available CPUs")] = None,
) -> None:
    """Time recompression of a fleet by every method. Passes are interleaved, and every result is checked."""
    from statistics import median

    from loraforge.factor.recompression import benchmark
    from loraforge.files import write_jsonl
    from loraforge.fleet.source import open_source
    from loraforge.progress import say

    fleet = open_source(source)
    if adapters != "all":
        wanted = adapters.split(",")
        missing = sorted(set(wanted).difference(adapter.name for adapter in fleet))
        if missing:
            raise UsageError(
                f"no adapter {missing[0]!r}",
                key="--adapters",
                remedy=f"choose from {', '.join(adapter.name for adapter in fleet)}",
            )
        fleet = [adapter for adapter in fleet if adapter.name in wanted]
    chosen = [method.strip() for method in methods.split(",") if method.strip()]
    records = benchmark(fleet, methods=chosen, warmups=warmups, passes=passes, workers=workers)
    write_jsonl(out, records)
    for method in chosen:
        seconds = [record["seconds"] for record in records if record["method"] == method and "pass" in record]
        say(f"{method:28s} {median(seconds):8.3f} s")
