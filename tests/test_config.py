"""The configuration: files that load, errors that name the key, schema and reference that follow the model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from loraforge.config import config_schema, load_config, parse_config, with_reference
from loraforge.errors import InputError, UsageError
from loraforge.files import pretty_json
from loraforge.fleet.lock import load_lock

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "config").glob("*.yaml"))
MINIMAL = {"name": "x", "fleet": "fleet.lock.json"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_loads_and_names_adapters_of_its_fleet(path: Path) -> None:
    config = load_config(path)
    assert config.name == {"config": "demo"}.get(path.stem, path.stem)
    known = {adapter.name for adapter in load_lock(ROOT / config.fleet).adapters}
    for chosen in (config.quality.adapters, config.recompression.adapters):
        assert chosen == "all" or set(chosen) <= known


def test_the_schema_is_that_of_the_model() -> None:
    assert (ROOT / "config/schema.json").read_text() == pretty_json(config_schema()), (
        "run python -m loraforge.config"
    )


def test_the_reference_is_that_of_the_model() -> None:
    page = (ROOT / "config/README.md").read_text()
    assert page == with_reference(page), "run python -m loraforge.config"
    assert "| `quality.limit` | integer or null | `null` |" in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budgets": ["1/0"]}, r"c.yaml: budgets.0: .*'1/0' is not a fraction such as 1/12"),
        ({"budgets": ["3/2"]}, r"c.yaml: budgets.0: .*3/2 is not above 0 and at most 1"),
        ({"policies": ["magic"]}, r"c.yaml: policies.0: .*'uniform', 'spectral', .* or 'sv-fro'"),
        ({"quality": {"limit": 0}}, r"c.yaml: quality.limit: .*greater than or equal to 1"),
        ({"study": {"decide_at": "1/4"}}, r"c.yaml: study: .*decide_at 1/4 is none of the budgets"),
        ({"study": {"finalists": 9}}, r"c.yaml: study: .*9 finalists of 2 candidates"),
        ({"quality": {"split": "train"}}, r"c.yaml: quality.split: .*'validation' or 'test'"),
        ({"qualty": {}}, r"c.yaml: qualty: .*not permitted"),
        ({"name": "../x"}, r"c.yaml: name: .*pattern"),
    ],
)
def test_a_mistake_names_the_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message + r".*see config/README.md"):
        parse_config({**MINIMAL, **change}, "c.yaml")


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    with pytest.raises(InputError, match=r"c.yaml: config file not found"):
        load_config(path)
    path.write_text("name: [")
    with pytest.raises(InputError, match=r"c.yaml: not valid YAML"):
        load_config(path)
    path.write_bytes(b"name: \x90")
    with pytest.raises(InputError, match=r"c.yaml: cannot be read \("):
        load_config(path)
    with pytest.raises(InputError, match=r"cannot be read \(.*directory"):
        load_config(tmp_path)
    path.write_text("- 1")
    with pytest.raises(InputError, match=r"c.yaml: not a mapping"):
        load_config(path)


def test_the_conda_environment_has_the_versions_of_the_lock() -> None:
    lock = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "envs/core.lock").read_text(), re.MULTILINE))
    lock["torch"] = (ROOT / "envs/torch.txt").read_text().split("torch==")[1].strip()
    pins = yaml.safe_load((ROOT / "envs/core.yaml").read_text())["dependencies"][-1]["pip"]
    assert {name: lock[name] for name in lock if f"{name}=={lock[name]}" in pins}.keys() == {
        pin.split("==")[0] for pin in pins
    }


def test_the_development_lock_extends_the_core_lock() -> None:
    core, dev = (
        set(re.findall(r"^\S+==\S+", (ROOT / f"envs/{name}.lock").read_text(), re.MULTILINE))
        for name in ("core", "dev")
    )
    assert core
    assert core < dev
