"""``loraforge cts``: the baseline that shares bases between adapters, as folders that can be scored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def cts(
    source: Annotated[
        list[Path], typer.Argument(help="a fleet lock, or adapter folders", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="folder to write; must be absent or empty", show_default=False)
    ],
    budget: Annotated[
        str,
        typer.Option(help="share of the nominal ranks whose cost is the ceiling: 1/12", show_default=False),
    ],
    variant: Annotated[str, typer.Option(help="full, weighted or diagonal")] = "full",
    iterations: Annotated[int, typer.Option(min=1, help="alternations")] = 100,
    steps: Annotated[str, typer.Option(help="exact, or power (cheaper, more of them needed)")] = "exact",
    precision: Annotated[str, typer.Option(help="float32 or float64, of the fit")] = "float32",
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="replace what is in OUT")] = False,
) -> None:
    """Fit shared bases to a whole fleet (Compress-then-Serve) and write equivalent independent adapters."""
    from typing import get_args

    from loraforge.allocate.budget import parse_budget
    from loraforge.cts.accounting import Variant
    from loraforge.export.options import choose
    from loraforge.files import refuse_folder

    wanted = parse_budget(budget)
    kind: Variant = choose("variant", variant, get_args(Variant))
    power = choose("steps", steps, ("exact", "power")) == "power"
    width = choose("precision", precision, ("float32", "float64"))
    refuse_folder(out, source, force=force)

    from loraforge.cts.export import compress_jointly
    from loraforge.fleet.lock import fleet_name
    from loraforge.fleet.source import open_source
    from loraforge.progress import say

    report = compress_jointly(
        open_source(source),
        fleet_name(source),
        wanted,
        out,
        variant=kind,
        iterations=iterations,
        power=power,
        precision="float64" if width == "float64" else "float32",
        device=device,
        force=force,
    )
    say(
        f"{out}: {report.arm} at {wanted}: shared rank {report.rank}, {report.spent:,} of {report.ceiling:,} parameters"
    )
