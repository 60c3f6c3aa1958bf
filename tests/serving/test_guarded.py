"""A guarded process, whatever becomes of its watchdog."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraforge.serving import guarded


def test_a_process_runs_where_its_watchdog_was_killed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = guarded._guard

    def killed(*arguments: object) -> subprocess.Popen[bytes]:
        guard = start(*arguments)  # type: ignore[arg-type]
        guard.kill()
        guard.wait()
        return guard

    monkeypatch.setattr(guarded, "_guard", killed)
    said = tmp_path / "output.log"
    line = [sys.executable, "-c", "print('runs'); raise SystemExit(3)"]
    with said.open("wb") as output:
        process = guarded.Guarded(line, env=os.environ, output=output, stop_s=5.0)
    assert process._process.wait(30) == 3
    assert said.read_text() == "runs\n"
    assert process.end()
