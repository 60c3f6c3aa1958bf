"""``loraforge eval``: score base, original and compressed adapters with lm-eval."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Score base, original and compressed adapters with lm-eval.",
)


@app.callback()
def _root() -> None:
    """Score base, original and compressed adapters with lm-eval."""


@app.command()
def run(
    config: Annotated[
        Path, typer.Option(help="run configuration; its quality section rules", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="records to write (JSON Lines)", show_default=False)
    ],
    base: Annotated[Path, typer.Option(help="folder of the base model", show_default=False)],
    allocations: Annotated[Path, typer.Option(help="folder of allocation files", show_default=False)],
    adapter: Annotated[
        list[str] | None, typer.Option(help="adapters to score; default: those of the configuration")
    ] = None,
    cache: Annotated[Path, typer.Option(help="folder of factors and of finished records")] = Path(
        ".cache/loraforge"
    ),
    tasks: Annotated[Path, typer.Option(help="folder of the published tasks")] = Path("config/tasks"),
    device: Annotated[str | None, typer.Option(help="torch device instead of the configuration's")] = None,
    moments: Annotated[
        Path | None, typer.Option(help="file of moments that activation policies were allocated with")
    ] = None,
    expanded: Annotated[
        list[Path] | None, typer.Option(help="folders of `loraforge cts`, each scored as an arm")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="adapters scored at once instead of the configuration's")
    ] = None,
) -> None:
    """Score adapters under every arm of the configuration. Arms that are scored already are not run again."""
    # OpenMP threads that spin at barriers make torch several times slower where cores are shared; read at import
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from loraforge.config import load_config
    from loraforge.files import write_jsonl
    from loraforge.fleet.download.fleet import fetch_fleet
    from loraforge.fleet.lock import load_lock
    from loraforge.progress import Timer, say
    from loraforge.quality.harness import Settings, evaluate_fleet

    settled = load_config(config)
    quality = settled.quality if device is None else settled.quality.model_copy(update={"device": device})
    lock = load_lock(settled.fleet)
    fetch_fleet(lock, settled.fleet)  # first: what scores keeps this process off the network
    names = adapter or quality.adapters
    if names == "all":
        names = [entry.name for entry in lock.adapters]
    settings = Settings.of(
        quality,
        base=base,
        tasks=tasks,
        cache=cache,
        allocations=allocations,
        method=settled.factor.method,
        moments=moments,
        expanded=expanded or (),
    )
    with Timer() as timer:
        records = evaluate_fleet(settled.fleet, list(names), settings, jobs=jobs or quality.jobs)
    write_jsonl(out, records)
    say(f"{out}: {len(records)} records of {len(names)} adapters after {timer.s:.1f} s")
