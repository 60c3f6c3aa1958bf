"""The network is off before the first import, and a package that is missing is named with its remedy."""

from __future__ import annotations

import os

import pytest

from loraforge.errors import MissingDependencyError
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
