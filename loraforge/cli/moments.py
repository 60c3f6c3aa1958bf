"""``loraforge moments``: what updates are measured by besides their weights, from a few unlabelled texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def moments(
    base: Annotated[Path, typer.Argument(help="folder of the base model", show_default=False)],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="file of moments to write (safetensors)", show_default=False)
    ],
    texts: Annotated[
        list[Path] | None,
        typer.Argument(
            help="calibration texts: JSON Lines with prompt or text, or plain lines", show_default=False
        ),
    ] = None,
    adapters: Annotated[
        list[Path] | None,
        typer.Option(help="for the fisher policies: a fleet lock, or adapter folders (repeatable)"),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="with --adapters: folder of NAME.jsonl, NAME.txt or NAME/SPLIT.jsonl of each"),
    ] = None,
    split: Annotated[
        str, typer.Option(help="which split of --prompts; those not trained on tell more: validation")
    ] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="the first so many texts of each file")] = None,
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="with --adapters: processes that share the device")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="texts a forward pass")] = 16,
    draws: Annotated[int, typer.Option(min=1, help="with --adapters: backward passes an answer")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="with --adapters: of the vectors taken back")] = 20261130,
    cache: Annotated[
        Path, typer.Option(help="with --adapters: folder that keeps what each has given")
    ] = Path(".cache/loraforge"),
) -> None:
    """Collect moments for the policies that measure more than weights.

    Of TEXTS: second moments of module inputs, once per base model, for the activation policies. With --adapters and
    --prompts: the Fisher information of each adapter's own answers, for the fisher policies. Labels are never read.
    """
    from loraforge.cli.outputs import refuse_moments

    refuse_moments(out)
    if adapters and (texts or prompts is None):
        raise UsageError(
            "adapters answer prompts of their own",
            key="--adapters",
            remedy="name the folder of prompts with --prompts, and no texts",
        )
    if not adapters and (prompts is not None or not texts):
        raise UsageError(
            "nothing to collect from", remedy="name files of texts, or --adapters and their --prompts"
        )

    from loraforge.progress import say

    if adapters and prompts is not None:
        from loraforge.activation.answers import find_prompts
        from loraforge.activation.fisher_collection import FisherSettings, collect_fisher
        from loraforge.fleet.source import open_source

        fleet = open_source(adapters)
        asked = {
            adapter.name: find_prompts(prompts, adapter.name, limit=limit, split=split) for adapter in fleet
        }
        settings = FisherSettings(draws=draws, seed=seed, batch_size=batch_size)
        fisher = collect_fisher(
            base, fleet, asked, out, cache=cache, device=device, jobs=jobs, settings=settings
        )
        say(
            f"{out}: {fisher.tokens:,} tokens of {sum(map(len, asked.values()))} answers, "
            f"{len(fisher.adapters)} adapters, sha256 {fisher.sha256[:16]}"
        )
        return

    from loraforge.activation.inputs import collect_moments, read_texts

    found = read_texts(texts or (), limit=limit)
    made = collect_moments(base, found, out, device=device, batch_size=batch_size)
    say(
        f"{out}: {made.tokens:,} tokens of {len(found)} texts, {len(made.inputs)} modules, sha256 {made.sha256[:16]}"
    )
