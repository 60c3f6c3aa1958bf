"""``loraforge evidence``: make, promote and index evidence bags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.errors import InputError, UsageError
from loraforge.evidence.targets import TARGETS

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _evidence() -> None:
    """Make, promote and index evidence bags."""


@app.command()
def bag(
    target: Annotated[
        str,
        typer.Argument(help=", ".join(TARGETS), show_default=False),
    ],
    records: Annotated[
        list[Path], typer.Option(help="records of the run (JSON Lines); may be repeated", show_default=False)
    ],
    config: Annotated[Path, typer.Option(help="run configuration (YAML)", show_default=False)],
    fleet: Annotated[
        Path, typer.Option(help="fleet lock of the adapters that were measured", show_default=False)
    ],
    protocol: Annotated[str, typer.Option(help="cpu, reduced or paper", show_default=False)],
    out: Annotated[Path, typer.Option(help="root of the bags", show_default=False)],
    host: Annotated[
        str | None, typer.Option(help="label of the machine, such as h200 or cpu2; default: from the machine")
    ] = None,
    date: Annotated[
        str | None, typer.Option(help="day of the run (YYYY-MM-DD); default: when the records were written")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="serving engine, where one was used; precedes the machine's own label")
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(help="folder of `loraforge evidence machine`, where the run took place elsewhere"),
    ] = None,
    log: Annotated[list[Path] | None, typer.Option(help="log of the run; may be repeated")] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="NAME=FILE, a further input to state by hash; may be repeated"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a bag of the same day and host")] = False,
) -> None:
    """Make a bag at OUT/TARGET/DATE-HOST and print its path."""
    from loraforge.config import load_config, stated_sections
    from loraforge.evidence.bag import date_of, make_bag, parse_run, read_machine
    from loraforge.evidence.machine import describe, packages
    from loraforge.files import sha256_file
    from loraforge.fleet.lock import load_lock
    from loraforge.progress import say

    name = load_lock(fleet).name
    system, lines = read_machine(machine) if machine else (describe(), packages())
    if date is None:
        date = date_of(records)
        say(f"date of the run, from its records: {date}")
    run = parse_run(target, name, "any", date, protocol, engine)
    own = "-".join(filter(None, (engine, system.host(run.protocol))))
    run = parse_run(target, name, host or own, date, protocol, engine)
    stated: dict[str, str] = {}
    for item in inputs or []:
        label, equals, file = item.partition("=")
        if not (label and equals and file):
            raise UsageError(f"{item!r} is not NAME=FILE", key="--input")
        stated[label] = sha256_file(Path(file))
    path = make_bag(
        out,
        run,
        records,
        config=stated_sections(load_config(config)),
        lock=fleet,
        system=system,
        extra_inputs=stated,
        package_lines=lines,
        logs=log or [],
        force=force,
    )
    typer.echo(path)


@app.command()
def machine(
    out: Annotated[Path, typer.Option(help="folder for system.json and packages.txt", show_default=False)],
) -> None:
    """Describe this machine for a bag made elsewhere. No names, no paths."""
    from loraforge.evidence.machine import describe, packages
    from loraforge.files import write_json, write_text

    write_json(out / "system.json", describe().model_dump(mode="json"))
    write_text(out / "packages.txt", packages())


@app.command()
def promote(
    bag: Annotated[Path, typer.Argument(help="a bag", show_default=False)],
    to: Annotated[Path, typer.Option(help="root of the committed bags")] = Path("evidence"),
    force: Annotated[bool, typer.Option("--force", help="replace a bag of the same day and host")] = False,
) -> None:
    """Copy a valid bag to the evidence and index it."""
    from loraforge.evidence.bag import open_bag
    from loraforge.evidence.promote import promote as copy

    typer.echo(copy(open_bag(bag), to, force=force))


@app.command()
def index(
    root: Annotated[Path, typer.Argument(help="root of the bags")] = Path("evidence"),
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; exit 1 where the index does not hold")
    ] = False,
) -> None:
    """Write the index of a root of bags, or check it."""
    from loraforge.evidence.index import problems, write_index

    if not root.is_dir():  # a misspelt root has no bags to index, rather than none
        raise InputError("folder not found", path=root, remedy="name a folder of evidence bags")
    if not check:
        typer.echo(write_index(root))
        return
    found = problems(root)
    for path, claim in found:
        typer.echo(f"FAILED {path}: {claim}")
    if found:
        raise typer.Exit(1)
    typer.echo(f"{root}: the index holds")
