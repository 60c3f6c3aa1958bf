"""``loraforge bench workload``, ``serve``, ``sweep`` and ``gather``: seeded workloads, their replay, and whole
experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

_CODES = {"interrupted by SIGINT": 130, "interrupted by SIGTERM": 143}

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.command()
def workload(
    load: Annotated[Path, typer.Argument(help="declared load (YAML)", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="workload (JSON Lines)", show_default=False)],
    rate: Annotated[float, typer.Option(help="offered requests a second", show_default=False)],
    seed: Annotated[int, typer.Option(help="of requests, routing, lengths and arrivals")] = 101,
    outputs_from: Annotated[
        Path | None,
        typer.Option(help="records of a run of the same requests, whose output lengths these take"),
    ] = None,
) -> None:
    """Make a workload file.

    The same load, seed and rate give the same bytes; another rate leaves requests and routing as they are.
    """
    from loraforge.cli.outputs import refuse_workload
    from loraforge.errors import InputError
    from loraforge.files import sha256_file
    from loraforge.progress import say
    from loraforge.serving.records import read_run
    from loraforge.serving.workload import load_spec, make_workload, write_workload

    refuse_workload(out)
    spec = load_spec(load)
    if outputs_from is None:
        made = make_workload(spec, seed, rate)
    else:
        earlier = read_run(outputs_from)
        made = make_workload(spec, seed, rate, earlier.outputs(), sha256_file(outputs_from))
        if earlier.run.requests_sha256 != made.header["requests_sha256"]:
            raise InputError(
                "is a run of other requests",
                path=outputs_from,
                remedy="take a run of this load and this seed",
            )
    write_workload(out, made)
    tokens = sum(request.output_tokens for request in made.requests)
    say(f"{len(made.requests)} requests, {tokens} output tokens, sha256 {made.sha256}")


@app.command()
def serve(
    url: Annotated[
        list[str], typer.Option(help="server: URL, or FLEET=URL once a fleet", show_default=False)
    ],
    workload: Annotated[
        Path, typer.Option(help="file that loraforge bench workload made", show_default=False)
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="records (JSON Lines)", show_default=False)],
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="how the server takes adapters")] = "vllm",
    stop: Annotated[
        Literal["exact", "exact-eos", "natural"],
        typer.Option(help="the stated lengths, EOS ignored; the same, EOS not ignored; or at EOS"),
    ] = "exact",
    base_only: Annotated[bool, typer.Option("--base-only", help="ask the base model every time")] = False,
    warmup: Annotated[int, typer.Option(min=0, help="requests sent first, not recorded")] = 0,
    conditioning: Annotated[
        bool, typer.Option("--conditioning", help="send the whole workload once before, untimed")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=1e9, help="seconds that a request may take")
    ] = 600.0,
) -> None:
    """Replay a workload against a server.

    Open loop, a fresh connection a request, no retries. A failed request is recorded with its reason. A replay that is
    interrupted, or whose server goes away, writes what it saw and ends with an error.
    """
    from loraforge.cli.outputs import refuse_measurements
    from loraforge.errors import LoraForgeError
    from loraforge.progress import progress, say
    from loraforge.serving.client import Options, parse_urls, replay
    from loraforge.serving.metrics import failures, summarise
    from loraforge.serving.records import write_run
    from loraforge.serving.workload import read_workload

    refuse_measurements(out)
    asked = read_workload(workload)
    fleets = sorted({request.fleet for request in asked.requests})
    options = Options(engine=engine, stop=stop, base_only=base_only, timeout_s=timeout)
    with progress("requests", len(asked.requests)) as ticker:
        run = replay(
            asked,
            parse_urls(url, fleets),
            options,
            warmup=warmup,
            conditioning=conditioning,
            ticker=ticker,
        )
    write_run(out, run)
    for key, value in summarise(run).items():
        say(f"{key:16s} {'-' if value is None else format(value, '12.4f')}")
    for reason, count in failures(run.requests).items():
        say(f"failed: {count} x {reason}")
    if run.run.ended is not None:
        if code := _CODES.get(run.run.ended):
            say(f"{run.run.ended}; {out} has what was seen until then")
            raise typer.Exit(code)
        raise LoraForgeError(run.run.ended, path=out, remedy="start the server again, and run again")


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(help="declared experiment (YAML)", show_default=False)],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="folder of records, requests and logs", show_default=False)
    ],
    arms: Annotated[
        str | None, typer.Option(help="comma-separated arms to run, of those declared; default: all")
    ] = None,
    budget_seconds: Annotated[
        float | None,
        typer.Option("--budget-seconds", min=1, help="begin nothing that would end later; default: no bound"),
    ] = None,
    root: Annotated[Path, typer.Option(help="where the paths of the experiment start")] = Path("."),
    python: Annotated[
        Path | None, typer.Option(help="interpreter that has the engine; default: as declared, or this one")
    ] = None,
    port_offset: Annotated[
        int,
        typer.Option(min=0, help="added to the declared ports, for sweeps side by side on several GPUs"),
    ] = 0,
) -> None:
    """Run a serving experiment.

    Starts each arm's engines once, replays the same workloads to all arms, and appends what it measures. The same
    command goes on with a folder that is not complete; an arm whose engines fail is recorded so, and the next goes on.
    """
    from loraforge.errors import LoraForgeError
    from loraforge.progress import say
    from loraforge.serving.experiment import load_experiment
    from loraforge.serving.sweep import run_sweep

    chosen = None if arms is None else [name.strip() for name in arms.split(",") if name.strip()]
    outcome = run_sweep(
        load_experiment(config),
        root,
        out,
        arms=chosen,
        budget_s=budget_seconds,
        python=python,
        port_offset=port_offset,
    )
    if outcome.interrupted is not None:
        say(f"{outcome.interrupted}; run the same command again to resume")
        raise typer.Exit(_CODES[outcome.interrupted])
    for problem in outcome.problems:
        say(problem)
    if outcome.problems:
        raise LoraForgeError(
            f"{outcome.left} points are not measured",
            path=out,
            remedy="mend that, and run the same command again",
        )
    if outcome.left:
        say(f"{outcome.left} points are left; run the same command again to go on")


@app.command()
def gather(
    parts: Annotated[
        list[Path], typer.Argument(help="folders of sweeps of one experiment", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="folder for what all of them have", show_default=False)
    ],
) -> None:
    """Join sweeps of one experiment.

    For arms that were measured side by side: the folder is as one sweep would have left it, and bench sweep goes on
    with it. The parts stay.
    """
    from loraforge.progress import say
    from loraforge.serving.gather import gather_sweeps

    found = gather_sweeps(parts, out)
    say(f"{len(found.starts)} starts, {len(found.points)} points, of which {len(found.complete)} count")


@app.command()
def shapes(
    out: Annotated[
        Path,
        typer.Option("-o", "--out", help="folder for FLEET/base, FLEET/original, ...", show_default=False),
    ],
    fleets: Annotated[str, typer.Option(help="comma-separated shape fleets")] = "qwen50,llama35",
    weights: Annotated[
        str, typer.Option(help="comma-separated compressed sets beside the original: uniform, spectral")
    ] = "uniform,spectral",
    budget: Annotated[str, typer.Option(help="of the compressed sets")] = "1/12",
    spectra: Annotated[
        Path | None, typer.Option(help="records of measured spectra that a shape fleet draws from")
    ] = None,
) -> None:
    """Make shape fleets to serve, on a GPU.

    Random base weights with a tokenizer, original adapters, and compressed ones of the same originals. What is there
    stays.
    """
    import torch

    from loraforge.bench.fleets import SEED, measured_spectra
    from loraforge.errors import MissingDependencyError, UsageError
    from loraforge.fleet.shapes import shape_fleet
    from loraforge.serving.arms import Weights
    from loraforge.serving.shapes import CONFIGS, write_served_fleet

    kinds: dict[str, Weights] = {"uniform": "uniform", "spectral": "spectral"}
    asked = [name.strip() for name in weights.split(",") if name.strip()]
    if odd := [name for name in asked if name not in kinds]:
        raise UsageError(f"{odd[0]!r} is no policy", key="--weights", remedy="give uniform, spectral or both")
    if not torch.cuda.is_available():
        raise MissingDependencyError("needs a GPU, and there is none here", key="bench shapes")
    for fleet in [shape_fleet(name.strip()) for name in fleets.split(",") if name.strip()]:
        write_served_fleet(
            fleet,
            CONFIGS[fleet.base_model],
            out / fleet.name,
            torch.device("cuda"),
            SEED,
            weights=[kinds[name] for name in asked],
            budget=budget,
            pool=measured_spectra(spectra),
        )
