"""``loraforge allocate``: choose the retained rank of every module under one shared budget."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from loraforge.cli import completion
from loraforge.cli.choosing import MomentsFile, PolicyName
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
    policy: PolicyName = None,
    budget: Annotated[
        str | None,
        typer.Option(help="share of the nominal ranks: 1/12 or 0.25", autocompletion=completion.budgets),
    ] = None,
    params: Annotated[int | None, typer.Option(help="or: parameters of the whole fleet")] = None,
    bytes_: Annotated[
        int | None, typer.Option("--bytes", help="or: bytes of the whole fleet's tensors")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="what --bytes counts: bfloat16, float16 or float32, or source",
            autocompletion=completion.dtypes,
        ),
    ] = "bfloat16",
    k_max: Annotated[int | None, typer.Option(help="cap on every rank")] = None,
    adapter_floor: Annotated[
        str | None, typer.Option(help="least an adapter gets, as a share of its uniform cost: 1/2")
    ] = None,
    adapter_ceiling: Annotated[
        str | None, typer.Option(help="most an adapter gets, in multiples of its uniform cost: 2")
    ] = None,
    traffic: Annotated[
        Path | None, typer.Option(help="shares of requests by adapter (JSON) that weigh energies")
    ] = None,
    fused: Annotated[
        bool, typer.Option("--fused", help="equal ranks for q, k, v and for gate, up of an adapter")
    ] = False,
    cost: Annotated[
        str, typer.Option(help="a second ceiling: bytes:8,16,32 (ranks padded), or JSON of microseconds")
    ] = "parameters",
    moments: MomentsFile = None,
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
    from loraforge.allocate.options import Options, load_traffic, parse_cost, parse_share
    from loraforge.cli.outputs import refuse_allocation, refuse_records
    from loraforge.errors import UsageError
    from loraforge.export.options import DTYPES, parse_dtype, parse_method, parse_policy
    from loraforge.files import write_jsonl

    # everything that the command line alone can get wrong, before torch is imported
    wanted = parse_budget(budget, params=params, bytes_=bytes_)
    named, chosen_method = None if policy is None else parse_policy(policy), parse_method(method)
    width = DTYPES[parse_dtype(dtype)]
    least = None if adapter_floor is None else parse_share(adapter_floor, "--adapter-floor")
    most = None if adapter_ceiling is None else parse_share(adapter_ceiling, "--adapter-ceiling")
    options = Options(
        k_max=k_max,
        adapter_floor=least,
        adapter_ceiling=most,
        traffic=None if traffic is None else load_traffic(traffic),
        fused=fused,
        cost=parse_cost(cost, width or 2),
    )
    refuse_allocation(out)
    if records is not None:
        if os.path.realpath(records) == os.path.realpath(out):
            raise UsageError("is the allocation file, too", key="--records", remedy="name another file")
        refuse_records(records)

    from loraforge.activation.entries import entries_of
    from loraforge.allocate.allocation import allocation_file, save_allocation
    from loraforge.allocate.policy import allocate as choose
    from loraforge.allocate.policy import allocation_records, problem_of
    from loraforge.compress import settle_policy, widest
    from loraforge.factor.streaming import stream_source
    from loraforge.fleet.lock import fleet_name
    from loraforge.fleet.options import ReadOptions
    from loraforge.fleet.source import open_source
    from loraforge.garbage import uncollected
    from loraforge.progress import say

    chosen_policy, known = settle_policy(named, moments)
    reading = ReadOptions(allow_pickle, base)
    with uncollected():
        if known is None and width is not None:
            entries = stream_source(
                source, cache, need="spectra", method=chosen_method, options=reading
            ).entries
        else:  # moments are of modules, and so are stored types
            fleet = open_source(source, reading)
            entries = entries_of(fleet, cache, moments=known, method=chosen_method)
            width = width or widest(fleet)
        problem = problem_of(entries)
        chosen = choose(problem, chosen_policy, wanted, bytes_per_parameter=width, options=options)
    if warning := floor_warning(wanted, chosen.ceiling, problem.rank, problem.cost):
        say(warning)
    with uncollected():
        save_allocation(allocation_file(fleet_name(source), problem, chosen), out)
    if records is not None:
        write_jsonl(records, allocation_records(problem, chosen))
    say(
        f"{out}: {chosen_policy} at {wanted}: {chosen.spent:,} of {chosen.ceiling.params:,} parameters, "
        f"{chosen.retained_energy:.1%} of the energy, ranks {chosen.k.min()} to {chosen.k.max()}"
    )
