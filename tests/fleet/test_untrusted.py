"""What strangers write: each kept input of ``corpus`` gives its one error, cheaply, and nothing runs or leaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapter_folders import MakeAdapter, write_adapter
from safetensors.torch import load_file

from loraforge.allocate.budget import parse_budget
from loraforge.compress import compress
from loraforge.errors import InputError
from loraforge.export.portable import portable_name
from loraforge.fleet.lock import load_lock
from loraforge.fleet.options import ReadOptions
from loraforge.fleet.patterns import MAX_PATTERNS, matches
from loraforge.fleet.peft_config import read_config
from loraforge.fleet.peft_io import open_adapter
from loraforge.fleet.tensor_header import MAX_HEADER_BYTES, read_header
from loraforge.fleet.untrusted_json import MAX_BYTES, read_untrusted_json
from loraforge.fleet.untrusted_path import require_regular
from loraforge.fleet.weight_files import INDEX_NAME

CORPUS = Path(__file__).parent / "corpus"
PICKLE = ReadOptions(allow_pickle=True)
EXPECTED = {
    "headers/bytes_to_spare": "do not fill the 25 bytes after the header exactly",
    "headers/end_before_begin": "-24 bytes are stated for F32 [0]",
    "headers/extra_field": "a: not a whole safetensors file (an entry must have dtype, shape and data_offsets)",
    "headers/five_bytes": "the header is longer than the file",
    "headers/fraction": "shape must be at most 8 counts",
    "headers/gap": "do not fill the 24 bytes",
    "headers/infinite": "holds the number 1e999, which no double holds",
    "headers/length_of_all_ones": "the header is longer than the file",
    "headers/list": "the header is not a JSON object",
    "headers/long_integer": "not JSON that can be read",
    "headers/metadata_of_numbers": "__metadata__: not a whole safetensors file (the metadata are not texts)",
    "headers/negative": "shape must be at most 8 counts",
    "headers/nested": "not JSON that can be read",
    "headers/nested_and_closed": "is nested deeper than 32 levels",
    "headers/nine_dimensions": "shape must be at most 8 counts",
    "headers/not_a_number": "holds NaN, which is not JSON",
    "headers/not_utf8": "cannot be read ('utf-8' codec",
    "headers/overlap": "do not fill the 24 bytes",
    "headers/product_overflows_to_zero": "0 bytes are stated for F32 [4611686018427387904, 8]",
    "headers/surrogate": "holds half a character",
    "headers/tensor_twice": "a: not a whole safetensors file (header: is given twice in one object)",
    "headers/terabytes_claimed": "24 bytes are stated for F32 [1099511627776, 3]",
    "headers/truth_values": "shape must be at most 8 counts",
    "headers/unknown_dtype": "unknown dtype 'F33'",
    "headers/unprintable_name": "'a\\x1b[2J': not a whole safetensors file (a tensor's name is not printable",
    "configs/empty": "not valid JSON at line 1",
    "configs/huge_repeat": "repeats too often to be matched in bounded time",
    "configs/inner_key_twice": "a: is given twice in one object",
    "configs/key_twice": "r: is given twice in one object",
    "configs/list_of_kinds": "peft_type: is ['LORA']",
    "configs/long_integer": "not JSON that can be read",
    "configs/many_repetitions": "repeats too often to be matched in bounded time",
    "configs/minus_infinity": "holds -Infinity, which is not JSON",
    "configs/nan_alpha": "holds NaN, which is not JSON",
    "configs/nested": "not JSON that can be read",
    "configs/nested_and_closed": "is nested deeper than 32 levels",
    "configs/overflowing_alpha": "holds the number 1e400, which no double holds",
    "configs/pattern_of_repetitions": "repeats too often to be matched in bounded time",
    "configs/repeated_alternatives": "repeats too often to be matched in bounded time",
    "configs/repeated_repetition": "repeats too often to be matched in bounded time",
    "configs/saved_repetition": "repeats too often to be matched in bounded time",
    "configs/surrogate": "target_modules.0: holds half a character",
    "configs/truth_rank": "r: must be a positive integer, not True",
    "indexes/absolute": "'/etc/passwd' is not the name of a file here",
    "indexes/another_kind": "'adapter_config.json' is not the name of a file here",
    "indexes/backslashes": "is not the name of a file here",
    "indexes/control_characters": "is not the name of a file here",
    "indexes/itself_missing": "file not found, but the index names it",
    "indexes/key_twice": "a: is given twice in one object",
    "indexes/no_map": "weight_map: must map tensor names to file names",
    "indexes/numbers": "weight_map: must map tensor names to file names",
    "indexes/parent": "is not the name of a file here",
    "indexes/too_many": "names 1001 files, at most 1000 are read",
    "locks/absolute": "must be relative to the lock file",
    "locks/file_is_a_path": "must be one plain name, no path",
    "locks/file_is_the_folder": "must be one plain name, no path",
    "locks/hash_of_another_form": "adapters.0.files.0.sha256: not a fleet lock",
    "locks/key_twice": "schema: is given twice in one object",
    "locks/list": "not a fleet lock",
    "locks/nan": "holds NaN, which is not JSON",
    "locks/negative_size": "adapters.0.files.0.bytes: not a fleet lock",
    "locks/nested": "not JSON that can be read",
    "locks/null_byte": "must be one plain name, no path",
    "locks/parent": "must stay in the lock file's folder",
    "locks/parent_inside": "must stay in the lock file's folder",
}


def read_kept(kind: str, data: bytes, folder: Path) -> None:
    """Give ``data`` to the reader of its kind, the way a user's folder does."""
    if kind == "locks":
        path = folder / "x.lock.json"
        path.write_bytes(data)
        load_lock(path)
        return
    adapter = folder / "adapter"
    if not adapter.exists():
        write_adapter(adapter, layers=(0,))
    weights = adapter / "adapter_model.safetensors"
    if kind == "indexes":
        weights.unlink(missing_ok=True)
        (adapter / INDEX_NAME).write_bytes(data)
    else:
        (adapter / "adapter_config.json" if kind == "configs" else weights).write_bytes(data)
    open_adapter(adapter)


def test_every_kept_input_is_expected() -> None:
    kept = {
        f"{path.parent.name}/{path.name}" for path in CORPUS.glob("*/*") if not path.name.startswith("found")
    }
    assert kept == EXPECTED.keys()


@pytest.mark.parametrize("name", list(EXPECTED))
def test_kept_input_gives_one_error_cheaply(name: str, tmp_path: Path) -> None:
    path = CORPUS / name
    write_adapter(tmp_path / "adapter", layers=(0,))
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(InputError) as caught:
        read_kept(path.parent.name, path.read_bytes(), tmp_path)
    seconds, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert EXPECTED[name] in str(caught.value)
    assert str(caught.value).isprintable()
    assert str(tmp_path) in str(caught.value)
    assert seconds < 1
    assert peak < 4 << 20


def test_header_and_json_too_large_are_not_read(tmp_path: Path) -> None:
    header, text = tmp_path / "x.safetensors", tmp_path / "x.json"
    header.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{")
    text.write_bytes(b"[")
    os.truncate(header, 10 << 30)  # a hole
    os.truncate(text, 10 << 30)
    tracemalloc.start()
    with pytest.raises(InputError, match=f"the header has {MAX_HEADER_BYTES + 1} bytes"):
        read_header(header)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    with pytest.raises(InputError, match=f"is larger than {MAX_BYTES} bytes"):
        read_untrusted_json(text)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_header_agrees_with_the_library(tmp_path: Path) -> None:
    tensors = load_file(write_adapter(tmp_path / "a", dtype=torch.bfloat16) / "adapter_model.safetensors")
    entries = read_header(tmp_path / "a" / "adapter_model.safetensors")
    assert {name: entry.shape for name, entry in entries.items()} == {
        k: tuple(t.shape) for k, t in tensors.items()
    }
    assert {entry.dtype for entry in entries.values()} == {"BF16"}


def test_expressions_that_trainers_write_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    common = (
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|k_proj|down_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))"
    )
    for pattern in (
        common,
        r".*\.layers\.(1|2[0-9])\.(.*\.)?(q|v)_proj",
        r"^model\.layers\.\d+\.mlp\.up_proj$",
    ):
        matches(pattern, "model.layers.1.self_attn.q_proj", path, "target_modules")
    assert matches(common, "model.layers.11.mlp.down_proj", path, "target_modules")


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b", "(a|a)*b", "(a|aa)+b", "(a?a?)*b", "(a{1,9}){1,9}b", "a?" * 40 + "a" * 40, "(a|a)" * 40, "(.|a){40}b",
        ".*a.*a.*a.*a.*a.*b", "((a*)*)*b", "(?:(?=a+)a*)*b", "a{0,60000}" * 9,
    ],
)  # fmt: skip
def test_expressions_that_take_for_ever_are_not_tried(tmp_path: Path, pattern: str) -> None:
    started = time.perf_counter()
    with pytest.raises(
        InputError, match=r"target_modules: .* repeats too often to be matched in bounded time"
    ):
        matches(pattern, "a" * 60, tmp_path / "adapter_config.json", "target_modules")
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_links_and_pipes(tmp_path: Path, make_adapter: MakeAdapter, name: str) -> None:
    folder = make_adapter(tmp_path / "a")
    file, outside = folder / name, tmp_path / "elsewhere"
    file.rename(outside)
    file.symlink_to(outside)
    with pytest.raises(InputError, match=f"{name}: is a link that leads out of its folder"):
        open_adapter(folder)
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(InputError, match=f"{name}: cannot be read"):
        open_adapter(folder)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InputError, match=f"{name}: is not a regular file"):
        open_adapter(folder)
    file.unlink()
    outside.rename(folder / "kept")
    file.symlink_to("kept")
    open_adapter(folder)


def test_the_hub_cache_links_to_its_own_blobs(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    cache = tmp_path / "models--org--a"
    folder = make_adapter(cache / "snapshots" / "0123abcd")
    (cache / "blobs").mkdir()
    for path in list(folder.iterdir()):
        path.rename(cache / "blobs" / f"blob-{path.name}")
        path.symlink_to(f"../../blobs/blob-{path.name}")
    open_adapter(folder)
    (cache / "refs").write_text("x")
    (folder / "refs").symlink_to("../../refs")
    with pytest.raises(InputError, match="leads out of its folder"):
        require_regular(folder / "refs", folder)


class _Runs:
    """A pickle that writes a file when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.marker,)


def test_pickles_build_tensors_and_nothing_else(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    folder = make_adapter(tmp_path / "a")
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    pickle, marker = folder / "adapter_model.bin", tmp_path / "ran"

    def refused(value: object, why: str) -> None:
        torch.save(value, pickle)
        with pytest.raises(InputError, match=why):
            open_adapter(folder, options=PICKLE)
        assert not marker.exists()

    refused(tensors | {"x": _Runs(marker)}, "not a pickle of tensors alone")
    refused([1, 2], "not a table of tensors")
    refused(tensors | {"x": 3}, "not a table of tensors by name")
    refused({3: torch.ones(1)}, "not a table of tensors by name")
    refused({"x": torch.ones(1).expand(1 << 40)}, "x: claims more values than the file holds")
    refused({"x": torch.eye(3).to_sparse()}, "x: is a tensor of torch.float32, torch.sparse_coo")
    torch.save(tensors, pickle)
    open_adapter(folder, options=PICKLE)
    with zipfile.ZipFile(pickle) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(pickle, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(InputError, match="not an uncompressed archive"):
        open_adapter(folder, options=PICKLE)


RUN = """
import sys
folder, out = sys.argv[1:3]
seen = []
def hook(event, arguments):
    if event in ("import", "exec", "compile", "pickle.find_class", "subprocess.Popen", "os.system", "ctypes.dlopen"):
        text = " ".join(str(getattr(argument, "co_filename", argument)) for argument in arguments)
        if folder in text or "planted" in text:
            seen.append((event, text))
    if event == "open" and str(arguments[0]).startswith(folder):
        seen.append(("open", str(arguments[0]).rpartition("/")[2]))
sys.addaudithook(hook)
from loraforge.cli import main
try:
    main(["compress", folder, "--out", out, "--budget", "1/2", "--cache", out + ".cache"])
except SystemExit as stopped:
    assert not stopped.code
print(sorted(set(seen)), file=sys.stderr)
"""


def test_nothing_in_a_folder_is_run(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    planted = {"base_model_class": "Planted", "parent_library": "planted"}
    folder = make_adapter(tmp_path / "a", auto_mapping=planted)
    evil = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    for name in (
        "planted.py",
        "__init__.py",
        "sitecustomize.py",
        "conftest.py",
        "torch.py",
        "modeling_planted.py",
    ):
        (folder / name).write_text(evil)
    (folder / "adapter_model.bin").write_bytes(b"cposix\nsystem\n(S'touch x'\ntR.")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not (tmp_path / "ran").exists()
    opened = {("open", "adapter_config.json"), ("open", "adapter_model.safetensors")}
    assert done.stderr.splitlines()[-1] == str(sorted(opened))


@pytest.mark.parametrize("base", ["/home/someone/models/tiny", "C:\\Users\\someone\\tiny", "~/models/tiny"])
def test_exports_name_no_place(tmp_path: Path, make_adapter: MakeAdapter, base: str) -> None:
    folder = make_adapter(tmp_path / "fleet" / "a", base=base, corda_config={"cache_file": "/home/someone/c"})
    manifest = compress([tmp_path / "fleet"], parse_budget("1/2"), tmp_path / "out", cache=tmp_path / "cache")
    assert manifest.manifest.fleet.base_model == "tiny"
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) == 7
    for path in files:
        data = path.read_bytes()
        for trace in (str(tmp_path), str(folder), "someone", "/home", "Users"):
            assert trace.encode() not in data, path
    config = json.loads((tmp_path / "out" / "padded" / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"


def test_names_of_models_are_left_alone() -> None:
    for name in ("org/model", "model", "./model", "", "models/a/b"):
        assert portable_name(name) == name
    assert portable_name("/") == "/"


def test_a_configuration_of_a_million_patterns(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    folder = make_adapter(tmp_path / "a")
    path = folder / "adapter_config.json"
    many = {f"x{index}": 1 for index in range(MAX_PATTERNS + 1)}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rank_pattern": many}))
    with pytest.raises(InputError, match=r"rank_pattern: holds 4097 patterns, at most 4096 are read"):
        open_adapter(folder)


def test_configuration_alone_is_strict(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b'{"peft_type": "LORA", "r": 4, "bias": ["none"]}')
    with pytest.raises(InputError, match="bias: must be a string"):
        read_config(tmp_path)
