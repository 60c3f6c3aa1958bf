"""Options of the commands that choose ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraforge.cli import completion

PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="spectral, uniform, fair, adapter-relative, ...: see docs/policies.md",
        show_default="adapter-sqrt; with --moments, activation or fisher-sqrt, by their kind",
        autocompletion=completion.policies,
    ),
]
MomentsFile = Annotated[
    Path | None,
    typer.Option("--moments", help="file of `loraforge moments`, for activation and fisher policies"),
]
