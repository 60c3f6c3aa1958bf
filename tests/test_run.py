"""The one-command runner gets over what an interrupt leaves."""

from __future__ import annotations

import runpy
import venv
from pathlib import Path

RUN = Path(__file__).resolve().parents[1] / "scripts/run.py"


def test_an_environment_without_pip_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts/run.py"
    script.write_text(RUN.read_text())
    has_pip = runpy.run_path(str(script), run_name="run")["has_pip"]
    assert not has_pip()
    venv.create(tmp_path / ".venv", with_pip=False)  # what is there when it is interrupted
    assert (tmp_path / ".venv/bin/python").exists()
    assert not has_pip()
