"""The network is off before the first import, and a package that is missing is named with its remedy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from loraforge.errors import MissingDependencyError
from loraforge.fleet.base_model import convert_gguf
from loraforge.fleet.offline import offline_imports

SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def test_offline_before_the_import_and_missing_package_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.setenv(name, "0")
    with pytest.raises(MissingDependencyError) as caught, offline_imports():  # noqa: PT012
        assert [os.environ[name] for name in SWITCHES] == ["1", "1"]
        import a_package_that_nobody_has.part  # noqa: F401
    assert str(caught.value) == "a_package_that_nobody_has is not installed; pip install 'loraforge[quality]'"
    assert caught.value.exit_code == 7


@pytest.mark.parametrize("package", ["accelerate", "gguf"])
def test_the_conversion_names_the_package_that_transformers_would_miss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str
) -> None:
    for name in SWITCHES:
        monkeypatch.setenv(name, "0")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=f"^{package} is not installed"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
