"""What the tests of both launchers share: a fleet of two adapters, a base model, and command lines taken apart."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from adapter_folders import SEVEN, MakeAdapter

from loraforge.cli import main


def new_base(folder: Path) -> Path:
    """The folder of a base model, as far as a launcher looks at it."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def new_fleet(folder: Path, make_adapter: MakeAdapter, rank: int) -> Path:
    """``all`` has every module at ``rank``; ``few`` those of attention, v_proj at a rank of its own."""
    make_adapter(folder / "all", r=rank, targets=SEVEN, lora_alpha=8)
    make_adapter(folder / "few", r=4, seed=1, rank_pattern={"v_proj": 6})
    return folder


def value_of(line: Sequence[str], name: str) -> str:
    """What follows an argument."""
    return line[line.index(name) + 1]


@dataclass
class Launcher:
    """``loraforge serve ENGINE``, called in this process."""

    engine: str
    capsys: pytest.CaptureFixture[str]

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        with pytest.raises(SystemExit) as ended:
            main(["serve", self.engine, *map(str, arguments)])
        said = self.capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    def dry(self, *arguments: object) -> list[str]:
        """The command line that it would become."""
        code, out, err = self.run("--dry-run", *arguments)
        assert code == 0, err
        return shlex.split(out)
