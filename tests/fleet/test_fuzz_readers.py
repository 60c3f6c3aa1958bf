"""No bytes make a reader of strangers' files fail in any way but its one error, or take long.

Inputs are grown from whole files, the fleet's own among them, and from ``corpus``. ``LORAFORGE_FUZZ_SECONDS`` makes the
search longer, and then one that goes by what it reaches: an input that takes a reader to a line that none before it
did is grown from in turn, and written to ``corpus`` as ``found-<hash>``, as is one that fails; every later run tries
these again. ``LORAFORGE_FUZZ_RECORDS`` names a file that gets a record a reader, for a bag of target ``reader_fuzz``.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from adapter_folders import write_adapter
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from test_untrusted import CORPUS, read_kept

import loraforge.fleet
from loraforge.errors import LoraForgeError
from loraforge.files import canonical_json

KINDS = ("headers", "configs", "indexes", "locks")
SECONDS = float(os.environ.get("LORAFORGE_FUZZ_SECONDS", "0"))
RECORDS = os.environ.get("LORAFORGE_FUZZ_RECORDS")
MOST_SECONDS = 2.0  # of the processor, for one input: other processes may share it
MOST_KEPT_BYTES = 4096  # of an input that is kept for what it reached
READERS = str(Path(loraforge.fleet.__file__).parent)
FLEET = Path(__file__).resolve().parents[2] / "config" / "fleets"
KEYS = (
    "r", "lora_alpha", "peft_type", "target_modules", "modules_to_save", "rank_pattern", "alpha_pattern", "bias",
    "layers_to_transform", "layers_pattern", "target_parameters", "init_r", "alpha", "use_rslora", "exclude_modules",
    "weight_map", "metadata", "__metadata__", "dtype", "shape", "data_offsets", "schema", "adapters", "files",
    "source", "path", "name", "sha256", "bytes", "base_model", "base_model_name_or_path", "ensure_weight_tying",
)  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(
        ["LORA", "ADALORA", "VERA", "LOHA", "LOKR", "F32", "BF16", "all-linear", "q_proj", "..", "/etc", "a\0", "(a+)+",
         ".*", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "loraforge.fleet-lock/1"]
    ),
    st.text(max_size=12),
)  # fmt: skip
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 4, -1, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**30, 0.5, 1e308]),
    st.integers(-5, 200),
    st.floats(),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), TEXTS), inner, max_size=4),
    ),
    max_leaves=12,
)


def whole(kind: str) -> bytes:
    """A file of ``kind`` that its reader takes."""
    if kind == "locks":
        entry = {"name": "f", "bytes": 1, "sha256": "0" * 64}
        adapter = {"name": "a", "source": {"path": "a"}, "files": [entry]}
        base = {"name": "b", "files": {}}
        return json.dumps(
            {"schema": "loraforge.fleet-lock/1", "name": "x", "base_model": base, "adapters": [adapter]}
        ).encode()
    if kind == "indexes":
        return json.dumps({"weight_map": {"a": "adapter_model-1.safetensors"}}).encode()
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder) / "a", layers=(0,))
        name = "adapter_config.json" if kind == "configs" else "adapter_model.safetensors"
        return (Path(folder) / "a" / name).read_bytes()


def real(kind: str) -> list[bytes]:
    """The small files of ``kind`` that come with the fleet."""
    if kind == "locks":
        return [(FLEET / "smol.lock.json").read_bytes()]
    return [path.read_bytes() for path in sorted(FLEET.glob("smol/*/adapter_config.json"))[:4]] * (
        kind == "configs"
    )


STARTS = {
    kind: [whole(kind), *real(kind), *(path.read_bytes() for path in sorted((CORPUS / kind).iterdir()))]
    for kind in KINDS
}


@st.composite
def inputs(draw: st.DrawFn, kind: str) -> bytes:
    """Files of ``kind``: grown out of JSON of its words, or from a whole or a kept one with bytes changed."""
    start = draw(st.sampled_from(STARTS[kind]))
    header = kind == "headers"
    length = int.from_bytes(start[:8], "little") if header else 0
    text, data = (start[8 : 8 + length], start[8 + length :]) if header else (start, b"")
    how = draw(st.sampled_from(("values", "edit", "edit", "bytes")))
    if how == "values":
        text = json.dumps(draw(_edited(text))).encode("utf-8", "surrogatepass")
    elif how == "edit":
        text = _spliced(draw, text)
    else:
        return draw(st.one_of(st.binary(max_size=64), st.just(start))) + draw(st.binary(max_size=8))
    if not header:
        return text
    stated = draw(st.sampled_from((len(text), len(text), len(text), len(text) + 1, 0, 1 << 62)))
    return stated.to_bytes(8, "little") + text + data


def _edited(text: bytes) -> st.SearchStrategy[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return VALUES
    if not isinstance(value, dict) or not value:
        return VALUES
    names = st.sampled_from([*value, *KEYS])
    return st.dictionaries(names, VALUES, min_size=1, max_size=4).map(lambda changes: value | changes)


def _spliced(draw: st.DrawFn, text: bytes) -> bytes:
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 8)))
        piece = draw(
            st.one_of(
                st.binary(max_size=4), st.sampled_from([b"NaN", b"[", b'"', b"1e999", b"\\ud800", b"-"])
            )
        )
        text = text[:start] + piece + text[stop:]
    return text


def _try(kind: str, data: bytes) -> bool:
    """Whether the reader takes ``data``; fails where it neither does nor says why not, in one line and soon."""
    with tempfile.TemporaryDirectory() as folder:
        started, message = time.process_time(), None
        try:
            read_kept(kind, data, Path(folder))
        except LoraForgeError as error:
            message = str(error)
        seconds = time.process_time() - started
        assert message is None or (message and message.isprintable())  # no commands to a terminal
        assert seconds < MOST_SECONDS
        return message is None


def _reached(kind: str, data: bytes) -> set[tuple[str, int]]:
    """Lines of the readers that ``data`` takes them through."""
    found: set[tuple[str, int]] = set()

    def line(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            found.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, _: str, __: Any) -> Callable[..., Any] | None:
        return line if frame.f_code.co_filename.startswith(READERS) else None

    with tempfile.TemporaryDirectory() as folder:
        before = sys.gettrace()
        sys.settrace(call)
        try:
            read_kept(kind, data, Path(folder))
        except LoraForgeError:
            pass
        finally:
            sys.settrace(before)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_found_before(kind: str) -> None:
    for path in (CORPUS / kind).glob("found-*"):
        _try(kind, path.read_bytes())


def test_the_documented_search_is_the_evidence() -> None:
    root = FLEET.parents[1]
    summary = json.loads((root / "evidence/reader_fuzz/20261130-cpu2/data/summary.json").read_text())
    words = f"It tried {summary['inputs']:,} inputs in {summary['seconds']:.0f} s, none of which failed"
    assert words in (root / "docs" / "formats.md").read_text(encoding="utf-8").replace("\n", " ")


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_give_an_adapter_or_one_error(kind: str) -> None:
    if not SECONDS:
        Search(kind).some(1, 60)
        return
    search = Search(kind)
    for data in STARTS[kind]:
        search.lines |= _reached(kind, data)
    stop = time.monotonic() + SECONDS / len(KINDS)
    try:
        while time.monotonic() < stop:
            search.some(random.randrange(1 << 32), 500)
    finally:
        record = canonical_json(search.record())
        print(record)
        if RECORDS:
            with open(RECORDS, "a", encoding="utf-8") as stream:
                stream.write(record + "\n")


class Search:
    """A search for inputs of ``kind`` that fail; counts what it tries, and keeps what is worth it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.lines: set[tuple[str, int]] = set()
        self.grown: list[
            bytes
        ] = []  # to grow from in the next round: a round must draw the same from the same seed
        self.taken = self.refused = self.failed = self.kept = 0
        self.slowest = 0.0
        self.started, self.cpu = time.perf_counter(), time.process_time()

    def some(self, start: int, examples: int) -> None:
        """Try some inputs, drawn from seed ``start``. One that fails is shrunk by hypothesis, kept and raised."""
        failing: list[bytes] = []

        @seed(start)
        @settings(
            max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
            print_blob=False,
        )  # fmt: skip
        @given(inputs(self.kind))
        def search(data: bytes) -> None:
            try:
                self._one(data)
            except BaseException:
                failing[:] = [data]
                raise

        STARTS[self.kind] += self.grown
        self.grown = []
        try:
            search()
        except BaseException:
            if SECONDS and failing:
                self._keep(failing[0])
            raise

    def _one(self, data: bytes) -> None:
        started = time.process_time()
        try:
            taken = _try(self.kind, data)
        except BaseException:
            self.failed += 1
            raise
        self.slowest = max(self.slowest, time.process_time() - started)
        self.taken, self.refused = self.taken + taken, self.refused + (not taken)
        if SECONDS and (new := _reached(self.kind, data) - self.lines):
            self.lines |= new
            self.grown.append(data)
            if len(data) <= MOST_KEPT_BYTES:
                self._keep(data)

    def _keep(self, data: bytes) -> None:
        self.kept += 1
        (CORPUS / self.kind / f"found-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)

    def record(self) -> dict[str, Any]:
        """What target ``reader_fuzz`` keeps of it."""
        return {
            "reader": self.kind,
            "seconds": time.perf_counter() - self.started,
            "cpu_s": time.process_time() - self.cpu,
            "taken": self.taken,
            "refused": self.refused,
            "failed": self.failed,
            "slowest_s": self.slowest,
            "lines": len(self.lines),
            "kept": self.kept,
        }
