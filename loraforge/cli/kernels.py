"""``loraforge bench kernels``, ``tune``, ``tune-steps``, ``vllm-tiles``, ``engines``: serving kernels timed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraforge.errors import UsageError

if TYPE_CHECKING:
    from loraforge.dispatch import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)

_Engines = Annotated[
    Path, typer.Option("--engines", help="folder that loraforge bench engines made", show_default=False)
]
_Budget = Annotated[
    float | None, typer.Option("--budget-seconds", min=1, help="stop after so long; the same command goes on")
]
_Workers = Annotated[
    int, typer.Option("--workers", min=0, help="processes that compile the engines' kernels first")
]
_Spectra = Annotated[Path | None, typer.Option(help="records of measured spectra that mixed ranks come from")]
_ENDED = "the budget ended before the grid did; run the same command again to go on"


@app.command()
def engines(
    out: Annotated[Path, typer.Argument(help="folder to make", show_default=False)],
    force: Annotated[bool, typer.Option(help="replace what is there")] = False,
) -> None:
    """Fetch the engines' LoRA kernels by pip.

    Of SGLang 0.5.22 and 0.5.23 and vLLM 0.26.0, their Python files alone.
    """
    from loraforge.bench.native.sites import fetch

    fetch(out, force=force)


@app.command()
def kernels(
    engines: _Engines,
    out: Annotated[Path, typer.Option("-o", "--out", help="folder of records, one file a target")] = Path(
        "results/kernels"
    ),
    table: Annotated[
        Path | None, typer.Option(help="dispatch table; default: the one that ships for this device")
    ] = None,
    tiles: Annotated[
        Path | None, typer.Option(help="tuned tiles of the engines' kernels; default: those that ship")
    ] = None,
    groups: Annotated[
        str, typer.Option(help="comma-separated: layer, sweep, ablation")
    ] = "layer,sweep,ablation",
    spectra: _Spectra = None,
    budget_seconds: _Budget = None,
    workers: _Workers = 0,
    flushed: Annotated[bool, typer.Option(help="time with a flushed cache as well")] = True,
) -> None:
    """Check and time our kernels and the engines'.

    On the reported grid; goes on from the records in the folder.
    """
    from loraforge.bench.native.tiles import FOLDER
    from loraforge.bench.runs import GROUPS, Setup, run_kernels
    from loraforge.dispatch import load_table, table_path
    from loraforge.progress import say

    chosen = [name.strip() for name in groups.split(",") if name.strip()]
    if not chosen or (strange := sorted(set(chosen) - set(GROUPS))):
        raise UsageError(
            f"no group {strange[0]!r}" if chosen else "names no group",
            key="--groups",
            remedy=f"choose from {', '.join(GROUPS)}",
        )
    device = _device()
    shipped = FOLDER / table_path(device).name
    if tiles is None and shipped.is_file():
        tiles = shipped
    whole = run_kernels(
        Setup(engines, load_table(device, table), tiles),
        out,
        groups=chosen,
        spectra=spectra,
        budget_s=budget_seconds,
        workers=workers,
        flushed=flushed,
        say=say,
    )
    if not whole:
        say(_ENDED)


@app.command()
def tune(
    engines: _Engines,
    out: Annotated[Path, typer.Option("-o", "--out", help="folder for the table and the tiles")] = Path(
        "results/tuned"
    ),
    tiles: Annotated[
        Path | None, typer.Option(help="tuned tiles of the engines' kernels; default: they are tuned first")
    ] = None,
    budget_seconds: _Budget = None,
    workers: _Workers = 0,
) -> None:
    """Tune dispatch table and native tiles.

    Of this device, on batches that the reported grid does not have; goes on from the journal beside the table.
    """
    from loraforge.bench.runs import Setup, run_tuning
    from loraforge.dispatch import table_path
    from loraforge.progress import say

    name = table_path(_device()).name
    frozen = run_tuning(
        Setup(engines, tiles=tiles),
        out / name,
        out / f"tiles-{name}",
        budget_s=budget_seconds,
        workers=workers,
        say=say,
    )
    _tell(frozen)


@app.command("tune-steps")
def tune_steps(
    out: Annotated[Path, typer.Option("-o", "--out", help="folder for the table")] = Path("results/tuned"),
    table: Annotated[
        Path | None, typer.Option(help="table whose choices are to be beaten; default: this device's")
    ] = None,
    spectra: _Spectra = None,
    budget_seconds: _Budget = None,
    workers: Annotated[
        int, typer.Option("--workers", min=0, help="processes that compile kernels first")
    ] = 0,
) -> None:
    """Tune a second table, of steps as engines run them.

    Steps of compressed fleets at saturation, every update timed behind its base product; goes on from the journal
    beside the table.
    """
    import torch

    from loraforge.bench.runs import gpu
    from loraforge.bench.step_tuning import fleet_ranks, step_times
    from loraforge.bench.step_tuning import tune_steps as run
    from loraforge.dispatch import load_table, steps_path
    from loraforge.progress import say

    device = gpu()
    name = torch.cuda.get_device_name(device)
    ranks = fleet_ranks(spectra)
    frozen = run(
        out / steps_path(name).name,
        name,
        step_times(device, ranks),
        load_table(name, table),
        ranks,
        budget_s=budget_seconds,
        workers=workers,
        say=say,
    )
    _tell(frozen)


@app.command("vllm-tiles")
def vllm_tiles(
    out: Annotated[
        Path,
        typer.Option("-o", "--out", help="folder for VLLM_TUNED_CONFIG_FOLDER to name", show_default=False),
    ],
    device: Annotated[str, typer.Option(help="the GPU, as torch names it")] = "NVIDIA H200",
    tiles: Annotated[
        Path | None, typer.Option(help="tuned tiles of the engines' kernels; default: those of the package")
    ] = None,
) -> None:
    """Write tuned tiles for vLLM.

    Those of its own LoRA kernels, as it reads them.
    """
    from loraforge.bench.native.tiles import FOLDER, read_tiles
    from loraforge.bench.native.vllm_folder import write_folder
    from loraforge.dispatch import table_path
    from loraforge.progress import say

    found = read_tiles(tiles or FOLDER / table_path(device).name)
    for file in write_folder(found, device, out):
        say(str(file))


def _device() -> str:
    """What a table is named by: the GPU, or ``generic``."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "generic"


def _tell(frozen: Table | None) -> None:
    """How tuning ended: with a table, or None where the budget was spent first."""
    from loraforge.progress import say

    say(_ENDED if frozen is None else f"{len(frozen.entries)} entries, sha256 {frozen.sha256}")
