"""No bytes make a reader of strangers' files fail in any way but its one error, or take long.

Inputs are grown from whole files and from ``corpus``. ``LORAFORGE_FUZZ_SECONDS`` makes the search longer; what it finds
is written to ``corpus`` as ``found-<hash>``, where every later run tries it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import write_adapter
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from test_untrusted import CORPUS, read_kept

from loraforge.errors import LoraForgeError

KINDS = ("headers", "configs", "indexes", "locks")
SECONDS = float(os.environ.get("LORAFORGE_FUZZ_SECONDS", "0"))
MOST_SECONDS = 2.0  # of one input
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


STARTS = {
    kind: [whole(kind), *(path.read_bytes() for path in sorted((CORPUS / kind).iterdir()))] for kind in KINDS
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


def _try(kind: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        started, message = time.perf_counter(), ""
        try:
            read_kept(kind, data, Path(folder))
        except LoraForgeError as error:
            message = str(error)
        assert message.isprintable()  # one line, and no commands to a terminal
        assert time.perf_counter() - started < MOST_SECONDS


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_found_before(kind: str) -> None:
    for path in (CORPUS / kind).glob("found-*"):
        _try(kind, path.read_bytes())


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_give_an_adapter_or_one_error(kind: str) -> None:
    stop = time.monotonic() + SECONDS / len(KINDS)
    tried = 0
    while True:
        tried += _search(kind, random.randrange(1 << 32) if SECONDS else 1, 500 if SECONDS else 60)
        if time.monotonic() >= stop:
            break
    if SECONDS:
        print(f"{kind}: {tried} inputs in {SECONDS / len(KINDS):.0f} s")


def _search(kind: str, start: int, examples: int) -> int:
    """Try some inputs. One that fails is shrunk by hypothesis, and kept."""
    count = 0
    failing: list[bytes] = []

    @seed(start)
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        print_blob=False,
    )  # fmt: skip
    @given(inputs(kind))
    def search(data: bytes) -> None:
        nonlocal count
        count += 1
        try:
            _try(kind, data)
        except BaseException:
            failing[:] = [data]
            raise

    try:
        search()
    except BaseException:
        if SECONDS and failing:
            (CORPUS / kind / f"found-{hashlib.sha256(failing[0]).hexdigest()[:16]}").write_bytes(failing[0])
        raise
    return count
