"""Every bad input of ``loraforge compress``: its exit code, its one line, and nothing half-written left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraforge import progress
from loraforge.cli import main

MakeAdapter = Callable[..., Path]
Q = "base_model.model.model.layers.0.self_attn.q_proj"
WEIGHTS = "adapter_model.safetensors"


# A fork server that holds torch: every command is a fresh process, without two seconds of imports each.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["loraforge.compress"])


@dataclass(frozen=True)
class Done:
    returncode: int | None
    stdout: str
    stderr: str


def _child(arguments: list[str], stdout: str, stderr: str) -> None:
    for stream, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    progress.console.file = sys.stderr
    main(arguments)


def run(*arguments: object) -> Done:
    """Run one ``loraforge`` command in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "stdout"), Path(folder, "stderr")
        process = _processes.Process(target=_child, args=([*map(str, arguments)], *map(str, paths)))
        process.start()
        process.join(120)
        return Done(process.exitcode, *(path.read_text() for path in paths))


class Refusal:
    """Run ``compress`` into ``root/results/out`` and expect one error line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.parent = root / "results"
        self.parent.mkdir()
        self.out = self.parent / "out"

    def __call__(
        self,
        *arguments: object,
        code: int,
        message: str,
        out: Path | None = None,
        budget: tuple[str, ...] = ("--budget", "1/2"),
    ) -> None:
        """``message`` is the whole line after ``error: ``; ``{...}`` in it stands for a library's own words."""
        out = out or self.out
        before = sorted(out.parent.rglob("*")) if out.parent.is_dir() else None
        done = run("compress", *arguments, *budget, "--out", out, "--cache", self.root / "cache")
        assert done.returncode == code, done.stderr
        lines = done.stderr.splitlines()
        pattern = re.escape(f"error: {message}").replace(re.escape("{...}"), ".+")
        assert re.fullmatch(pattern, lines[-1]), lines[-1]
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        assert (sorted(out.parent.rglob("*")) if out.parent.is_dir() else None) == before


@pytest.fixture
def refused(tmp_path: Path) -> Refusal:
    return Refusal(tmp_path)


@pytest.fixture
def good(tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    return make_adapter(tmp_path / "fleet" / "good")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, **changes: torch.Tensor) -> None:
    """Replace tensors of the first q_proj: ``A=``, ``B=``."""
    tensors = load_file(folder / WEIGHTS)
    for side, tensor in changes.items():
        tensors[f"{Q}.lora_{side}.weight"] = tensor
    save_file(tensors, folder / WEIGHTS)


def test_missing_weights(good: Path, refused: Refusal) -> None:
    (good / WEIGHTS).unlink()
    refused(
        good, code=3, message=f"{good}/{WEIGHTS}: file not found; save the adapter with PEFT as safetensors"
    )


def test_missing_folder(tmp_path: Path, refused: Refusal) -> None:
    refused(
        tmp_path / "nowhere",
        code=3,
        message=f"{tmp_path}/nowhere: folder not found; name a PEFT adapter folder or a folder of them",
    )


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights(good: Path, refused: Refusal, kept: int) -> None:
    whole = (good / WEIGHTS).read_bytes()
    (good / WEIGHTS).write_bytes(whole[:kept])
    refused(
        good,
        code=3,
        message=f"{good}/{WEIGHTS}: not a whole safetensors file ({{...}}); download or save it again",
    )


def test_pickle_checkpoint_is_not_opened(good: Path, refused: Refusal, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    (good / WEIGHTS).unlink()
    torch.save({"weight": Bomb()}, good / "adapter_model.bin")
    refused(
        good,
        code=3,
        message=f"{good}/adapter_model.bin: is a pickle checkpoint, which can run code when opened; pass "
        "--allow-pickle to read its tensors and nothing else, or convert it to "
        "safetensors where you trust it: PeftModel.from_pretrained(base, folder).save_pretrained(folder, "
        "safe_serialization=True)",
    )
    assert not (tmp_path / "exploded").exists()


def test_mismatched_base_models(good: Path, refused: Refusal, make_adapter: MakeAdapter) -> None:
    other = make_adapter(good.parent / "other", base="another/base")
    refused(
        good.parent,
        code=3,
        message=f"{other}/adapter_config.json: base_model_name_or_path: base model is 'another/base', but {good} has "
        "'tiny/base'; compress adapters of one base model at a time",
    )


def test_config_without_r(good: Path, refused: Refusal) -> None:
    edit_config(good, r=...)
    refused(
        good,
        code=3,
        message=f"{good}/adapter_config.json: r: missing; state the adapter's rank as PEFT does",
    )


def test_config_that_is_not_json(good: Path, refused: Refusal) -> None:
    (good / "adapter_config.json").write_text('{"r": 4,\n')
    refused(good, code=3, message=f"{good}/adapter_config.json: not valid JSON at line 2: {{...}}")


def test_half_a_character_in_a_name(good: Path, refused: Refusal) -> None:
    edit_config(good, base_model_name_or_path="tiny/\ud800")
    refused(
        good,
        code=3,
        message=f"{good}/adapter_config.json: base_model_name_or_path: holds half a character (a lone surrogate); "
        "write that text anew",
    )


def test_a_budget_below_one_direction_a_module_is_said(good: Path, tmp_path: Path) -> None:
    for command in ("compress", "allocate"):
        arguments = (command, good, "--cache", tmp_path / "cache", "--out", tmp_path / command)
        done = run(*arguments, "--budget", "1/500")
        assert done.returncode == 0, done.stderr
        assert (
            "warning: --budget 1/500 of 896 parameters is 1 (0.20%), but one direction in each module is the least: "
            "up to 224 (25.00%) are kept\n"
        ) in done.stderr


def test_factors_that_disagree(good: Path, refused: Refusal) -> None:
    edit_tensors(good, B=torch.ones(32, 3))
    refused(
        good,
        code=3,
        message=f"{good}/{WEIGHTS}: {Q}.lora_B.weight: shapes of module model.layers.0.self_attn.q_proj disagree: "
        "lora_A is [4, 32], lora_B is [32, 3]; lora_A must be [r, d_in] and lora_B [d_out, r]",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["A", "B"])
def test_nan_and_infinity_are_named(good: Path, refused: Refusal, side: str, value: float) -> None:
    tensor = load_file(good / WEIGHTS)[f"{Q}.lora_{side}.weight"]
    tensor[1, 2] = value
    edit_tensors(good, **{side: tensor})
    refused(
        good,
        code=3,
        message=f"{good}/{WEIGHTS}: {Q}.lora_{side}.weight: holds NaN or infinite values; the training run diverged: "
        "retrain, or leave this adapter out",
    )


def test_zero_b_works(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter(tmp_path / "fleet" / "zero", zero_b=True)
    make_adapter(tmp_path / "fleet" / "live", seed=1)
    out = tmp_path / "out"
    done = run("compress", tmp_path / "fleet", "--budget", "1/2", "--out", out, "--cache", tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    for module in manifest["adapters"]["zero"]["modules"].values():
        assert module["certificate"] == {"action_error": 0.0, "relative_error": 0.0, "retained_energy": 1.0}
    for key, tensor in load_file(out / "ragged" / "zero" / WEIGHTS).items():
        assert torch.isfinite(tensor).all(), key
        assert "lora_B" not in key or not tensor.any()


def test_rank_above_the_dimensions(tmp_path: Path, refused: Refusal, make_adapter: MakeAdapter) -> None:
    wide = make_adapter(tmp_path / "wide", r=20)
    refused(
        wide,
        code=3,
        message=f"{wide}/{WEIGHTS}: {Q.replace('q_proj', 'v_proj')}.lora_A.weight: rank 20 of module "
        "model.layers.0.self_attn.v_proj exceeds min(d_in, d_out) = 16; train with a smaller r, or leave this "
        "adapter out",
    )


def test_unknown_module(good: Path, refused: Refusal) -> None:
    edit_config(good, target_modules=["v_proj"])
    refused(
        good,
        code=3,
        message=f"{good}/{WEIGHTS}: {Q}.lora_A.weight: unknown module: adapter_config.json does not target "
        "model.layers.0.self_attn.q_proj; make target_modules and the tensors agree",
    )


def test_unknown_tensor(tmp_path: Path, refused: Refusal, make_adapter: MakeAdapter) -> None:
    key = "base_model.model.model.norm.weight"
    folder = make_adapter(tmp_path / "odd", extra={key: torch.ones(32)})
    refused(
        folder,
        code=3,
        message=f"{folder}/{WEIGHTS}: {key}: unknown module: neither a LoRA factor nor a tensor that "
        "adapter_config.json says is saved; save the adapter with PEFT, or list the module in modules_to_save",
    )


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (
            ("--budget", "0"),
            "--budget: 0 is not above 0 and at most 1; write a fraction such as 1/12, or pass --params or --bytes",
        ),
        (
            ("--budget", "1.01"),
            "--budget: 1.01 is not above 0 and at most 1; write a fraction such as 1/12, or pass --params or --bytes",
        ),
        (("--budget", "half"), "--budget: 'half' is not a number; write a fraction such as 1/12 or 0.25"),
        (("--params", "0"), "--params: 0 is not a budget; pass a positive number"),
        (
            ("--params", "223"),
            "--params: 223 params is below the rank floor: rank 1 in all 4 modules takes 224; "
            "allow at least 224 params",
        ),
        (
            ("--bytes", "447"),
            "--bytes: 447 bytes is below the rank floor: rank 1 in all 4 modules takes 448; allow at least 448 bytes",
        ),
    ],
)
def test_budgets_that_are_none(good: Path, refused: Refusal, budget: tuple[str, ...], message: str) -> None:
    refused(good, code=6, message=message, budget=budget)


@pytest.mark.parametrize("budget", [(), ("--budget", "1/2", "--params", "500")])
def test_one_budget_is_needed(good: Path, refused: Refusal, budget: tuple[str, ...]) -> None:
    refused(
        good,
        code=2,
        message="one budget is needed; pass one of --budget, --params and --bytes",
        budget=budget,
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            ("--policy", "magic"),
            "--policy: unknown policy 'magic'; choose from uniform, spectral, spectral-nofloor",
        ),
        (("--layout", "round"), "--layout: unknown layout 'round'; choose from ragged, padded, both"),
        (
            ("--dtype", "int4"),
            "--dtype: unknown dtype 'int4'; choose from bfloat16, float16, float32, source",
        ),
    ],
)
def test_unknown_choices(good: Path, refused: Refusal, option: tuple[str, str], message: str) -> None:
    refused(good, *option, code=2, message=message)


def test_non_empty_output_needs_force(good: Path, refused: Refusal) -> None:
    refused.out.mkdir()
    (refused.out / "precious.txt").write_text("keep me")
    message = f"{refused.out}: exists and is not empty; pass --force to replace it"
    refused(good, code=5, message=message)
    assert not (refused.root / "cache").exists()  # refused before any work
    refused(good, code=5, message=message)
    forced = run(
        "compress",
        good,
        "--budget",
        "1/2",
        "--out",
        refused.out,
        "--cache",
        refused.root / "cache",
        "--force",
    )
    assert forced.returncode == 0, forced.stderr
    assert sorted(path.name for path in refused.out.iterdir()) == ["manifest.json", "padded", "ragged"]
    assert [path.name for path in refused.parent.iterdir()] == ["out"]


def test_a_failed_forced_run_keeps_the_old_output(good: Path, refused: Refusal) -> None:
    refused.out.mkdir()
    (refused.out / "precious.txt").write_text("keep me")
    edit_tensors(good, A=torch.full((4, 32), 1e6), B=torch.full((32, 4), 1e6))
    refused(
        good,
        "--force",
        "--dtype",
        "float16",
        code=3,
        message=f"{good}: model.layers.0.self_attn.q_proj: values up to {{...}} overflow float16; export with "
        "--dtype bfloat16 or float32",
    )
    assert (refused.out / "precious.txt").read_text() == "keep me"


def test_values_too_small_for_half_precision(good: Path, refused: Refusal) -> None:
    edit_tensors(good, A=torch.full((4, 32), 1e-9), B=torch.full((32, 4), 1e-9))
    refused(
        good,
        "--dtype",
        "float16",
        code=3,
        message=f"{good}: model.layers.0.self_attn.q_proj: float16 cannot hold these factors (action error {{...}}, "
        "largest value {...}); export with --dtype bfloat16 or float32; if it persists, delete the factor cache",
    )


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tiny tmpfs with the options given; skips where this process may not mount."""
    point = tmp_path / "mounted"
    mounted = False

    def do(options: str) -> Path:
        nonlocal mounted
        point.mkdir(exist_ok=True)
        if sys.platform != "linux" or os.geteuid() != 0:
            pytest.skip("only root on Linux may mount a tmpfs, and only a real one fills up")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"this container may not mount a tmpfs: {done.stderr.strip()}")
        mounted = True
        return point

    yield do
    if mounted:
        subprocess.run(["umount", str(point)], check=True)


def test_full_disk_under_the_output(good: Path, refused: Refusal, mount: Callable[[str], Path]) -> None:
    out = mount("size=8k") / "out"
    refused(
        good, code=5, message=f"{out}: no space left on the device; free some space and run again", out=out
    )


def test_full_disk_under_the_cache(good: Path, tmp_path: Path, mount: Callable[[str], Path]) -> None:
    cache = mount("size=4k") / "cache"
    done = run("compress", good, "--budget", "1/2", "--out", tmp_path / "out", "--cache", cache)
    assert done.returncode == 5, done.stderr
    assert "no space left on the device; free some space and run again" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_read_only_output(good: Path, refused: Refusal, mount: Callable[[str], Path], tmp_path: Path) -> None:
    if os.geteuid() == 0:  # root ignores permission bits
        folder = mount("size=64k,ro")
    else:
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o555)
    out = folder / "out"
    refused(
        good,
        code=5,
        message=f"{out}: not writable; choose another output",
        out=out,
    )
