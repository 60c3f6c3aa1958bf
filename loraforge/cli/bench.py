"""``loraforge bench``: timings of factor construction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from loraforge.errors import UsageError

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _bench() -> None:
    """Time factor construction."""


@app.command()
def recompression(
    source: Annotated[
        list[Path] | None, typer.Argument(help="a fleet lock, or adapter folders", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="records (JSON Lines)")] = Path(
        "results/recompression.jsonl"
    ),
    methods: Annotated[
        str | None,
        typer.Option(
            help="comma-separated: florist, spectral_transform, either with _batched, fraq, tsqr, gram; with"
            " --shapes gram, gram_streams, gram_deferred, gram_deferred_uniform, tsqr, fraq, fraq_batched,"
            " spectral_transform, florist"
        ),
    ] = None,
    warmups: Annotated[int | None, typer.Option(min=0, help="untimed passes; default 1, on a GPU 2")] = None,
    passes: Annotated[int | None, typer.Option(min=1, help="timed passes; default 3, on a GPU 5")] = None,
    adapters: Annotated[str, typer.Option(help="comma-separated adapter names, or all")] = "all",
    workers: Annotated[int | None, typer.Option(min=1, help="threads; default: the available CPUs")] = None,
    shapes: Annotated[
        str | None,
        typer.Option(help="comma-separated shape fleets (qwen50, llama35), made and timed on the GPU"),
    ] = None,
    subset: Annotated[
        int | None, typer.Option(min=1, help="matrices of the sample that pair-at-a-time methods take")
    ] = None,
    spectra: Annotated[
        Path | None, typer.Option(help="records of measured spectra that a shape fleet draws from")
    ] = None,
) -> None:
    """Time recompression of a fleet by every method. Passes are interleaved, and every result is checked."""
    from statistics import median

    from loraforge.files import write_jsonl
    from loraforge.progress import say

    if (shapes is None) == (not source):
        raise UsageError(
            "needs a fleet: either a source or --shapes", remedy="loraforge bench recompression --help"
        )
    chosen = None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    if shapes is not None:
        names = [name.strip() for name in shapes.split(",") if name.strip()]
        records = [
            record
            for name in names
            for record in device_records(name, chosen, warmups, passes, subset, spectra)
        ]
    else:
        records = _on_cpu(source or [], adapters, chosen, warmups, passes, workers)
    write_jsonl(out, records)
    timed: dict[str, list[float]] = {}
    for record in records:
        if "pass" in record:
            name = f"{record['fleet']}." if "fleet" in record else ""
            sampled = f" ({record['n']} matrices)" if "n" in record else ""
            timed.setdefault(f"{name}{record['method']}{sampled}", []).append(record["seconds"])
    for name, seconds in timed.items():
        say(f"{name:40s} {median(seconds):8.4f} s")


def _on_cpu(
    source: list[Path],
    adapters: str,
    methods: list[str] | None,
    warmups: int | None,
    passes: int | None,
    workers: int | None,
) -> list[dict[str, Any]]:
    from loraforge.factor.recompression import DEFAULT_METHODS, benchmark
    from loraforge.fleet.source import open_source

    fleet = open_source(source)
    if adapters != "all":
        wanted = adapters.split(",")
        missing = sorted(set(wanted).difference(adapter.name for adapter in fleet))
        if missing:
            raise UsageError(
                f"no adapter {missing[0]!r}",
                key="--adapters",
                remedy=f"choose from {', '.join(adapter.name for adapter in fleet)}",
            )
        fleet = [adapter for adapter in fleet if adapter.name in wanted]
    return benchmark(
        fleet,
        methods=DEFAULT_METHODS if methods is None else methods,
        warmups=1 if warmups is None else warmups,
        passes=3 if passes is None else passes,
        workers=workers,
    )


def device_records(
    name: str,
    methods: list[str] | None,
    warmups: int | None,
    passes: int | None,
    subset: int | None,
    spectra: Path | None,
) -> list[dict[str, Any]]:
    """Records of a shape fleet on the GPU: what ``--shapes`` does, for scripts that do without the command line."""
    from fractions import Fraction

    import numpy as np
    import torch

    from loraforge.allocate.problem import Problem
    from loraforge.allocate.spectral import half_uniform_floor, spectral
    from loraforge.allocate.uniform import uniform
    from loraforge.errors import InputError, MissingDependencyError
    from loraforge.factor import gpu
    from loraforge.factor.gpu.recompression import DEFAULT_METHODS, benchmark_device
    from loraforge.factor.gpu.synthetic import device_fleet
    from loraforge.files import read_jsonl
    from loraforge.fleet.shapes import shape_fleet

    seed = 20261130
    shapes = shape_fleet(name)
    backend = gpu.kernels()
    if backend is None:
        raise MissingDependencyError(
            "shape fleets are timed on a GPU, and there is none that works here",
            key="--shapes",
            remedy="run loraforge doctor, or give adapter folders to time on the CPU",
        )
    pool = None
    if spectra is not None:
        pool = [np.array(record["sigma"]) for record in read_jsonl(spectra) if "sigma" in record]
        if not pool:
            raise InputError(
                "holds no record with sigma", path=spectra, remedy="give records of loraforge factor"
            )

    def ranks(sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """At 1/12, the budget of the paper's headline."""
        kept = uniform(shapes.rank, Fraction(1, 12))
        problem = Problem(shapes.names, shapes.rank, shapes.cost, sigma.numpy())
        chosen = spectral(problem, int(kept @ shapes.cost), half_uniform_floor(kept))
        return torch.from_numpy(chosen.k), torch.from_numpy(kept)

    found = benchmark_device(
        device_fleet(shapes, backend.device, seed, pool),
        backend,
        ranks,
        methods=DEFAULT_METHODS if methods is None else methods,
        warmups=2 if warmups is None else warmups,
        passes=5 if passes is None else passes,
        subset=subset,
        seed=seed,
    )
    torch.cuda.empty_cache()  # the next fleet needs the memory whole
    return found
