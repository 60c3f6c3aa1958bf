"""Locks: what is made is verified, and any other byte is refused with the file and both hashes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from adapter_folders import MakeAdapter

from loraforge.cli import main
from loraforge.errors import InputError, IntegrityError
from loraforge.files import sha256_file
from loraforge.fleet.base_model import SMOLLM2
from loraforge.fleet.lock import fleet_name, load_lock, save_lock, verify
from loraforge.fleet.locking import make_lock
from loraforge.fleet.source import open_source, resolve_fleet


@pytest.fixture
def lock(tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    for index, name in enumerate(("b", "a")):
        make_adapter(tmp_path / "adapters" / name, seed=index)
    (tmp_path / "adapters" / "a" / "recipe.yaml").write_text("task: spelling\nrank: 4\n")
    (tmp_path / "adapters" / "a" / "README.md").write_text("a card\n")
    path = tmp_path / "two.lock.json"
    save_lock(make_lock([tmp_path / "adapters"], path, name="two"), path)
    return path


def test_contents(lock: Path) -> None:
    value = json.loads(lock.read_text())
    assert value["schema"] == "loraforge.fleet-lock/1"
    assert value["base_model"] == {"files": {}, "name": "tiny/base", "source": None, "tensors_sha256": None}
    first, second = value["adapters"]
    assert (first["name"], first["task"], first["source"]) == ("a", "spelling", {"path": "adapters/a"})
    assert [file["name"] for file in first["files"]] == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "recipe.yaml",
    ]
    assert (second["name"], second["task"], len(second["files"])) == ("b", None, 2)
    for adapter in value["adapters"]:
        for file in adapter["files"]:
            path = lock.parent / adapter["source"]["path"] / file["name"]
            assert (file["bytes"], file["sha256"]) == (path.stat().st_size, sha256_file(path))


def test_resolves_and_moves_as_a_whole(lock: Path, tmp_path: Path) -> None:
    assert [adapter.name for adapter in resolve_fleet(lock)] == ["a", "b"]
    assert fleet_name([lock]) == "two"
    files = load_lock(lock).local_files(lock)
    assert len(files) == 5
    assert all(file.is_file() for file in files)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.move(lock, moved / "two.lock.json")
    shutil.move(tmp_path / "adapters", moved / "adapters")
    assert [adapter.path for adapter in resolve_fleet(moved / "two.lock.json")] == [
        moved / "adapters" / "a",
        moved / "adapters" / "b",
    ]


def test_a_card_may_change(lock: Path, tmp_path: Path) -> None:
    (tmp_path / "adapters" / "a" / "README.md").write_text("another card\n")
    verify(lock)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "recipe.yaml"])
def test_flipped_byte(lock: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "adapters" / "a" / name
    before = sha256_file(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError) as caught:
        resolve_fleet(lock)
    assert str(caught.value) == (
        f"{path}: SHA-256 is {sha256_file(path)}, locked is {before}; restore the file, or make the lock anew with "
        f"`loraforge fleet lock` if the change is meant ({lock})"
    )


def test_another_size(lock: Path, tmp_path: Path) -> None:
    path = tmp_path / "adapters" / "b" / "adapter_config.json"
    before, size = sha256_file(path), path.stat().st_size
    path.write_text(path.read_text() + "\n")
    with pytest.raises(IntegrityError) as caught:
        verify(lock)
    assert str(caught.value).startswith(
        f"{path}: is {size + 1} bytes (SHA-256 {sha256_file(path)}), locked are {size} bytes (SHA-256 {before}); "
    )


def test_missing_file(lock: Path, tmp_path: Path) -> None:
    path = tmp_path / "adapters" / "b" / "adapter_model.safetensors"
    before = sha256_file(path)
    path.unlink()
    with pytest.raises(IntegrityError) as caught:
        verify(lock)
    assert str(caught.value).startswith(f"{path}: file not found, but locked with SHA-256 {before}; ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other/1"}, "schema: not a fleet lock (Input should be 'loraforge.fleet-lock/1')"),
        ({"adapters": []}, "adapters: not a fleet lock (Tuple should have at least 1 item"),
        ({"more": 1}, "more: not a fleet lock (Extra inputs are not permitted)"),
    ],
)
def test_malformed(lock: Path, change: dict[str, object], message: str) -> None:
    lock.write_text(json.dumps(json.loads(lock.read_text()) | change))
    with pytest.raises(InputError) as caught:
        load_lock(lock)
    assert str(caught.value).startswith(f"{lock}: {message}")
    assert str(caught.value).endswith("; make it with `loraforge fleet lock`")


def test_absolute_source_and_repeated_name(lock: Path) -> None:
    value = json.loads(lock.read_text())
    value["adapters"][0]["source"]["path"] = "/etc"
    lock.write_text(json.dumps(value))
    with pytest.raises(InputError, match="must be relative to the lock file"):
        load_lock(lock)
    for outside in ("../a", "a/../../b", "adapters/./../..", "a\\..\\b", "a\n/b"):
        value["adapters"][0]["source"]["path"] = outside
        lock.write_text(json.dumps(value))
        with pytest.raises(InputError, match="must stay in the lock file's folder"):
            load_lock(lock)
    value["adapters"][0] = value["adapters"][1]
    lock.write_text(json.dumps(value))
    with pytest.raises(InputError, match="two adapters have the same name"):
        load_lock(lock)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "a\\b", "", "a\0b", "\x1b[2J", "x" * 256])
def test_names_that_are_paths(lock: Path, name: str) -> None:
    for place in ("adapter", "file"):
        value = json.loads(lock.read_text())
        entry = value["adapters"][0]
        (entry if place == "adapter" else entry["files"][0])["name"] = name
        lock.with_name("other.lock.json").write_text(json.dumps(value))
        with pytest.raises(InputError, match="must be one plain name, no path"):
            load_lock(lock.with_name("other.lock.json"))


def test_adapters_elsewhere_are_not_locked(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    folder = make_adapter(tmp_path / "a")
    with pytest.raises(InputError, match="put the lock beside or above its adapters"):
        make_lock([folder], tmp_path / "locks" / "x.lock.json", name="x")


def test_links_that_leave_the_folder_of_a_lock(lock: Path, tmp_path: Path) -> None:
    folder, outside = tmp_path / "adapters" / "a", tmp_path.parent / f"{tmp_path.name}-outside"
    shutil.move(folder, outside)
    folder.symlink_to(outside)
    with pytest.raises(InputError, match="is a link that leads out of its folder"):
        verify(lock)


def test_adapter_without_files(lock: Path) -> None:
    value = json.loads(lock.read_text())
    value["adapters"][1]["files"] = []
    lock.write_text(json.dumps(value))
    with pytest.raises(
        InputError, match=r"adapters\.1\.files: not a fleet lock \(Tuple should have at least 1"
    ):
        load_lock(lock)


def test_lock_over_another_base(lock: Path) -> None:
    value = json.loads(lock.read_text())
    value["base_model"]["name"] = "other/base"
    lock.write_text(json.dumps(value))
    with pytest.raises(InputError, match="base model is 'tiny/base', but the lock has 'other/base'"):
        resolve_fleet(lock)


def test_base_is_pinned_or_hashed(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    folder = make_adapter(tmp_path / "a", base=SMOLLM2.name)
    pinned = make_lock([folder], tmp_path / "x.lock.json", name="x").base_model
    assert (pinned.source, pinned.tensors_sha256) == (SMOLLM2.source, SMOLLM2.tensors_sha256)
    assert list(pinned.files.values()) == [SMOLLM2.gguf_sha256]
    hashed = make_lock([folder], tmp_path / "x.lock.json", name="x", base=folder).base_model
    weights = "adapter_model.safetensors"
    assert hashed.files == {weights: sha256_file(folder / weights)}
    assert hashed.tensors_sha256 is not None
    with pytest.raises(InputError, match="holds no safetensors file"):
        make_lock([folder], tmp_path / "x.lock.json", name="x", base=tmp_path)


def test_command_line(tmp_path: Path, make_adapter: MakeAdapter, capsys: pytest.CaptureFixture[str]) -> None:
    folder, lock = make_adapter(tmp_path / "fleet" / "a"), tmp_path / "mine.lock.json"
    assert _exit(["fleet", "lock", str(tmp_path / "fleet"), "-o", str(lock)]) == 0
    assert load_lock(lock).name == "mine"
    assert _exit(["fleet", "verify", str(lock)]) == 0
    assert "verify: 1/1" in capsys.readouterr().err
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert _exit(["fleet", "verify", str(lock)]) == 4
    assert str(weights) in capsys.readouterr().err
    assert _exit(["fleet", "lock", str(tmp_path / "nowhere"), "-o", str(lock)]) == 3


def _exit(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_a_folder_may_be_named_like_a_lock(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    folder = tmp_path / "v1.json"
    make_adapter(folder / "a")
    assert [adapter.name for adapter in open_source([folder])] == ["a"]
    assert fleet_name([folder]) == "v1.json"
