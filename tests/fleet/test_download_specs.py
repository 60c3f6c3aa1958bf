"""Specifications, the sources that locks state, and addresses: what a person may write, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from adapter_folders import MakeAdapter

from loraforge.cli import main
from loraforge.errors import InputError, UsageError
from loraforge.fleet.download.address import check_folder_url, check_url, host_of, inside, shown_url
from loraforge.fleet.lock import load_lock, save_lock
from loraforge.fleet.locking import lock_spec, make_lock
from loraforge.fleet.source import open_source
from loraforge.fleet.spec import HubEntry, UrlEntry, load_spec, parse_arguments

EXAMPLES = sorted((Path(__file__).parents[2] / "config" / "fleets" / "examples").glob("*.yaml"))
ZERO = "0" * 64


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_read_and_refused_without_hashes(path: Path) -> None:
    spec = load_spec(path)
    assert spec.base_model
    names = [entry.default_name for entry in spec.adapters]
    assert len(set(names)) == len(names) > 1
    with pytest.raises(UsageError) as caught:
        open_source([path])
    assert str(caught.value) == (
        f"{path}: is a list of adapters without hashes, and without them nothing is fetched or opened; run `loraforge "
        f"fleet lock {path}` once, and name the lock that it writes"
    )


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("command", [["factor"], ["fleet", "fetch"], ["fleet", "verify"]])
def test_a_specification_is_no_lock(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, str(EXAMPLES[0])])
    assert caught.value.code == 2
    assert "run `loraforge fleet lock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adapters: []", "adapters: not a fleet specification (Tuple should have at least 1 item"),
        ("- a", "not a fleet specification (Input should be a valid dictionary"),
        ("adapters: [{hub: org/x, more: 1}]", "adapters.0.more: not a fleet specification (Extra inputs"),
        ("adapters: [{hub: ../x}]", "adapters.0.hub: not a fleet specification (String should match pattern"),
        ("adapters: [{hub: org/x, subfolder: ../..}]", "adapters.0.subfolder: not a fleet specification"),
        ("adapters: [{hub: org/x, subfolder: /etc}]", "must be plain folder names with / between"),
        ("adapters: [{hub: org/x, revision: 'a b'}]", "must be a branch, a tag or a commit"),
        ("adapters: [{url: 'ftp://x/y'}]", "must begin with https:// or http:// and name a host"),
        ("adapters: [{url: 'https://u:secret@x/y'}]", "must hold no user name or password"),
        ("adapters: [{url: 'https://x/y.zip?X-Amz-Signature=secret'}]", "must not be signed or hold a token"),
        ("adapters: [{url: 'https://x/y?download=1'}]", "must have no part after ?, for it is a folder"),
        ("adapters: [{url: 'https://x/y', folder: a}]", "folder is named for an archive, and this is none"),
        ("adapters: [{url: 'https://x/y.zip', files: [a]}]", "files are named for a folder, not for an archive"),
        ("adapters: [{url: 'https://x/y', files: ['../a']}]", "must be one plain name, no path"),
        ("adapters: [{path: a, name: a/b}]", "must be one plain name, no path"),
        ("adapters: &a [*a]", "aliases (*) are not read"),
        ("adapters: [{path: a, path: b}]", "a key is given twice in one mapping"),
        ("adapters: [{? [a] : b}]", "not valid YAML"),
        ("adapters: !!python/object/apply:os.system [id]", "not valid YAML"),
        ("a: !!map b", "not valid YAML"),
        ("a: !!timestamp b", "not valid YAML"),
        ("a: !!int ''", "not valid YAML"),
        ("a: !!bool b", "not valid YAML"),
        ("adapters: [{path: a, name: " + "\u00e9" * 130 + "}]", "must be one plain name, no path"),
        ("<<: {a: b}", "not valid YAML"),
        ("adapters: [", "not valid YAML"),
        ("[" * 3000, "is nested deeper than 32 levels"),
        ("- " * 3000, "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)  # fmt: skip
def test_malformed_specifications(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_spec(path)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    assert "secret" not in str(caught.value)


def test_large_and_missing_specifications(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"#" * (5 << 20))
    with pytest.raises(InputError, match="is larger than"):
        load_spec(tmp_path / "x.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        load_spec(tmp_path / "y.yaml")


def test_names_by_default() -> None:
    names = {
        "adapters/one": UrlEntry(url="https://x/y/one/"),
        "archive": UrlEntry(url="https://x/y/one.tar.gz?download=1"),
        "in an archive": UrlEntry(url="https://x/all.zip", folder="a/one"),
        "repository": HubEntry(hub="org/one"),
        "subfolder": HubEntry(hub="org/x", subfolder="a/one"),
        "given": HubEntry(hub="org/x", name="one"),
    }
    assert {entry.default_name for entry in names.values()} == {"one"}
    spec = parse_arguments(["hub:org/x@v1", "hub:org/y", "https://x/y", "a/b"])
    assert [entry.model_dump(exclude_defaults=True) for entry in spec.adapters] == [
        {"hub": "org/x", "revision": "v1"},
        {"hub": "org/y"},
        {"url": "https://x/y"},
        {"path": "a/b"},
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"hub": "org/x", "revision": "main"}, "source.commit: has no hashes, and without them nothing is fetched"),
        ({"hub": "org/x", "commit": "main", "revision": "main"}, "source.commit: not a fleet lock (String"),
        ({"hub": "../x", "commit": "0" * 40, "revision": "main"}, "source.hub: not a fleet lock (String should match"),
        ({"hub": "a/b", "commit": "0" * 40, "revision": "m", "subfolder": "a/../.."}, "must be plain folder names"),
        ({"url": "file:///etc/"}, "source.url: not a fleet lock (Value error, must begin with https://"),
        ({"url": "https://u:secret@x/"}, "must hold no user name or password"),
        ({"url": "https://x/", "path": "a"}, "source.path: not a fleet lock (Extra inputs are not permitted)"),
        ({"archive": "https://x/y.zip", "bytes": 1}, "source.sha256: has no hashes"),
        ({"archive": "https://x/y.zip", "bytes": 1, "sha256": ZERO, "folder": "/a"}, "must be plain folder names"),
        ({}, "source.path: not a fleet lock (Field required)"),
        ("x", "source: not a fleet lock (Input should be"),
    ],
)  # fmt: skip
def test_sources_of_a_lock(tmp_path: Path, source: object, message: str) -> None:
    lock = tmp_path / "x.lock.json"
    entry = {"name": "a", "source": source, "files": [{"name": "f", "bytes": 1, "sha256": ZERO}]}
    value = {
        "schema": "loraforge.fleet-lock/1",
        "name": "x",
        "base_model": {"name": "b"},
        "adapters": [entry],
    }
    lock.write_text(json.dumps(value))
    with pytest.raises(InputError) as caught:
        load_lock(lock)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("missing", ["sha256", "bytes", "files"])
def test_a_lock_without_hashes(tmp_path: Path, missing: str) -> None:
    lock = tmp_path / "x.lock.json"
    file = {"name": "f", "bytes": 1, "sha256": ZERO}
    entry = {"name": "a", "source": {"url": "https://x/"}, "files": [file]}
    (entry if missing == "files" else file).pop(missing)
    value = {
        "schema": "loraforge.fleet-lock/1",
        "name": "x",
        "base_model": {"name": "b"},
        "adapters": [entry],
    }
    lock.write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"has no hashes, .*; make it with `loraforge fleet lock`") as caught:
        load_lock(lock)
    assert caught.value.key is not None
    assert caught.value.key.endswith(missing)


def test_a_file_twice(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    lock = tmp_path / "x.lock.json"
    save_lock(make_lock([make_adapter(tmp_path / "a")], lock, name="x"), lock)
    value = json.loads(lock.read_text())
    value["adapters"][0]["files"] *= 2
    lock.write_text(json.dumps(value))
    with pytest.raises(InputError, match="two files have the same name"):
        load_lock(lock)


@pytest.mark.parametrize(
    "url",
    [
        "", "example.com/x", "https://", "https:///x", "https://x:99999/", "https://x:0/", "https://x/a b",
        "https://x/\n", "https://x/\u00e9", "https://x/#part", "https://@x/", "https://x\\@y/", "https://[::1/",
        "HTTPS_//x", "https://x/" + "a" * 3000, "https://x/?sig=1", "https://x/?a=1&access_token=", "https://x/<a>",
        "javascript:alert(1)",
    ],
)  # fmt: skip
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"must|is not an address") as caught:
        check_url(url)
    assert len(url) < 9 or url not in str(caught.value)


def test_addresses() -> None:
    for url in (
        "https://example.com",
        "http://127.0.0.1:8080/a/",
        "https://[::1]:8443/x",
        "https://x/a%20b.zip?download=1",
    ):
        assert check_url(url) == url
    assert check_folder_url("https://x/y") == "https://x/y"
    assert shown_url("https://x:8443/a/b?X-Amz-Signature=secret#c") == "https://x:8443/a/b"
    assert inside("https://x/a/", "b c#?.json") == "https://x/a/b%20c%23%3F.json"
    assert host_of("https://a.b-c.org/x").variable == "LORAFORGE_TOKEN_A_B__C_ORG"
    assert host_of("https://a.org:8443/x").variable == "LORAFORGE_TOKEN_A_ORG_8443"
    hosts = {"https://a/": True, "http://a/": False, "http://127.0.0.1/": True, "http://localhost.a/": False}
    assert {url: host_of(url).private for url in hosts} == hosts


def test_base_model_and_names_of_a_specification(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    for name in ("a", "b"):
        make_adapter(tmp_path / "adapters" / name)
    path = tmp_path / "x.yaml"

    def lock(text: str, name: str = "x") -> list[str]:
        path.write_text(text)
        made = lock_spec(load_spec(path), tmp_path, tmp_path / "x.lock.json", name=name)
        return [adapter.name for adapter in made.adapters]

    assert lock("adapters: [{path: adapters}]") == ["a", "b"]
    assert lock("adapters: [{path: adapters/b, name: c}, {path: adapters/a}]") == ["c", "a"]
    with pytest.raises(InputError, match="base model is 'tiny/base', but the specification has 'other'"):
        lock("base_model: other\nadapters: [{path: adapters}]")
    with pytest.raises(InputError, match="holds 2 adapters, which cannot all be named 'c'"):
        lock("adapters: [{path: adapters, name: c}]")
    with pytest.raises(InputError, match="two adapters are named 'a'"):
        lock("adapters: [{path: adapters}, {path: adapters/b, name: a}]")
    with pytest.raises(UsageError, match="cannot name a fleet"):
        lock("adapters: [{path: adapters}]", name="a/b")
    odd = make_adapter(tmp_path / "line\nbreak" / "a")
    with pytest.raises(InputError, match="is below a folder whose name no lock can hold"):
        make_lock([odd], tmp_path / "x.lock.json", name="x")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("task: [a]\n", "task: must be one word"),
        ("[" * 3000, "is nested deeper than 32 levels"),
        ("#" * (5 << 20), "is larger than"),
        ("a: &a [x, x]\nb: &b [*a, *a]\ntask: [*b, *b]\n", "aliases (*) are not read"),
    ],
)
def test_recipes_of_strangers(tmp_path: Path, make_adapter: MakeAdapter, recipe: str, message: str) -> None:
    folder = make_adapter(tmp_path / "a")
    (folder / "recipe.yaml").write_text(recipe)
    with pytest.raises(InputError) as caught:
        make_lock([folder], tmp_path / "x.lock.json", name="x")
    assert message in str(caught.value)
