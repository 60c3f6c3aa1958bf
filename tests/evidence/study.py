"""A study on disk: evidence, figures and a locked fleet, and the command line that acts on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner, Result

from loraforge.cli import app

CONFIG = "name: tiny\nfleet: config/fleets/smol.lock.json\n"
DATE = "2026-11-29"


def invoke(*arguments: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@dataclass(frozen=True)
class Study:
    """Everything that an audit looks at."""

    evidence: Path
    figures: Path
    lock: Path

    def bag(self, target: str) -> Path:
        return self.evidence / target / f"{DATE.replace('-', '')}-cpu2"

    def audit(self) -> Result:
        return invoke("audit", self.evidence, "--fleet", self.lock, "--figures", self.figures)
