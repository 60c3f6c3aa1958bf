"""The file that an engine's process keeps for whoever wants to know what it counts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loraforge.errors import OutputError
from loraforge.runtime.counters import ENVIRONMENT, publish, wanted


def test_the_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert not wanted()
    publish({"loads": 1})
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "counters.json"))
    assert wanted()
    for loads in (1, 2):
        publish({"loads": loads})
        assert json.loads((tmp_path / "counters.json").read_text()) == {"loads": loads}
    assert [path.name for path in tmp_path.iterdir()] == ["counters.json"]


def test_a_file_that_cannot_be_written_is_said_and_leaves_nothing_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (tmp_path / "absent" / "counters.json", tmp_path):
        monkeypatch.setenv(ENVIRONMENT, str(place))
        with pytest.raises(OutputError, match=f"^{place}: cannot be written"):
            publish({"loads": 1})
    file = tmp_path / "counters.json"
    monkeypatch.setenv(ENVIRONMENT, str(file))
    publish({"loads": 1})
    (tmp_path / f".{file.name}.{os.getpid()}").mkdir()  # where the next would be written
    with pytest.raises(OutputError, match="cannot be written"):
        publish({"loads": 2})
    assert not file.exists()
