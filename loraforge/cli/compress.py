"""``loraforge compress``: a folder of adapters, or a locked fleet, in; servable folders and a manifest out."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraforge.cli import completion
from loraforge.cli.choosing import MomentsFile, PolicyName
from loraforge.cli.reading import AllowPickle, BaseFolder

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from loraforge.allocate.allocation import AllocationFile
    from loraforge.compress import Compressed
    from loraforge.preview import Preview

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_MOST_ROWS = 50  # adapters that a dry run lists on a terminal


@app.command()
def compress(
    source: Annotated[
        list[Path],
        typer.Argument(help="a fleet lock, or PEFT adapter folders, or folders of them", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="folder to write; must be absent or empty", show_default=False)],
    budget: Annotated[
        str | None,
        typer.Option(
            help="share of the nominal ranks to keep: 1/12 or 0.25", autocompletion=completion.budgets
        ),
    ] = None,
    params: Annotated[int | None, typer.Option(help="most parameters of the whole fleet, instead")] = None,
    bytes_: Annotated[int | None, typer.Option("--bytes", help="most bytes of all factors, instead")] = None,
    policy: PolicyName = None,
    layout: Annotated[
        str,
        typer.Option(help="ragged (PEFT, vLLM), padded (SGLang) or both", autocompletion=completion.layouts),
    ] = "both",
    cache: Annotated[Path, typer.Option(help="folder of the factor cache")] = Path(".cache/loraforge"),
    dtype: Annotated[
        str,
        typer.Option(
            help="bfloat16, float16, float32, or source for each one's own", autocompletion=completion.dtypes
        ),
    ] = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="replace what is in OUT")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="write nothing; say what would be kept, its bytes and the time")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="JSON, one object on standard output, instead of tables")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="page to write as well: one HTML file that needs no network")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="keep no factors: faster on a GPU where one budget is all")
    ] = False,
    moments: MomentsFile = None,
    devices: Annotated[
        int, typer.Option(min=1, help="how many GPUs to use, each for some of the adapters")
    ] = 1,
    allow_pickle: AllowPickle = False,
    base: BaseFolder = None,
) -> None:
    """Compress a folder of PEFT adapters, or a locked fleet, under one budget."""
    from loraforge.allocate.budget import parse_budget
    from loraforge.errors import UsageError
    from loraforge.export.options import parse_dtype, parse_layouts, parse_policy
    from loraforge.files import refuse_folder

    # everything that the command line alone can get wrong, before torch is imported
    wanted = parse_budget(budget, params=params, bytes_=bytes_)
    chosen, layouts = None if policy is None else parse_policy(policy), parse_layouts(layout)
    parse_dtype(dtype)
    kept = None if no_cache else cache
    refuse_folder(out, [*source, kept], force=force)
    if report is not None:
        if dry_run:
            raise UsageError("a dry run writes nothing", key="--report", remedy="leave out one of the two")
        _refuse_report(report, out, [*source, *(path for path in (kept, moments, base) if path is not None)])

    from loraforge.factor.gpu import device_names
    from loraforge.fleet.options import ReadOptions

    names = device_names(devices)
    asked: dict[str, Any] = {
        "cache": kept,
        "policy": chosen,
        "layouts": layouts,
        "dtype": dtype,
        "force": force,
        "options": ReadOptions(allow_pickle=allow_pickle, base=base),
        "moments": moments,
    }
    if dry_run:
        from loraforge.preview import preview

        planned = preview(source, wanted, out, **asked)
        _say_object(preview_object(planned, out)) if json_ else show_preview(planned, out)
        return

    from loraforge.compress import compress as run

    result = run(source, wanted, out, **asked, devices=names)
    if report is not None:
        from loraforge.report import write_report

        write_report(report, result.manifest, result.choice.problem, result.choice.uniform, result.seconds)
    _say_object(compressed_object(result, out, report)) if json_ else show_summary(result, out, report)


def _refuse_report(report: Path, out: Path, used: Sequence[Path]) -> None:
    """Raise OutputError where a report at ``report`` could not be written, or would lie in the way of ``out``, among
    the files of that or in one of ``used``, or replace what is no page: locks and links lead to adapters anywhere."""
    from loraforge.errors import OutputError
    from loraforge.export.options import LAYOUTS
    from loraforge.files import refuse_unwritable

    place, target = (Path(os.path.realpath(path)) for path in (report, out))
    if target.is_relative_to(place):
        raise OutputError("is where the output goes", path=report, remedy="name a file in it, or beside it")
    if any(place.is_relative_to(target / own) for own in ("manifest.json", *LAYOUTS)):
        raise OutputError("is a place of the output's own files", path=report, remedy="give it another name")
    for path in used:
        if place.is_relative_to(os.path.realpath(path)):
            raise OutputError(
                f"lies in {path}, which is in use here", path=report, remedy="choose another place"
            )
    if os.path.isfile(place) and place.suffix.lower() not in (".html", ".htm"):
        raise OutputError(
            "exists and is no page by its name", path=report, remedy="name a file that ends in .html"
        )
    refuse_unwritable(report)


def _say_object(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, allow_nan=False))


def compressed_object(result: Compressed, out: Path, report: Path | None) -> dict[str, Any]:
    """What ``--json`` says of a run (``docs/compress.md``)."""
    from loraforge.files import sha256_file
    from loraforge.report.numbers import by_adapter, ranks_of, result_object

    manifest, choice = result.manifest, result.choice
    k = ranks_of(choice.problem, choice.allocation)
    adapter, module, lost = _worst(result)
    entries = manifest.adapters.values()
    return {
        **result_object(
            choice.allocation,
            by_adapter(choice.problem, k, choice.uniform),
            k,
            {name: entry.original_bytes for name, entry in manifest.adapters.items()},
            {
                name: {layout: entry.layouts[layout].bytes for layout in manifest.fleet.layouts}
                for name, entry in manifest.adapters.items()
            },
            manifest.fleet.dtype,
        ),
        "dry_run": False,
        "base_model": manifest.fleet.base_model,
        "worst": {"adapter": adapter, "module": module, "relative_error": lost},
        "action_error": max(m.certificate.action_error for entry in entries for m in entry.modules.values()),
        "seconds": result.seconds,
        "out": str(out),
        "manifest": {
            "path": str(out / "manifest.json"),
            "sha256": sha256_file(out / "manifest.json"),
        },
        "report": None if report is None else str(report),
    }


def preview_object(planned: Preview, out: Path) -> dict[str, Any]:
    """What ``--dry-run --json`` says (``docs/compress.md``)."""
    from loraforge.export.portable import portable_name
    from loraforge.report.numbers import by_adapter, ranks_of, result_object

    choice, estimate = planned.choice, planned.estimate
    k = ranks_of(choice.problem, choice.allocation)
    return {
        **result_object(
            choice.allocation,
            by_adapter(choice.problem, k, choice.uniform),
            k,
            {adapter.name: adapter.weights.bytes for adapter in planned.fleet},
            planned.bytes,
            planned.dtype,
        ),
        "dry_run": True,
        "base_model": portable_name(planned.fleet[0].base_model),
        "retained": choice.allocation.ranks,
        "estimate": {
            "total_s": estimate.total,
            "seconds": estimate.seconds,
            "basis": estimate.basis,
            "adapter": estimate.adapter,
            "missing_factors": estimate.missing,
        },
        "seconds": planned.seconds,
        "out": str(out),
    }


def _worst(result: Compressed) -> tuple[str, str, float]:
    """The module that truncation takes most of, and how much (relative Frobenius norm)."""
    return max(
        (
            (name, module, entry.certificate.relative_error)
            for name, adapter in result.manifest.adapters.items()
            for module, entry in adapter.modules.items()
        ),
        key=lambda row: row[2],
    )


def _facts(
    allocation: AllocationFile, base_model: str, adapters: int, ranks: list[int], before: int
) -> Table:
    """The rows that a run and a dry run begin with."""
    from rich.table import Table

    table = Table(title=f"{allocation.fleet} over {base_model}", title_justify="left", show_header=False)
    budget = allocation.budget
    table.add_row("adapters", f"{adapters}, {len(ranks)} modules")
    table.add_row(
        "policy", f"{allocation.policy}, {budget.kind} {budget.value}, rank floor {allocation.floor}"
    )
    spent = allocation.spent
    table.add_row(
        "parameters", f"{before:,} -> {spent:,} ({spent / before:.2%}, {allocation.slack:,} to spare)"
    )
    return table


def _console() -> Console:
    from rich.console import Console

    return Console(markup=False, highlight=False)


def show_summary(result: Compressed, out: Path, report: Path | None = None) -> None:
    """Print what was done, how well, where it is and what to do next."""
    manifest = result.manifest
    fleet, adapters = manifest.fleet, manifest.adapters.values()
    ranks = sorted(module.k for adapter in adapters for module in adapter.modules.values())
    name, module, worst = _worst(result)
    error = max(entry.certificate.action_error for adapter in adapters for entry in adapter.modules.values())
    before = sum(adapter.original_parameters for adapter in adapters)
    table = _facts(result.choice.allocation, fleet.base_model, len(manifest.adapters), ranks, before)
    bytes_before = sum(adapter.original_bytes for adapter in adapters)
    for layout in fleet.layouts:
        _add_bytes(table, layout, bytes_before, sum(adapter.layouts[layout].bytes for adapter in adapters))
    table.add_row("ranks", _spread(ranks))
    table.add_row("retained energy", f"{fleet.retained_energy:.2%} of the fleet's")
    table.add_row("worst module", f"{name}: {module}, loses {worst:.3f} of its norm by truncation")
    table.add_row("certificate", f"rounding to {fleet.dtype} moves what is kept by at most {error:.1e}")
    table.add_row("seconds", ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in result.seconds.items()))
    console = _console()
    console.print(table)
    places = {"ragged": "PEFT, vLLM", "padded": "SGLang, any loader that knows one rank"}
    lines = [f"{out / layout}/<adapter>  for {places[layout]}" for layout in fleet.layouts]
    lines += [f"{out / 'manifest.json'}  retained ranks and certificates"]
    lines += [] if report is None else [f"{report}  the same as a page, for a browser"]
    for line in (*lines, f"next: loraforge inspect {out}"):
        console.print(line, soft_wrap=True)


def show_preview(planned: Preview, out: Path) -> None:
    """Print what a run would keep, write and take."""
    from rich import box
    from rich.table import Table

    from loraforge.export.portable import portable_name
    from loraforge.report.numbers import by_adapter, ranks_of

    choice, estimate = planned.choice, planned.estimate
    k = ranks_of(choice.problem, choice.allocation)
    numbers = by_adapter(choice.problem, k, choice.uniform)
    original = {adapter.name: adapter.weights.bytes for adapter in planned.fleet}
    table = _facts(
        choice.allocation,
        portable_name(planned.fleet[0].base_model),
        len(numbers),
        sorted(k.tolist()),
        sum(adapter.before for adapter in numbers),
    )
    for layout in planned.layouts:
        size = sum(sizes[layout] for sizes in planned.bytes.values())
        _add_bytes(table, layout, sum(original.values()), size)
    table.add_row("ranks", _spread(sorted(k.tolist())))
    table.add_row("retained energy", f"{choice.allocation.retained_energy:.2%} of the fleet's")
    table.add_row(
        "seconds, estimated",
        f"{estimate.total:.1f}: " + ", ".join(f"{name} {s:.1f}" for name, s in estimate.seconds.items()),
    )
    for stage in ("factor", "export"):
        table.add_row(f"{stage} is", estimate.basis[stage])
    table.add_row("not estimated", "what the disk takes to write")
    console = _console()
    console.print(table)
    rows = Table(box=box.SIMPLE)
    rows.add_column("adapter", overflow="fold", min_width=8)
    for title in ("ranks", "of", "parameters", "energy", "x uniform"):
        rows.add_column(title, justify="right", no_wrap=True)
    for adapter in numbers[:_MOST_ROWS]:
        rows.add_row(
            adapter.name,
            f"{adapter.least} / {adapter.median:g} / {adapter.most}",
            str(adapter.rank),
            f"{adapter.after:,} ({adapter.after / adapter.before:.1%})",
            f"{adapter.energy:.1%}",
            f"{adapter.ratio:.2f}",
        )
    console.print(rows)
    if len(numbers) > _MOST_ROWS:
        console.print(
            f"and {len(numbers) - _MOST_ROWS} more adapters; --json has all, with every module's rank"
        )
    console.print(f"nothing was written; without --dry-run, this goes to {out}", soft_wrap=True)


def _add_bytes(table: Table, layout: str, before: int, after: int) -> None:
    table.add_row(f"bytes, {layout}", f"{before:,} -> {after:,} ({after / before:.2%})")


def _spread(ranks: list[int]) -> str:
    return f"{ranks[0]} to {ranks[-1]}, median {ranks[len(ranks) // 2]}"
