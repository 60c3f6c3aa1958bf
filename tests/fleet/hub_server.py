"""A server on this machine that speaks the hub's API, and a plain web server's, and misbehaves on request.

Large files of a repository are redirected to a second server, as the hub does to its content network: another port is
another host, to which no token belongs.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SIGNATURE = "a-secret-of-the-content-network"


@dataclass
class Fault:
    """Something that goes wrong with the next ``times`` answers on paths that hold ``path``.

    ``kind``: a status; ``truncate`` or ``reset`` after ``after`` bytes; ``flip`` a byte, ``grow`` or ``shrink`` the
    file, ``stall`` for ``after`` seconds, ``drip`` pieces with pauses, ``no_ranges``, ``no_length``, ``gzip``, another
    ``commit``, ``redirect`` to ``to``, ``nonsense`` for JSON. ``then``: what goes wrong after that.
    """

    kind: int | str
    path: str = ""
    times: int = 1
    after: float = 0
    to: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    then: list[Fault] = field(default_factory=list)


@dataclass
class Request:
    """What came in, and how many bytes of a body went out."""

    host: str
    path: str
    token: str | None
    range: str | None
    status: int = 0
    sent: int = 0


@dataclass
class Repo:
    """Branches and tags by name, and what each commit holds by path."""

    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None

    def commit(self, files: dict[str, bytes], *names: str) -> str:
        """Put ``files`` at a new commit, and names on it."""
        listing = json.dumps({path: git_sha1(data) for path, data in sorted(files.items())})
        commit = hashlib.sha1(listing.encode()).hexdigest()
        self.commits[commit] = files
        for name in (*names, commit):
            self.revisions[name] = commit
        return commit


class HubServer:
    """The hub at ``url``, plain files below ``url``/files/, and the content network at ``cdn``."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.files: dict[str, bytes] = {}
        self.tokens: dict[str, str] = {}  # of a folder of plain files
        self.blobs: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.etags = True
        self._lock = threading.Lock()
        self._servers = [self._listen("hub"), self._listen("cdn")]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def repo(self, name: str, files: dict[str, bytes], *revisions: str) -> str:
        """A repository with one more commit, which is returned; ``main`` unless other names are given."""
        for path, data in files.items():
            if path.endswith((".safetensors", ".bin")):
                self.blobs[hashlib.sha256(data).hexdigest()] = data
        return self.repos.setdefault(name, Repo()).commit(files, *(revisions or ("main",)))

    def fail(self, kind: int | str, path: str = "", **more: Any) -> None:
        self.faults.append(Fault(kind, path, **more))

    def asked(self, path: str) -> list[Request]:
        """Requests so far of paths that hold ``path``."""
        return [request for request in self.requests if path in request.path]

    def sent(self, path: str) -> int:
        return sum(request.sent for request in self.asked(path))

    def take(self, path: str, *kinds: int | str | type) -> Fault | None:
        """Use up a fault of ``kinds`` for ``path``."""
        with self._lock:
            for fault in self.faults:
                of_kind = any(
                    isinstance(fault.kind, kind) if isinstance(kind, type) else fault.kind == kind
                    for kind in kinds
                )
                if of_kind and fault.path in path and fault.times > 0:
                    fault.times -= 1
                    self.faults += fault.then
                    return fault
        return None

    def _listen(self, role: str) -> _Server:
        server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self, "role": role}))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:  # a client that was killed
        pass


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    role: str
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        authorization = self.headers.get("Authorization")
        token = None if authorization is None else authorization.removeprefix("Bearer ")
        self.request_ = Request(self.role, self.path, token, self.headers.get("Range"))
        self.hub.requests.append(self.request_)
        if fault := self.hub.take(path, int):
            self._plain(int(fault.kind), fault.headers)
        elif fault := self.hub.take(path, "redirect"):
            self._plain(302, {"Location": fault.to})
        elif self.role == "cdn":
            self._cdn(path, parse_qs(parts.query))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self._info(match[1], match[2], token)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3], token)
        elif path.startswith("/files/"):
            self._file(path.removeprefix("/files/"), token)
        else:
            self._plain(404)

    def _cdn(self, path: str, query: dict[str, list[str]]) -> None:
        if query.get("X-Amz-Signature") != [SIGNATURE]:
            self._plain(403)
        else:
            self._body(self.hub.blobs[path.rpartition("/")[2]], path, {})

    def _info(self, name: str, revision: str, token: str | None) -> None:
        if (repo := self._repo(name, token)) is None:
            return
        if (commit := repo.revisions.get(revision)) is None:
            self._plain(404, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings: list[dict[str, Any]] = []
        for path, data in repo.commits[commit].items():
            entry = {"rfilename": path, "size": len(data), "blobId": git_sha1(data)}
            if path.endswith((".safetensors", ".bin")):
                sha256 = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        answer = {"id": name, "modelId": name, "sha": commit, "private": False, "tags": [], "downloads": 0,
                  "siblings": siblings}  # fmt: skip
        if self.hub.take(self.path, "nonsense"):
            answer = {"id": name, "sha": "not a commit", "siblings": []}
        self._plain(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _resolve(self, name: str, revision: str, path: str, token: str | None) -> None:
        if (repo := self._repo(name, token)) is None:
            return
        commit = repo.revisions.get(revision)
        data = None if commit is None else repo.commits[commit].get(path)
        if data is None:
            self._plain(404, {"X-Error-Code": "EntryNotFound"})
            return
        said = "f" * 40 if self.hub.take(path, "commit") else str(commit)
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 in self.hub.blobs:
            location = f"{self.hub.cdn}/blobs/{sha256}?X-Amz-Signature={SIGNATURE}"
            headers = {"Location": location, "X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256}"'}
            self._plain(302, headers | {"X-Repo-Commit": said})
        else:
            self._body(data, path, {"X-Repo-Commit": said})

    def _repo(self, name: str, token: str | None) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.token is not None and token is None):
            self._plain(
                401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}
            )
            return None
        if repo.token not in (None, token):
            self._plain(403, {"X-Error-Code": "GatedRepo"})
            return None
        return repo

    def _file(self, path: str, token: str | None) -> None:
        wanted = next((token for folder, token in self.hub.tokens.items() if path.startswith(folder)), None)
        if wanted not in (None, token):
            self._plain(401)
        elif path in self.hub.files:
            self._body(self.hub.files[path], path, {})
        else:
            self._plain(404)

    def _plain(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.request_.status = status
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self, data: bytes, path: str, headers: dict[str, str]) -> None:
        take = self.hub.take
        if take(path, "flip"):
            data = data[:-1] + bytes([data[-1] ^ 1])
        data = data + b"more" if take(path, "grow") else data[:-4] if take(path, "shrink") else data
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        start, stop, status = 0, len(data), 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        condition = self.headers.get("If-Range")
        if asked and not take(path, "no_ranges") and condition in (None, etag):
            start, stop, status = int(asked[1]), min(len(data), int(asked[2] or len(data)) + 1), 206
            if asked[2] == "":
                stop = len(data)
            if start >= len(data):
                self._plain(416, {"Content-Range": f"bytes */{len(data)}"})
                return
            headers = headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        self.request_.status = status
        self.send_response(status)
        if self.hub.etags:
            self.send_header("ETag", etag)
        if take(path, "gzip"):
            self.send_header("Content-Encoding", "gzip")
        for name, value in headers.items():
            self.send_header(name, value)
        if take(path, "no_length"):
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self._stream(data[start:stop], path)

    def _stream(self, data: bytes, path: str) -> None:
        cut = (
            self.hub.take(path, "truncate", "reset") if len(data) > 1 else None
        )  # not when the size is asked
        drip = self.hub.take(path, "drip")
        if stall := self.hub.take(path, "stall"):
            self.wfile.flush()
            time.sleep(stall.after)
        step = 1 << 14 if drip else 1 << 16
        whole = data if cut is None else data[: int(cut.after)]
        try:
            for begin in range(0, len(whole), step):
                self.wfile.write(whole[begin : begin + step])
                self.wfile.flush()
                self.request_.sent += len(whole[begin : begin + step])
                if drip:
                    time.sleep(drip.after)
        except OSError:  # the other side has gone
            self.close_connection = True
        if cut is not None:
            self.close_connection = True
            if cut.kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
