"""``loraforge allocate``: choose the retained rank of every module under one shared budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.cli.reading import AllowPickle, BaseFolder

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def allocate(
    source: Annotated[
        list[Path], typer.Argument(help="a fleet lock, or adapter folders", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="allocation file to write (JSON)", show_default=False)
    ],
    policy: Annotated[str, typer.Option(help="uniform, spectral or spectral-nofloor")] = "spectral",
    budget: Annotated[str | None, typer.Option(help="share of the nominal ranks: 1/12 or 0.25")] = None,
    params: Annotated[int | None, typer.Option(help="or: parameters of the whole fleet")] = None,
    bytes_: Annotated[
        int | None, typer.Option("--bytes", help="or: bytes of the whole fleet's tensors")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="what --bytes counts: bfloat16, float16 or float32, or source")
    ] = "bfloat16",
    k_max: Annotated[int | None, typer.Option(help="cap on every rank (spectral policies)")] = None,
    cache: Annotated[Path, typer.Option(help="folder of the factor cache")] = Path(".cache/loraforge"),
    method: Annotated[str, typer.Option(help="auto, gram, tsqr or reference, for missing factors")] = "auto",
    records: Annotated[
        Path | None, typer.Option(help="also write evidence records here (JSON Lines)")
    ] = None,
    allow_pickle: AllowPickle = False,
    base: BaseFolder = None,
) -> None:
    """Choose the retained rank of every module; factorise what the cache lacks."""
    from loraforge.allocate.budget import floor_warning, parse_budget
    from loraforge.export.options import DTYPES, parse_dtype, parse_method, parse_policy
    from loraforge.files import refuse_unwritable, write_jsonl

    # everything that the command line alone can get wrong, before torch is imported
    wanted = parse_budget(budget, params=params, bytes_=bytes_)
    chosen_policy, chosen_method = parse_policy(policy), parse_method(method)
    width = DTYPES[parse_dtype(dtype)]
    for path in (out, records):
        if path is not None:
            refuse_unwritable(path)

    from loraforge.allocate.allocation import allocation_file, save_allocation
    from loraforge.allocate.policy import allocate as choose
    from loraforge.allocate.policy import allocation_records, problem_of
    from loraforge.compress import widest
    from loraforge.factor.fleet import factorise_fleet
    from loraforge.fleet.lock import fleet_name
    from loraforge.fleet.options import ReadOptions
    from loraforge.fleet.source import open_source
    from loraforge.progress import say

    fleet = open_source(source, ReadOptions(allow_pickle, base))
    problem = problem_of(factorise_fleet(fleet, cache, method=chosen_method))
    chosen = choose(problem, chosen_policy, wanted, bytes_per_parameter=width or widest(fleet), k_max=k_max)
    if warning := floor_warning(wanted, chosen.ceiling, problem.rank, problem.cost):
        say(warning)
    save_allocation(allocation_file(fleet_name(source), problem, chosen), out)
    if records is not None:
        write_jsonl(records, allocation_records(problem, chosen))
    say(
        f"{out}: {policy} at {wanted}: {chosen.spent:,} of {chosen.ceiling.params:,} parameters, "
        f"{chosen.retained_energy:.1%} of the energy, ranks {chosen.k.min()} to {chosen.k.max()}"
    )
