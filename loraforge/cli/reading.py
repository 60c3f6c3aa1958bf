"""Options of every command that opens adapters: what may be read beyond safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="read .bin checkpoints too, their tensors only")
]
BaseFolder = Annotated[
    Path | None, typer.Option("--base", help="folder of the base model, whose shapes VeRA adapters need")
]
