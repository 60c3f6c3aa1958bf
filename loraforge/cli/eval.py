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
        list[Path] | None, typer.Option(help="files of moments that policies were allocated with, one a norm")
    ] = None,
    expanded: Annotated[
        list[Path] | None, typer.Option(help="folders of `loraforge cts` and `refine`, each scored as an arm")
    ] = None,
    selected: Annotated[
        Path | None, typer.Option(help="file of `loraforge eval select`, whose finalists are scored too")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="adapters scored at once instead of the configuration's")
    ] = None,
) -> None:
    """Score adapters under every arm of the configuration. Arms that are scored already are not run again."""
    # OpenMP threads that spin at barriers make torch several times slower where cores are shared; read at import
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from loraforge.cli.outputs import refuse_scores
    from loraforge.config import load_config
    from loraforge.errors import UsageError
    from loraforge.files import write_jsonl
    from loraforge.fleet.download.fleet import fetch_fleet
    from loraforge.fleet.lock import load_lock
    from loraforge.quality.selection import load_selection

    settled = load_config(config)
    quality = settled.quality if device is None else settled.quality.model_copy(update={"device": device})
    policies: list[str] = [*quality.policies]
    if selected is not None:
        if quality.split != "test":
            raise UsageError(
                f"what was chosen is reported on the test split, not on {quality.split}", key="--selected"
            )
        policies += load_selection(selected).finalists
    refuse_scores(out)

    lock = load_lock(settled.fleet)
    fetch_fleet(lock, settled.fleet)  # first: what scores keeps this process off the network

    from loraforge.progress import Timer, say
    from loraforge.quality.evaluate import Settings, evaluate_fleet

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
        policies=list(dict.fromkeys(policies)),
        moments=moments or (),
        expanded=expanded or (),
    )
    with Timer() as timer:
        records = evaluate_fleet(settled.fleet, list(names), settings, jobs=jobs or quality.jobs)
    write_jsonl(out, records)
    say(f"{out}: {len(records)} records of {len(names)} adapters after {timer.s:.1f} s")


@app.command()
def select(
    records: Annotated[
        list[Path],
        typer.Argument(help="records of `eval run` on the validation split (JSON Lines)", show_default=False),
    ],
    candidates: Annotated[str, typer.Option(help="policies to choose from: A,B,C", show_default=False)],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="the selection to write (JSON)", show_default=False)
    ],
    fleet: Annotated[Path, typer.Option(help="fleet lock of the adapters", show_default=False)],
    at: Annotated[str, typer.Option(help="budget at which scores decide")] = "1/12",
    finalists: Annotated[int, typer.Option(min=1, help="how many go on to the test split")] = 1,
) -> None:
    """Choose policies by their validation scores. `eval run --selected` then reports them on the test split."""
    from loraforge.cli.outputs import refuse_selection
    from loraforge.evidence.targets.quality import QualityTarget
    from loraforge.evidence.targets.study import selection_from
    from loraforge.fleet.lock import load_lock
    from loraforge.progress import say
    from loraforge.quality.selection import save_selection

    refuse_selection(out)
    name = load_lock(fleet).name
    scores = [score for path in records for score in QualityTarget().read(path)]
    selection = selection_from(
        scores,
        fleet=name,
        candidates=[policy for policy in candidates.split(",") if policy],
        decide_at=at,
        finalists=finalists,
    )
    save_selection(selection, out)
    best = selection.candidates[0]
    say(
        f"{out}: {', '.join(selection.finalists)} of {len(selection.candidates)} candidates at {at};"
        f" {best.policy} scores {best.macro:.2f}, its worst adapter loses {best.worst:.2f}"
    )
