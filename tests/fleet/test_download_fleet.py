"""Fleets of hubs and web servers: locked, fetched by several processes at once, verified, used offline."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from adapter_folders import MakeAdapter
from hub_server import SIGNATURE, Fault, HubServer, hub_server

from loraforge.cli import main
from loraforge.errors import InputError, IntegrityError, MissingDependencyError, OutputError, UsageError
from loraforge.files import sha256_file
from loraforge.fleet.download import part
from loraforge.fleet.download.fleet import Fetched, fetch_fleet
from loraforge.fleet.download.http import Http, Patience
from loraforge.fleet.lock import FleetLock, load_lock, save_lock, verify
from loraforge.fleet.locking import lock_spec
from loraforge.fleet.options import DEFAULT, ReadOptions
from loraforge.fleet.source import open_source, resolve_fleet
from loraforge.fleet.spec import load_spec
from loraforge.fleet.store import Store

WIDE = {"self_attn.q_proj": (512, 512), "self_attn.v_proj": (512, 512)}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shared() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture
def hub(shared: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A hub that this process takes for the hub, and a store of its own."""
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(
        Http.__init__, "__kwdefaults__", {"connections": 8, "patience": Patience(4, 0.01, 0.05)}
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", shared.url)
    monkeypatch.setenv("LORAFORGE_STORE", str(tmp_path / "store"))
    shared.repos, shared.files, shared.blobs, shared.tokens = {}, {}, {}, {}
    shared.faults.clear()
    shared.requests.clear()
    return shared


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_spec(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def make(spec: Path, options: ReadOptions = DEFAULT) -> Path:
    """The lock of a specification, beside it."""
    path = spec.with_suffix(".lock.json")
    save_lock(lock_spec(load_spec(spec), spec.parent, path, name="mine", options=options), path)
    return path


def store() -> Store:
    return Store.of_user()


def empty() -> None:
    """Start afresh, with nothing in the store."""
    for path in sorted(store().root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture
def mixed(hub: HubServer, tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    """A specification of a local folder, two repositories, a folder on a web server and an archive."""
    made = {name: make_adapter(tmp_path / "made" / name, seed=i) for i, name in enumerate("bcdef")}
    make_adapter(tmp_path / "here" / "a", seed=9)
    card = {"README.md": b"# card", "recipe.yaml": b"task: spelling\n"}
    hub.repo("org/b", content(made["b"]) | card, "main", "v1")
    hub.repo("org/many", {f"sub/c/{name}": data for name, data in content(made["c"]).items()})
    hub.files |= {f"d/{name}": data for name, data in content(made["d"]).items()}
    with io.BytesIO() as stream:
        with tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for name in "ef":
                archive.add(made[name], f"fleet/{name}")
        hub.files["all.tar.gz"] = stream.getvalue()
    return write_spec(
        tmp_path,
        f"""
name: mine
base_model: tiny/base
adapters:
  - path: here/a
  - hub: org/b
    revision: v1
  - hub: org/many
    subfolder: sub/c
  - url: {hub.url}/files/d/
  - url: {hub.url}/files/all.tar.gz
    folder: fleet/e
  - url: {hub.url}/files/all.tar.gz
    folder: fleet/f
""",
    )


def test_lock_fetch_open(mixed: Path, hub: HubServer, tmp_path: Path) -> None:
    lock = make(mixed)
    locked = load_lock(lock)
    sources = [adapter.source.model_dump() for adapter in locked.adapters]
    commits = [next(iter(hub.repos[name].commits)) for name in ("org/b", "org/many")]
    data = hub.files["all.tar.gz"]
    archive = {
        "archive": f"{hub.url}/files/all.tar.gz",
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    assert hub.sent("all.tar.gz") == len(data) + 1  # once, and a byte to know its size
    assert sources == [
        {"path": "here/a"},
        {"hub": "org/b", "commit": commits[0], "revision": "v1", "subfolder": None},
        {"hub": "org/many", "commit": commits[1], "revision": "main", "subfolder": "sub/c"},
        {"url": f"{hub.url}/files/d/"},
        archive | {"folder": "fleet/e"},
        archive | {"folder": "fleet/f"},
    ]
    assert [adapter.name for adapter in locked.adapters] == list("abcdef")
    assert [adapter.task for adapter in locked.adapters] == [None, "spelling", None, None, None, None]
    for adapter in locked.adapters[1:]:
        for file in adapter.files:
            if file.name != "recipe.yaml":
                assert file.sha256 == sha256_file(tmp_path / "made" / adapter.name / file.name)
    empty()
    hub.requests.clear()
    fleet = open_source([lock])
    assert [adapter.name for adapter in fleet] == list("abcdef")
    assert not hub.asked("README")
    assert not hub.asked("/api/models")  # what is locked needs no question
    count = len(hub.requests)
    assert [adapter.name for adapter in resolve_fleet(lock)] == list("abcdef")
    assert fetch_fleet(locked, lock) == Fetched(0, 0, 11, 0)
    assert len(hub.requests) == count
    empty()
    fetched = fetch_fleet(locked, lock)  # single files, and members of an archive
    stored = {f.sha256: f.bytes for adapter in locked.adapters[1:] for f in adapter.files}
    assert fetched == Fetched(len(stored), sum(stored.values()), 0, 0)
    assert locked.local_files(lock) == [
        tmp_path / "here" / "a" / file.name for file in locked.adapters[0].files
    ]


def test_what_is_fetched_compresses_as_from_a_folder(mixed: Path, tmp_path: Path) -> None:
    lock = make(mixed)
    for source, out in ((str(lock), "from-lock"), (str(tmp_path / "made"), "from-folder")):
        assert _exit(["compress", source, "--budget", "1/2", "--out", str(tmp_path / out), "--no-cache"]) == 0
    assert (tmp_path / "from-lock" / "ragged" / "e" / "adapter_config.json").is_file()
    everything = "".join(
        path.read_text(errors="replace") for path in (tmp_path / "from-lock").rglob("*") if path.is_file()
    )
    assert str(tmp_path) not in everything


@pytest.mark.parametrize("name", ["main", "commit"])
def test_a_branch_that_moves_does_not_move_the_lock(
    hub: HubServer, tmp_path: Path, make_adapter: MakeAdapter, name: str
) -> None:
    first, second = make_adapter(tmp_path / "1", seed=1), make_adapter(tmp_path / "2", seed=2)
    commit = hub.repo("org/x", content(first))
    revision = commit if name == "commit" else name
    lock = make(write_spec(tmp_path, f"adapters: [{{hub: org/x, revision: {revision}}}]"))
    hub.repo("org/x", content(second))
    empty()
    [adapter] = resolve_fleet(lock)
    assert adapter.weights_sha256 == sha256_file(first / "adapter_model.safetensors")
    del hub.repos["org/x"].revisions[commit]
    empty()
    gone = r"hub:org/x@\w{12}/\S+: was not found \(404\); check the name and the revision"
    with pytest.raises(InputError, match=gone):
        resolve_fleet(lock)


def test_another_commit_than_asked_for_is_refused(
    hub: HubServer, tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    hub.repo("org/x", content(make_adapter(tmp_path / "1")))
    lock = make(write_spec(tmp_path, "adapters: [{hub: org/x}]"))
    empty()
    hub.fail("commit", times=9)
    with pytest.raises(IntegrityError, match=r"the hub gives the file of commit f{40}, locked is"):
        resolve_fleet(lock)
    assert not list(store().partial.iterdir())


@pytest.mark.parametrize("fault", ["flip", "grow", "shrink"])
def test_wrong_bytes_from_the_hub_stop_everything(mixed: Path, hub: HubServer, fault: str) -> None:
    lock = make(mixed)
    empty()
    hub.fail(fault, path="/blobs/", times=9)
    with pytest.raises(IntegrityError, match=r"^hub:org/\w+@\w{12}/\S+: "):
        fetch_fleet(load_lock(lock), lock)
    snapshots = store().root / "snapshots"
    assert not snapshots.exists() or not list(snapshots.iterdir())
    hub.faults.clear()
    assert fetch_fleet(load_lock(lock), lock).files > 0
    verify(lock)


def test_signed_addresses_run_out(hub: HubServer, tmp_path: Path, make_adapter: MakeAdapter) -> None:
    hub.repo("org/x", content(make_adapter(tmp_path / "1", r=64, layers=range(6), shapes=WIDE)))
    lock = make(write_spec(tmp_path, "adapters: [{hub: org/x}]"))
    empty()
    hub.requests.clear()
    hub.fail("truncate", path="/blobs/", after=1_200_000)
    hub.faults[-1].then.append(Fault(403, path="/blobs/"))
    resolve_fleet(lock)
    hosts = [
        request.host for request in hub.requests if "safetensors" in request.path or request.host == "cdn"
    ]
    assert hosts == ["hub", "cdn", "cdn", "hub", "cdn"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(404), "was not found (404); check the name and the revision"),
        (
            "no repository",
            "wants a token (401); check the name, and set HF_TOKEN to a token that may read it",
        ),
        ("no revision", "has no such revision (404); name a branch, tag or commit of it"),
        (
            Fault(403),
            "is forbidden (403); accept the terms on the repository's page, and set HF_TOKEN to a token",
        ),
        (Fault(429, headers={"Retry-After": "9999"}), "answers 429 and asks to wait 9999 s"),
        (Fault(500, times=9), "answers 500, and has 4 times in a row"),
        (Fault("nonsense"), "the endpoint does not answer as the hub does; check HF_ENDPOINT"),
    ],
    ids=str,
)
def test_hubs_that_refuse(
    hub: HubServer, tmp_path: Path, make_adapter: MakeAdapter, fault: Fault | str, message: str
) -> None:
    hub.repo("org/x", content(make_adapter(tmp_path / "1")))
    spec = write_spec(tmp_path, "adapters: [{hub: org/x}]")
    if fault == "no repository":
        hub.repos.clear()
    elif fault == "no revision":
        hub.repos["org/x"].revisions.clear()
    else:
        assert isinstance(fault, Fault)
        hub.faults.append(replace(fault, path="/api/models/org/x"))  # its library may ask for other things
    with pytest.raises(InputError) as caught:
        make(spec)
    assert str(caught.value).startswith(f"hub:org/x@main: {message}")
    assert str(caught.value).isprintable()


def test_redirected_questions_leave_the_token_behind(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of-the-hub")
    hub.repo("org/x", {})
    hub.fail("redirect", path="/api/models/org/x", to=f"{hub.cdn}/elsewhere")
    with pytest.raises(InputError, match=r"hub:org/x@main: is forbidden \(403\)"):
        make(write_spec(tmp_path, "adapters: [{hub: org/x}]"))
    assert [(request.host, request.token) for request in hub.requests if "agent" not in request.path] == [
        ("hub", "hf_of-the-hub"),
        ("cdn", None),
    ]


def test_store_that_cannot_be_written(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_adapter: MakeAdapter
) -> None:
    hub.repo("org/x", content(make_adapter(tmp_path / "1")))
    spec = write_spec(tmp_path, "adapters: [{hub: org/x}]")
    lock = make(spec)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LORAFORGE_STORE", str(tmp_path / "file" / "store"))
    for call in (lambda: make(spec), lambda: resolve_fleet(lock)):
        with pytest.raises(OutputError, match="or name another store in LORAFORGE_STORE"):
            call()


def test_two_repositories_of_one_name(hub: HubServer, tmp_path: Path, make_adapter: MakeAdapter) -> None:
    for owner in ("org", "other"):  # of the same bytes, and so one folder of the store
        hub.repo(f"{owner}/x", content(make_adapter(tmp_path / "1")))
    with pytest.raises(InputError, match="two adapters are named 'x'") as caught:
        make(write_spec(tmp_path, "adapters: [{hub: org/x}, {hub: other/x}]"))
    assert str(caught.value).startswith("hub:other/x@")
    assert "(the other is hub:org/x@" in str(caught.value)
    assert str(caught.value).endswith("list them in a file, with a `name` for one (docs/downloads.md)")
    assert make(write_spec(tmp_path, "adapters: [{hub: org/x}, {hub: other/x, name: y}]")).exists()


def test_hub_that_is_busy_for_a_moment(hub: HubServer, tmp_path: Path, make_adapter: MakeAdapter) -> None:
    hub.repo("org/x", content(make_adapter(tmp_path / "1")))
    hub.fail(429, path="org/x", headers={"Retry-After": "0"})
    hub.fail(503, path="org/x")
    make(write_spec(tmp_path, "adapters: [{hub: org/x}]"))


INDEX = "adapter_model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"README.md": b""}, "holds no adapter_config.json; name the folder of a PEFT adapter"),
        ({}, "holds no adapter_model.safetensors; name the folder"),
        ({"adapter_model.bin": b"x"}, "--allow-pickle takes an adapter_model.bin"),
        ({INDEX: b'{"weight_map": {"a": "../x"}}'}, f"{INDEX} does not map tensors to files"),
        ({INDEX: b'{"weight_map": {"a": "x.safetensors"}}'}, "holds no x.safetensors"),
        ({"adapter_config.json": b"<html>", "adapter_model.safetensors": b"x"}, "not valid JSON at line 1"),
    ],
)
def test_places_without_an_adapter(
    hub: HubServer, tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    if "README.md" not in files:
        files = {"adapter_config.json": b"{}"} | files
    hub.repo("org/x", files)
    hub.files |= {f"x/{name}": data for name, data in files.items()}
    for entry in ("hub: org/x", f"url: {hub.url}/files/x"):
        with pytest.raises(InputError) as caught:
            make(write_spec(tmp_path, f"adapters: [{{{entry}}}]"))
        assert message in str(caught.value) or "adapter_config.json: was not found (404)" in str(caught.value)
        assert str(store().root) not in str(caught.value)


def test_pickles_and_shards(hub: HubServer, tmp_path: Path, make_adapter: MakeAdapter) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_adapter(tmp_path / "1")
    tensors = load_file(folder / "adapter_model.safetensors")
    config = {"adapter_config.json": (folder / "adapter_config.json").read_bytes()}
    torch.save(tensors, tmp_path / "adapter_model.bin")
    shards = dict(config)
    index = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, tmp_path / "shard")
        shards[f"adapter_model-{i}.safetensors"] = (tmp_path / "shard").read_bytes()
        index[name] = f"adapter_model-{i}.safetensors"
    shards["adapter_model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    pickled = config | {"adapter_model.bin": (tmp_path / "adapter_model.bin").read_bytes()}
    for name, files in (("pickled", pickled), ("sharded", shards)):
        hub.repo(f"org/{name}", files)
        hub.files |= {f"{name}/{file}": data for file, data in files.items()}
        for entry in (f"hub: org/{name}", f"url: {hub.url}/files/{name}/"):
            lock = make(write_spec(tmp_path, f"adapters: [{{{entry}}}]"), ReadOptions(allow_pickle=True))
            [adapter] = resolve_fleet(lock, ReadOptions(allow_pickle=True))
            with adapter.reader() as reader:
                assert all(
                    torch.equal(reader.tensor(module.a_key), tensors[module.a_key])
                    for module in adapter.modules
                )


def test_offline_uses_the_store_only(mixed: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = make(mixed)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(resolve_fleet(lock)) == 6
    lost = load_lock(lock).adapters[3].files[1]
    store().blob(lost.sha256).unlink()
    with pytest.raises(InputError) as caught:
        resolve_fleet(lock)
    assert str(caught.value) == (
        f"{lock}: 1 files (0.0 MB) are not in the store {store().root}, and the network is off; run `loraforge fleet "
        f"fetch {lock}` where there is one"
    )
    with pytest.raises(InputError, match="5 adapters are elsewhere, and the network is off"):
        make(mixed)
    assert hub.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert _exit(["fleet", "fetch", "--offline", str(lock)]) == 3
    assert hub.requests == []
    assert _exit(["fleet", "fetch", str(lock)]) == 0


def test_verify_fetches_nothing_and_fetch_mends(
    mixed: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = make(mixed)
    assert _exit(["fleet", "verify", str(lock)]) == 0
    weights = load_lock(lock).adapters[1].files[1]
    blob = store().blob(weights.sha256)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    capsys.readouterr()
    assert _exit(["fleet", "verify", str(lock)]) == 4
    message = capsys.readouterr().err
    assert "SHA-256 is " in message
    assert message.endswith(f"; fetch it with `loraforge fleet fetch {lock}`\n")
    assert _exit(["fleet", "fetch", str(lock)]) == 0
    assert "6 adapters as locked; 1 files fetched" in capsys.readouterr().err
    folder = load_lock(lock).folder(load_lock(lock).adapters[1], lock)
    (folder / weights.name).unlink()
    assert _exit(["fleet", "verify", str(lock)]) == 4
    (folder / weights.name).symlink_to("/etc/passwd")
    assert _exit(["fleet", "verify", str(lock)]) == 3
    assert "is a link that leads out of its folder" in capsys.readouterr().err
    assert _exit(["fleet", "fetch", str(lock)]) == 0
    assert _exit(["fleet", "verify", str(lock)]) == 0


def test_tokens_reach_no_lock_log_error_or_other_host(
    mixed: Path,
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for repo in hub.repos.values():
        repo.token = "hf_of-the-hub"
    monkeypatch.setenv("HF_TOKEN", "hf_of-the-hub")
    caplog.set_level(logging.DEBUG)
    logging.getLogger("huggingface_hub").setLevel(logging.DEBUG)
    lock = tmp_path / "mine.lock.json"
    assert _exit(["fleet", "lock", str(mixed)]) == 0
    empty()
    assert _exit(["fleet", "fetch", str(lock)]) == 0
    hub.fail("flip", path="/blobs/", times=9)
    empty()
    assert _exit(["fleet", "fetch", str(lock)]) == 4
    monkeypatch.setenv("HF_TOKEN", "hf_of-nobody")
    assert _exit(["fleet", "fetch", str(lock)]) == 3
    said = capfd.readouterr()
    assert "is forbidden (403); accept the terms" in said.err
    written = [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    for text in (said.out, said.err, caplog.text, *written):
        assert not any(secret in text for secret in ("hf_of-the-hub", "hf_of-nobody", SIGNATURE))
    assert {request.token for request in hub.requests if request.host == "cdn"} == {None}
    assert {request.token for request in hub.asked("/resolve/")} == {"hf_of-the-hub", "hf_of-nobody"}


def test_command_line_of_places(
    hub: HubServer, tmp_path: Path, make_adapter: MakeAdapter, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repo("org/x", content(make_adapter(tmp_path / "made" / "x")), "v2")
    hub.files |= {
        f"y/{name}": data for name, data in content(make_adapter(tmp_path / "made" / "y", seed=1)).items()
    }
    here = make_adapter(tmp_path / "here" / "z", seed=2)
    lock = tmp_path / "three.lock.json"
    places = ["hub:org/x@v2", f"{hub.url}/files/y", str(here)]
    assert _exit(["fleet", "lock", *places, "-o", str(lock)]) == 0
    assert (load_lock(lock).name, [adapter.name for adapter in load_lock(lock).adapters]) == (
        "three",
        list("xyz"),
    )
    assert _exit(["fleet", "lock", *places]) == 2
    assert "--out: name the lock file to write" in capsys.readouterr().err
    listed = write_spec(tmp_path, "adapters: [{path: here}]")
    assert _exit(["fleet", "lock", str(listed), "-o", str(listed)]) == 2
    assert "is no name of a lock; let it end in .json" in capsys.readouterr().err
    assert listed.read_text() == "adapters: [{path: here}]"
    assert _exit(["fleet", "lock", "hub:org/x@../y", "-o", str(lock)]) == 3
    assert "adapters.0.revision: not a fleet specification" in capsys.readouterr().err


def test_without_the_libraries(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_adapter: MakeAdapter
) -> None:
    hub.repo("org/x", content(make_adapter(tmp_path / "1")))
    spec = write_spec(tmp_path, "adapters: [{hub: org/x}]")
    for package in ("huggingface_hub", "httpx"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'loraforge\[hub\]'"):
            make(spec)
    local = write_spec(tmp_path, "adapters: [{path: '1'}]")
    assert len(resolve_fleet(make(local))) == 1  # what is here needs neither


def test_endpoint_that_is_none(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("nowhere", "https://user:secret@example.com", "https://example.com?token=secret"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(UsageError, match=r"^HF_ENDPOINT: must ") as caught:
            make(write_spec(tmp_path, "adapters: [{hub: org/x}]"))
        assert "secret" not in str(caught.value)


def _exit(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


# what follows takes processes of their own


def start(lock: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loraforge", "fleet", "fetch", str(lock), "--connections", "2"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.fixture
def large(hub: HubServer, tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    """A lock of three adapters of 3 MB and more, and an empty store."""
    entries = []
    for i in range(3):
        folder = make_adapter(tmp_path / "made" / f"x{i}", r=64, layers=range(6), shapes=WIDE, seed=i)
        hub.repo(f"org/x{i}", content(folder))
        entries.append(f"  - hub: org/x{i}\n")
    lock = make(write_spec(tmp_path, "adapters:\n" + "".join(entries)))
    empty()
    hub.requests.clear()
    return lock


def arrived() -> list[int]:
    """Segments that have come of each file that is under way."""
    return [path.read_bytes().count(b"\n") for path in store().partial.glob("*.segments")]


def size_of(lock: FleetLock) -> int:
    return sum({file.sha256: file.bytes for adapter in lock.adapters for file in adapter.files}.values())


@pytest.mark.slow
def test_eight_processes_fetch_each_byte_once(large: Path, hub: HubServer) -> None:
    hub.fail("drip", path="/blobs/", after=0.002, times=99)
    running = [start(large) for _ in range(8)]
    said = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 8, said
    verify(large)
    assert sum(request.sent for request in hub.requests) == size_of(load_lock(large))
    assert not list(store().partial.iterdir())
    assert len(list((store().root / "snapshots").iterdir())) == 3
    counted = [int(n) for text in said for n in re.findall(r"as locked; (\d+) files fetched", text)]
    assert len(counted) == 8
    assert sum(counted) == len(list(store().blobs.iterdir()))


def test_what_another_process_fetched_meanwhile_is_counted_apart(large: Path) -> None:
    """This test is the other process: it holds a file that is under way, and finishes it."""
    lock = load_lock(large)
    theirs = lock.adapters[0].files[-1]
    files = {file.sha256: file.bytes for adapter in lock.adapters for file in adapter.files}
    fetch_fleet(lock, large)
    data = store().blob(theirs.sha256).read_bytes()
    empty()
    with ThreadPoolExecutor() as pool:
        with part.hold(store().partial / f"{theirs.sha256}.part", theirs.bytes) as held:
            assert held is not None
            running = pool.submit(fetch_fleet, lock, large)
            while not running.done() and not (store().blobs.is_dir() and any(store().blobs.iterdir())):
                time.sleep(0.01)  # until it has seen what is lacking
            held.write(0, data)
            held.finish(store().blob(theirs.sha256))
        done = running.result()
    assert (done.files, done.others, done.present) == (len(files) - 1, 1, 0)
    assert done.bytes == sum(files.values()) - theirs.bytes


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_resumes_and_leaves_no_half_file(
    large: Path, hub: HubServer, number: signal.Signals
) -> None:
    hub.fail("drip", path="/blobs/", after=0.02, times=99)
    process = start(large)
    deadline = time.monotonic() + 60
    while not any(count >= 2 for count in arrived()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode != 0
    blobs = list(store().blobs.iterdir())
    assert all(sha256_file(path) == path.name for path in blobs)
    kept = sum(arrived()) * part.SEGMENT + sum(path.stat().st_size for path in blobs)
    assert kept >= 2 * part.SEGMENT
    hub.faults.clear()
    hub.requests.clear()
    again = start(large)
    again.communicate(timeout=120)
    assert again.returncode == 0
    verify(large)
    assert hub.sent("/blobs/") <= size_of(load_lock(large)) - kept
    assert not list(store().partial.iterdir())
