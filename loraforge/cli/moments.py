"""``loraforge moments``: what the base model's linear maps are fed, from a few unlabelled texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def moments(
    base: Annotated[Path, typer.Argument(help="folder of the base model", show_default=False)],
    texts: Annotated[
        list[Path],
        typer.Argument(
            help="calibration texts: JSON Lines with prompt or text, or plain lines", show_default=False
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="file of moments to write (safetensors)", show_default=False)
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="the first so many texts of each file")] = None,
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="texts a forward pass")] = 16,
) -> None:
    """Collect second moments of module inputs for the activation policies: once per base model."""
    from loraforge.files import refuse_unwritable

    refuse_unwritable(out)

    from loraforge.activation.moments import collect_moments, read_texts
    from loraforge.progress import say

    found = read_texts(texts, limit=limit)
    made = collect_moments(base, found, out, device=device, batch_size=batch_size)
    say(
        f"{out}: {made.tokens:,} tokens of {len(found)} texts, {len(made.inputs)} modules, sha256 {made.sha256[:16]}"
    )
