"""Fleets in groups: the same entries, read and factorised no more often than need be."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_folders import MakeAdapter

from loraforge.allocate.budget import parse_budget
from loraforge.allocate.policy import Table, allocate, problem_of
from loraforge.cli import main
from loraforge.errors import InputError, IntegrityError, UsageError
from loraforge.factor import fleet as factor_fleet
from loraforge.factor import known, streaming
from loraforge.factor.cache import CachedAdapter, find, find_spectra, spectra_path
from loraforge.factor.columns import ModuleRecord, ModuleTable
from loraforge.factor.fleet import factorise_fleet
from loraforge.factor.gpu.ops import Emulated
from loraforge.factor.streaming import Streamed, stream_source
from loraforge.fleet.lock import save_lock
from loraforge.fleet.locking import make_lock
from loraforge.fleet.parts import Part, parse_part
from loraforge.fleet.peft_io import open_adapter, open_fleet

Plan = Callable[..., Streamed]


@pytest.fixture
def root(tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    """Five adapters, in a folder that was last changed an hour ago, as far as can be told."""
    for number in range(5):
        make_adapter(tmp_path / "fleet" / f"a{number}", r=2 + number, seed=number, dtype=torch.bfloat16)
    return tmp_path / "fleet"


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "SETTLED_S", 0.0)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the adapters that are factorised from here on."""
    names: list[str] = []
    real = factor_fleet.factorise_adapter

    def counted(adapter: Any, **options: Any) -> Any:
        names.append(adapter.name)
        return real(adapter, **options)

    monkeypatch.setattr(factor_fleet, "factorise_adapter", counted)
    return names


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    def run(*source: Path, **options: Any) -> Streamed:
        return stream_source(source, tmp_path / "cache", need="spectra", keep="spectra", **options)

    return run


@pytest.mark.parametrize("group", [1, 2, 64])
def test_groups_give_what_the_whole_fleet_gives(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    monkeypatch.setattr(streaming, "GROUP", group)
    found = stream_source([root], tmp_path / "one")
    wanted = factorise_fleet(open_fleet([root]), tmp_path / "two")
    assert (found.read, found.factorised) == (5, 5)
    assert [entry.adapter for entry in found.entries] == [entry.adapter for entry in wanted]
    for one, other in zip(found.entries, wanted, strict=True):
        assert one.modules == other.modules
        assert np.array_equal(one.modules.sigma, other.modules.sigma)
        assert one.path.read_bytes() == other.path.read_bytes()


def test_spectra_alone_are_kept_and_export_builds_the_rest(
    root: Path, tmp_path: Path, plan: Plan, built: list[str]
) -> None:
    entries = plan(root).entries
    assert len(built) == 5
    assert not list((tmp_path / "cache/factors").glob("*.safetensors"))
    assert sum(path.stat().st_size for path in (tmp_path / "cache/spectra").iterdir()) < 5 * 10_000
    with pytest.raises(InputError, match="run the factor stage again"):
        entries[0].factors("model.layers.0.self_attn.q_proj")
    whole = factorise_fleet(open_fleet([root]), tmp_path / "cache")
    assert len(built) == 10
    for entry, other in zip(entries, whole, strict=True):
        assert np.array_equal(entry.modules.sigma, other.modules.sigma)
        assert entry.modules == other.modules


def test_one_more_costs_one_factorisation_and_one_less_or_another_budget_none(
    root: Path, tmp_path: Path, plan: Plan, built: list[str], make_adapter: MakeAdapter
) -> None:
    plan(root)
    built.clear()
    again = plan(root)
    assert (again.read, again.factorised, built) == (0, 0, [])
    problem = problem_of(again.entries)
    spent = [allocate(problem, "spectral", parse_budget(budget)).spent for budget in ("1/4", "1/2")]
    assert spent[0] < spent[1]
    assert built == []
    make_adapter(root / "b", seed=9)
    more = plan(root)
    assert (len(more.entries), more.read, more.factorised, built) == (6, 1, 1, ["b"])
    shutil.rmtree(root / "a2")
    less = plan(root)
    assert [entry.adapter for entry in less.entries] == ["a0", "a1", "a3", "a4", "b"]
    assert (less.read, less.factorised, built) == (0, 0, ["b"])


def test_what_has_changed_is_read_again_and_only_that(root: Path, plan: Plan, built: list[str]) -> None:
    plan(root)
    built.clear()
    os.utime(root / "a1/adapter_model.safetensors")  # the same bytes
    touched = plan(root)
    assert (touched.read, touched.factorised) == (1, 0)
    config = root / "a3/adapter_config.json"
    before = config.stat()
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    os.utime(
        config, ns=(before.st_atime_ns, before.st_mtime_ns)
    )  # the same size and time of change, as by rsync
    scaled = plan(root)
    assert (scaled.read, scaled.factorised, built) == (1, 1, ["a3"])
    weights = root / "a4/adapter_model.safetensors"
    contents = bytearray(weights.read_bytes())
    contents[-2] ^= 1
    weights.write_bytes(contents)
    assert (plan(root).factorised, built) == (1, ["a3", "a4"])


def test_what_cannot_be_told_from_a_change_is_not_remembered(
    root: Path, tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "a0/adapter_model.safetensors").rename(root / "a0/weights.bin")
    (root / "a0/adapter_model.safetensors").symlink_to("weights.bin")
    plan(root)
    assert plan(root).read == 1  # the link
    monkeypatch.setattr(known, "SETTLED_S", 3600.0)
    assert plan(root).read == 5  # written within the hour
    monkeypatch.setattr(known, "SETTLED_S", 0.0)
    for path in (tmp_path / "cache/known").iterdir():
        path.write_text("{}")
    assert plan(root).read == 5
    assert plan(root).read == 1
    monkeypatch.setattr(known, "source_digest", lambda *_: "another reader")
    assert plan(root).read == 5


@pytest.mark.parametrize("damage", ["flip", "truncate", "swap", "empty"])
def test_damaged_spectra_are_found_in_the_factors_or_built_again(
    root: Path, tmp_path: Path, built: list[str], damage: str
) -> None:
    cache = tmp_path / "cache"
    entries = stream_source([root], cache).entries
    built.clear()
    place = spectra_path(entries[1].path)
    whole, other = place.read_bytes(), spectra_path(entries[2].path).read_bytes()
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    broken = {
        "flip": bytes(flipped),
        "truncate": whole[:-9],
        "swap": other,
        "empty": b"",
    }
    place.write_bytes(broken[damage])
    assert find_spectra("a1", entries[1].path) is None
    found = stream_source([root], cache, need="spectra")
    assert (found.factorised, built) == (0, [])
    assert np.array_equal(found.entries[1].modules.sigma, entries[1].modules.sigma)
    assert place.read_bytes() == whole
    place.unlink()
    entries[1].path.unlink()
    assert stream_source([root], cache, need="spectra").factorised == 1
    assert built == ["a1"]
    assert place.read_bytes() == whole


def test_lost_spectra_come_back_from_the_factors(root: Path, tmp_path: Path, built: list[str]) -> None:
    entries = stream_source([root], tmp_path / "cache").entries
    shutil.rmtree(tmp_path / "cache/spectra")
    built.clear()
    assert find(open_adapter(root / "a1"), entries[1].path) is not None
    assert not (tmp_path / "cache/spectra").exists()  # looking writes nothing
    assert stream_source([root], tmp_path / "cache", need="spectra").factorised == 0
    assert find_spectra("a1", entries[1].path) is not None


def test_parts_cover_the_fleet_once_and_verify_their_own(
    root: Path, tmp_path: Path, built: list[str]
) -> None:
    lock = root.parent / "fleet.lock.json"
    save_lock(make_lock([root], lock, name="five"), lock)
    weights = root / "a1/adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    odd = stream_source([lock], tmp_path / "cache", part=Part(1, 2))
    assert [entry.adapter for entry in odd.entries] == ["a0", "a2", "a4"]
    with pytest.raises(IntegrityError, match="locked is"):
        stream_source([lock], tmp_path / "cache", part=Part(2, 2))
    weights.write_bytes(whole)
    even = stream_source([lock], tmp_path / "cache", part=Part(2, 2))
    assert [entry.adapter for entry in even.entries] == ["a1", "a3"]
    everything = stream_source([lock], tmp_path / "cache")
    assert (everything.factorised, sorted(built)) == (0, ["a0", "a1", "a2", "a3", "a4"])


def test_a_gpu_keeps_spectra_alone_too(
    root: Path, tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = factorise_fleet(open_fleet([root]), tmp_path / "cpu")
    monkeypatch.setattr("loraforge.factor.gpu.available", lambda: True)
    monkeypatch.setattr("loraforge.factor.gpu.kernels", Emulated)
    found = plan(root)
    assert found.factorised == 5
    assert not list((tmp_path / "cache/factors").glob("*.safetensors"))
    for entry, other in zip(found.entries, wanted, strict=True):
        assert np.allclose(entry.modules.sigma, other.modules.sigma, atol=1e-6)
    assert plan(root).read == 0


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3", "٣/٤"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a part"):
        parse_part(text)


def test_more_parts_than_adapters_are_refused(root: Path, plan: Plan) -> None:
    with pytest.raises(UsageError, match="there is no part 6 of 5 adapters"):
        plan(root, part=Part(6, 6))


def test_a_bad_adapter_is_refused_before_anything_is_built(root: Path, plan: Plan, built: list[str]) -> None:
    weights = root / "a4/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        plan(root)
    assert built == []


def test_known_adapters_of_another_base_or_one_name_are_refused(
    root: Path, tmp_path: Path, plan: Plan, make_adapter: MakeAdapter
) -> None:
    plan(root)
    make_adapter(tmp_path / "else" / "c", base="another/base")
    plan(tmp_path / "else")
    with pytest.raises(InputError, match="base model is 'another/base'"):
        plan(root, tmp_path / "else")
    shutil.copytree(root / "a0", tmp_path / "twin" / "a0")
    with pytest.raises(InputError, match="two adapters are named 'a0'"):
        plan(root, tmp_path / "twin")


def test_interrupted_between_groups_it_goes_on(
    root: Path, plan: Plan, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "GROUP", 2)
    real = factor_fleet.factorise_adapter

    def interrupted(adapter: Any, **options: Any) -> Any:
        if adapter.name == "a3":
            raise KeyboardInterrupt
        return real(adapter, **options)

    with monkeypatch.context() as patch:
        patch.setattr(factor_fleet, "factorise_adapter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plan(root)
    assert built == ["a0", "a1", "a2"]
    assert plan(root).factorised == 2
    assert built == ["a0", "a1", "a2", "a3", "a4"]


def test_command_line_keeps_spectra_and_allocates_from_them(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ["--cache", str(tmp_path / "cache")]

    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert ended.value.code == 0
        return capsys.readouterr().err

    assert "2 adapters" in call("factor", str(root), *cache, "--keep", "spectra", "--part", "2/2")
    assert "(3 factorised)" in call("factor", str(root), *cache, "--keep", "spectra")
    for name, budget in (("one.json", "1/4"), ("two.json", "1/2")):
        call("allocate", str(root), *cache, "--budget", budget, "-o", str(tmp_path / name))
    assert not list((tmp_path / "cache/factors").glob("*.safetensors"))
    call("export", str(tmp_path / "one.json"), str(root), *cache, "--out", str(tmp_path / "out"))
    assert len(list((tmp_path / "cache/factors").glob("*.safetensors"))) == 5


def test_a_thousand_adapters_are_allocated_within_two_seconds() -> None:
    """252,000 modules, as of 1,000 adapters on every module of a model of 36 layers."""
    generator = np.random.default_rng(1)
    names = tuple(f"model.layers.{layer}.{kind}" for layer in range(36) for kind in "qkvogud")
    records = {
        name: ModuleRecord(2, 2560, 4096 + 64 * (i % 7), 1.0, "gram", 0.0, 0.0)
        for i, name in enumerate(names)
    }
    fleet = []
    for number in range(1000):
        sigma = -np.sort(-generator.exponential(size=(len(names), 2)), axis=1)
        fleet.append(CachedAdapter(str(number), Path("none"), ModuleTable.of(records, sigma.ravel())))
    started = time.process_time()
    problem = problem_of(fleet)
    chosen = allocate(problem, "spectral", parse_budget(params=problem.parameters(problem.rank) * 3 // 4))
    assert time.process_time() - started < 2
    assert 0 <= chosen.slack < problem.cost.max()


def test_columns_read_as_modules_do_and_must_fit() -> None:
    records = {
        "one": ModuleRecord(2, 8, 4, -0.5, "tsqr", 1e-7, 1e-9),
        "two": ModuleRecord(1, 6, 6, 2.0, "gram", 0.0, 0.0),
    }
    table = ModuleTable.of(records, np.array([3.0, 1.0, 2.0]))
    assert isinstance(table, Table)
    assert dict(table) == records
    assert table.spectrum("two").tolist() == [2.0]
    assert (table.rank.tolist(), table.cost.tolist()) == ([2, 1], [12, 12])

    class Plain:
        adapter = "plain"
        modules = records

        def spectrum(self, name: str) -> Any:
            return table.spectrum(name)

    plain, fast = problem_of([Plain()]), problem_of([CachedAdapter("plain", Path("none"), table)])
    assert list(plain.names) == list(fast.names)
    for name in ("rank", "cost", "sigma"):
        assert np.array_equal(getattr(plain, name), getattr(fast, name))
    with pytest.raises(ValueError, match="not as long as the ranks"):
        ModuleTable.of(records, np.array([3.0]))
    with pytest.raises(ValueError, match="differ in length"):
        ModuleTable(("one",), table.columns | {"sigma": table.sigma})
    with pytest.raises(KeyError):
        table["three"]


def test_a_lock_is_verified_each_time_and_its_adapters_are_opened_once(
    root: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "SETTLED_S", 3600.0)  # hashes tell a change whenever it was
    lock = root.parent / "fleet.lock.json"
    stated = make_lock([root], lock, name="five")
    save_lock(stated, lock)
    assert (plan(lock).read, plan(lock).read) == (5, 0)
    other = stated.model_copy(
        update={"base_model": stated.base_model.model_copy(update={"name": "other/base"})}
    )
    save_lock(other, lock)
    with pytest.raises(InputError, match="but the lock has 'other/base'"):
        plan(lock)
    save_lock(stated, lock)
    weights = root / "a1/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(IntegrityError, match="locked is"):
        plan(lock)
