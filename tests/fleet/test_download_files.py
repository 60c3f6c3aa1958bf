"""One file from a server that misbehaves: it arrives whole, or one error says why not and nothing is half left."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest
from hub_server import Fault, HubServer, git_sha1, hub_server

from loraforge.errors import InputError, IntegrityError, LoraForgeError, OutputError, UsageError
from loraforge.fleet.download import part, transfer
from loraforge.fleet.download.http import Http, Patience, RefusedError
from loraforge.fleet.download.part import SEGMENT, hold, sweep
from loraforge.fleet.download.remote import Remote
from loraforge.fleet.download.tokens import Tokens
from loraforge.fleet.download.transfer import Stored, fetch_file
from loraforge.fleet.store import Store

DATA = os.urandom(3 * SEGMENT + 12345)
SHA256 = hashlib.sha256(DATA).hexdigest()
FAST = Patience(attempts=4, first_s=0.01, longest_s=0.05, asked_s=2, read_s=20)


@pytest.fixture(scope="module")
def shared() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture
def server(shared: HubServer) -> HubServer:
    shared.files = {"x/data.bin": DATA, "x/empty": b"", "x/small": b"{}"}
    shared.tokens, shared.etags = {}, True
    shared.faults.clear()
    shared.requests.clear()
    return shared


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def locked(server: HubServer, name: str = "data.bin", data: bytes = DATA) -> Remote:
    """The file as a lock states it."""
    return Remote(f"{server.url}/files/x/{name}", bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def unlocked(server: HubServer, name: str = "data.bin") -> Remote:
    """The file as nobody has described it yet."""
    return Remote(f"{server.url}/files/x/{name}")


def fetch(remote: Remote, store: Store, *, lanes: int = 1, tokens: dict[str, str] | None = None) -> Stored:
    with Http(Tokens(tokens or {}), patience=FAST) as http:
        return fetch_file(remote, store, http, lanes=lanes)


def left(store: Store) -> list[str]:
    """Names of everything under way."""
    return sorted(path.suffix for path in store.partial.iterdir()) if store.partial.is_dir() else []


def require_whole(store: Store, stored: Stored, data: bytes = DATA) -> None:
    assert stored == Stored(hashlib.sha256(data).hexdigest(), len(data))
    path = store.blob(stored.sha256)
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o222 == 0
    assert left(store) == []


@pytest.mark.parametrize("form", [locked, unlocked])
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize(
    "faults",
    [
        [],
        [{"kind": "truncate", "after": 1_500_000}],
        [{"kind": "truncate", "after": 200_000, "times": 5}],  # each brings something: patience is new
        [{"kind": "reset", "after": 1_500_000}],
        [{"kind": "reset", "after": 0, "times": 3}],
        [{"kind": 429, "headers": {"Retry-After": "0"}}],
        [{"kind": 500}, {"kind": 502}, {"kind": 503}],
        [{"kind": "drip", "after": 0.001, "times": 9}],
        [{"kind": "no_ranges", "times": 99}],
        [{"kind": "no_ranges", "times": 99}, {"kind": "truncate", "after": 1_500_000}],
    ],
    ids=str,
)  # fmt: skip
def test_arrives_whole(
    server: HubServer,
    store: Store,
    faults: list[dict[str, object]],
    lanes: int,
    form: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "MIN_RUN", SEGMENT)
    for fault in faults:
        server.fail(**fault)  # type: ignore[arg-type]
    require_whole(store, fetch(form(server), store, lanes=lanes))  # type: ignore[operator]
    count = len(server.requests)
    fetch(locked(server), store)
    assert len(server.requests) == count  # it is there: nobody is asked


def test_silence_is_not_waited_out(server: HubServer, store: Store) -> None:
    server.fail("stall", after=60)
    started = time.monotonic()
    with Http(Tokens({}), patience=replace(FAST, read_s=0.5)) as http:
        require_whole(store, fetch_file(locked(server), store, http))
    assert time.monotonic() - started < 50


def test_lanes_are_connections_that_bring_each_byte_once(
    server: HubServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MIN_RUN", SEGMENT)
    require_whole(store, fetch(locked(server), store, lanes=4))
    assert len({request.range for request in server.requests}) == 4
    assert server.sent("data.bin") == len(DATA)


@pytest.mark.parametrize("form", [locked, unlocked])
def test_small_and_empty_files(server: HubServer, store: Store, form: object) -> None:
    for name, data in (("small", b"{}"), ("empty", b"")):
        remote = locked(server, name, data) if form is locked else unlocked(server, name)
        require_whole(store, fetch(remote, store), data)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("flip", "other bytes came than locked: SHA-256 is "),
        ("grow", f"is {len(DATA) + 4} bytes, locked are {len(DATA)}"),
        ("shrink", f"is {len(DATA) - 4} bytes, locked are {len(DATA)}"),
    ],
)
@pytest.mark.parametrize("ranges", [True, False])
def test_wrong_bytes_are_refused(
    server: HubServer, store: Store, fault: str, problem: str, ranges: bool
) -> None:
    server.fail(fault)
    if not ranges:
        server.fail("no_ranges", times=9)
    with pytest.raises(IntegrityError) as caught:
        fetch(locked(server), store)
    assert str(caught.value).startswith(f"{server.url}/files/x/data.bin: {problem}")
    assert left(store) == []
    assert not store.blob(SHA256).exists()
    require_whole(store, fetch(locked(server), store))


def test_wrong_bytes_after_a_resume_leave_nothing_to_go_on_from(server: HubServer, store: Store) -> None:
    with pytest.raises(InputError, match="answers 500, and has 4 times in a row"):
        _fetch_cut(server, store)
    assert left(store) == [".part", ".segments"]
    server.files["x/data.bin"] = os.urandom(len(DATA))
    with pytest.raises(IntegrityError, match="nothing of them is kept"):
        fetch(locked(server), store)
    assert left(store) == []


def _fetch_cut(server: HubServer, store: Store) -> None:
    """A fetch that brings the first 2.5 MB and then nothing more."""
    server.fail("truncate", after=2_500_000, then=[Fault(500, times=3)])
    fetch(locked(server), store)


def test_resumes_by_range_where_it_was(server: HubServer, store: Store) -> None:
    with pytest.raises(InputError, match="run the same command again later: what has come is kept"):
        _fetch_cut(server, store)
    server.requests.clear()
    require_whole(store, fetch(locked(server), store))
    assert [request.range for request in server.requests] == [f"bytes={2 * SEGMENT}-{len(DATA) - 1}"]
    assert server.sent("data.bin") == len(DATA) - 2 * SEGMENT


@pytest.mark.parametrize(
    ("status", "message", "form"),
    [
        (401, "wants a token (401); check the name, and set {variable} to a token that may read it", locked),
        (403, "is forbidden (403); set {variable} to a token that may read it", locked),
        (404, "was not found (404); check the name", unlocked),
        (418, "cannot be had (the host answers 418); check the address", unlocked),
    ],
)
def test_refused_with_one_line(
    server: HubServer, store: Store, status: int, message: str, form: object
) -> None:
    server.fail(status)
    with pytest.raises(RefusedError) as caught:
        fetch(form(server), store)  # type: ignore[operator]
    variable = f"LORAFORGE_TOKEN_127_0_0_1_{server.url.rpartition(':')[2]}"
    assert str(caught.value) == f"{server.url}/files/x/data.bin: {message.format(variable=variable)}"
    assert caught.value.exit_code == 3
    assert left(store) == []
    assert len(server.requests) == 1


def test_patience_ends(server: HubServer, store: Store) -> None:
    server.fail(503, times=99)
    with pytest.raises(InputError, match="answers 503, and has 4 times in a row"):
        fetch(locked(server), store)
    assert len(server.requests) == 4
    assert left(store) == []


def test_a_host_that_begins_anew_and_never_ends(server: HubServer, store: Store) -> None:
    server.fail("no_ranges", times=99)
    server.fail("truncate", after=1_500_000, times=99)
    with pytest.raises(InputError, match=r"the connection failed .*, and has 4 times in a row"):
        fetch(locked(server), store)
    assert len(server.requests) == 4


def test_retry_after_is_honoured(server: HubServer, store: Store) -> None:
    server.fail(429, headers={"Retry-After": "1"})
    started = time.monotonic()
    fetch(locked(server), store)
    assert time.monotonic() - started >= 1
    for said in ({"Retry-After": "3600"}, {"Retry-After": formatdate(time.time() + 3600, usegmt=True)}):
        server.fail(429, path="small", headers=said)
        with pytest.raises(InputError, match=r"answers 429 and asks to wait 3\d\d\d s"):
            fetch(locked(server, "small", b"{}"), store)
    server.fail(429, path="small", headers={"RateLimit": '"resolvers";r=0;t=3000'})
    with pytest.raises(InputError, match="asks to wait 3000 s"):
        fetch(locked(server, "small", b"{}"), store)


def test_what_cannot_be_trusted_is_refused(server: HubServer, store: Store) -> None:
    server.fail("no_length")
    server.fail("no_ranges")
    with pytest.raises(InputError, match="comes without its size"):
        fetch(unlocked(server), store)
    server.faults.clear()
    server.fail("gzip")
    with pytest.raises(InputError, match="is sent in another coding than asked for"):
        fetch(locked(server), store)
    assert left(store) == []


def test_a_locked_file_needs_no_stated_length(server: HubServer, store: Store) -> None:
    server.fail("no_length")
    server.fail("no_ranges")
    require_whole(store, fetch(locked(server), store))


def test_a_file_that_changes_while_it_is_first_read(server: HubServer, store: Store) -> None:
    server.fail("truncate", after=1_500_000)
    with Http(Tokens({}), patience=FAST) as http:
        changed = False

        def came(size: int) -> None:
            nonlocal changed
            if not changed:
                changed = True
                server.files["x/data.bin"] = os.urandom(len(DATA))

        with pytest.raises(InputError, match="changed while it was fetched; run the command again"):
            fetch_file(unlocked(server), store, http, came=came)


def test_without_etags_versions_are_not_mixed(server: HubServer, store: Store) -> None:
    server.etags = False
    server.fail("truncate", after=1_500_000)
    require_whole(store, fetch(unlocked(server), store))
    assert [request.range for request in server.requests[1:]] == [f"bytes=0-{len(DATA) - 1}"] * 2


def test_git_hash_of_a_small_file_of_the_hub(server: HubServer, store: Store) -> None:
    remote = Remote(f"{server.url}/files/x/small", bytes=2, git_sha1=git_sha1(b"{}"))
    require_whole(store, fetch(remote, store), b"{}")
    server.files["x/small"] = b"[]"
    with pytest.raises(IntegrityError, match="git SHA-1 is"):
        fetch(remote, Store(store.root / "other"))


@pytest.mark.parametrize(
    ("to", "problem"),
    [
        ("ftp://127.0.0.1/x", "redirects to what is no address"),
        ("//user:password@127.0.0.1/x", "redirects to what is no address"),
        ("http://[::1/x", "broke off, or spoke no HTTP"),
        ("http://a..b/x", "is, or leads to, a host of no valid name"),
        ("http://xn--a/x", "is, or leads to, a host of no valid name"),
        ("/files/x/data.bin", "redirects more than 10 times"),
    ],
)
def test_redirects_that_are_not_followed(server: HubServer, store: Store, to: str, problem: str) -> None:
    server.fail("redirect", to=to, times=99)
    with pytest.raises(InputError, match=problem) as caught:
        fetch(locked(server), store)
    assert "password" not in str(caught.value)
    assert left(store) == []


def test_relative_redirect(server: HubServer, store: Store) -> None:
    server.fail("redirect", path="old", to="../x/data.bin")
    require_whole(store, fetch(Remote(f"{server.url}/files/x/old", bytes=len(DATA), sha256=SHA256), store))


def test_token_goes_to_its_own_host_alone(server: HubServer, store: Store) -> None:
    server.tokens["x/"] = "its-own"
    port, other = server.url.rpartition(":")[2], server.cdn.rpartition(":")[2]
    tokens = {
        f"LORAFORGE_TOKEN_127_0_0_1_{port}": "its-own\n",
        f"LORAFORGE_TOKEN_127_0_0_1_{other}": "others",
    }
    require_whole(store, fetch(locked(server), store, tokens=tokens))
    assert {request.token for request in server.requests} == {"its-own"}
    server.requests.clear()
    server.blobs[SHA256] = DATA
    server.fail("redirect", to=f"{server.cdn}/blobs/{SHA256}?X-Amz-Signature=a-secret-of-the-content-network")
    tokens.popitem()
    fetch(locked(server), Store(store.root / "other"), tokens=tokens)
    assert [(request.host, request.token) for request in server.requests] == [
        ("hub", "its-own"),
        ("cdn", None),
    ]


def test_tokens_travel_in_no_clear_and_no_message() -> None:
    tokens = Tokens({"LORAFORGE_TOKEN_EXAMPLE_COM": "s3cret", "LORAFORGE_TOKEN_A__B_COM": "two words"})
    assert tokens.header("https://example.com/x") == {"Authorization": "Bearer s3cret"}
    assert tokens.header("https://example.com:8443/x") == {}
    assert tokens.header("https://example.com.evil.org/x") == {}
    assert tokens.header("http://example.com/x") == {}
    assert not tokens.withheld("https://example.com/x")
    assert Tokens({"LORAFORGE_TOKEN_EXAMPLE_COM": "s3cret"}).withheld("http://example.com/x")
    assert not Tokens({"LORAFORGE_TOKEN_EXAMPLE_COM_80": "x"}).withheld("http://example.com/x")
    with pytest.raises(UsageError) as caught:
        tokens.header("https://a-b.com/x")
    assert str(caught.value) == "LORAFORGE_TOKEN_A__B_COM: is not a token: one word of plain characters"


def test_full_disk_is_known_at_once(server: HubServer, store: Store) -> None:
    with pytest.raises(OutputError, match="no space left on the device"):
        fetch(Remote(f"{server.url}/files/x/data.bin", bytes=1 << 60, sha256=SHA256), store)
    assert server.requests == []
    assert left(store) == []


def test_nobody_listens(store: Store) -> None:
    with pytest.raises(InputError, match=r"the connection failed .*refused"):
        fetch(Remote("http://127.0.0.1:9/x", bytes=1, sha256=SHA256), store)


def test_torn_journal_and_stale_parts(store: Store) -> None:
    path = store.partial / "k.part"
    with hold(path, 3 * SEGMENT) as first:
        assert first is not None
        first.write(0, DATA[: 2 * SEGMENT])
        first.arrived(0, 2 * SEGMENT)
        with hold(path, 3 * SEGMENT) as second:
            assert second is None  # one at a time
    journal = path.with_suffix(".segments")
    journal.write_bytes(journal.read_bytes() + b"2")  # killed in the middle of a line
    with hold(path, 3 * SEGMENT) as again:
        assert again is not None
        assert again.missing() == [(2 * SEGMENT, 3 * SEGMENT)]
        again.arrived(2 * SEGMENT, 3 * SEGMENT)
    assert journal.read_bytes() == b"0\n1\n2\n"
    with hold(path, 2 * SEGMENT) as smaller:  # another plan: nothing of the first counts
        assert smaller is not None
        assert smaller.missing() == [(0, 2 * SEGMENT)]
    sweep(store.partial)
    assert left(store) == [".part", ".segments"]
    os.utime(path, (0, time.time() - part.STALE_S - 1))
    sweep(store.partial)
    assert left(store) == []


def test_every_error_is_one_line(server: HubServer, store: Store) -> None:
    for status in (400, 401, 402, 403, 404, 405, 410, 416, 451):
        server.fail(status, headers={"X-Said": "\x1b[2J"})
        with pytest.raises(LoraForgeError) as caught:
            fetch(locked(server), store)
        assert str(caught.value).isprintable()
