"""``loraforge refine``: teach a compressed fleet its originals' own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.cli.reading import AllowPickle

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def refine(
    compressed: Annotated[Path, typer.Argument(help="output of `loraforge compress`", show_default=False)],
    originals: Annotated[
        list[Path],
        typer.Option("--adapters", help="what it was compressed from: a fleet lock, or adapter folders"),
    ],
    base: Annotated[Path, typer.Option(help="folder of the base model", show_default=False)],
    prompts: Annotated[
        Path,
        typer.Option(help="folder of NAME.jsonl, NAME.txt or NAME/train.jsonl of each", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="folder to write; must be absent or empty", show_default=False)
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="the first so many prompts of each")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="steps of each adapter")] = 200,
    lr: Annotated[float, typer.Option(min=0.0, help="peak learning rate")] = 1e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="answers a step")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="of the order of the answers")] = 20261130,
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="processes that share the device")] = 1,
    cache: Annotated[Path, typer.Option(help="folder that keeps what is finished")] = Path(
        ".cache/loraforge"
    ),
    force: Annotated[bool, typer.Option("--force", help="replace what is in OUT")] = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Refine truncated adapters by self-distillation. Their originals answer unlabelled prompts, and they learn these
    answers' distributions, at unchanged ranks. This trains: seconds an adapter on a GPU, minutes on a CPU."""
    from loraforge.files import refuse_non_empty

    refuse_non_empty(out, force=force)

    from loraforge.activation.answers import find_prompts
    from loraforge.export.manifest import load_manifest
    from loraforge.fleet.options import ReadOptions
    from loraforge.fleet.source import open_source
    from loraforge.progress import Timer, say
    from loraforge.refine.distillation import RefineSettings
    from loraforge.refine.fleet import refine_fleet

    names = load_manifest(compressed).adapters
    fleet = open_source(originals, ReadOptions(allow_pickle))
    asked = {name: find_prompts(prompts, name, limit=limit) for name in names}
    settings = RefineSettings(batch_size=batch_size, steps=steps, lr=lr, seed=seed)
    with Timer() as timer:
        manifest = refine_fleet(
            compressed,
            fleet,
            base,
            asked,
            out,
            cache=cache,
            device=device,
            jobs=jobs,
            settings=settings,
            force=force,
        )
    say(f"{out}: {len(manifest.adapters)} adapters refined after {timer.s:.1f} s")
