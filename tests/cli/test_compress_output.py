"""What ``compress`` says: of a run that it did not make, as JSON, and as a page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import MakeAdapter, write_mixed_fleet

from loraforge.activation.fisher import FisherMoments, core_keys, identity
from loraforge.activation.inputs import InputMoments
from loraforge.activation.moments import packed
from loraforge.activation.moments import write_moments as write_file
from loraforge.allocate.budget import parse_budget
from loraforge.cli import main
from loraforge.compress import compress
from loraforge.errors import BudgetError, InputError, OutputError, UsageError
from loraforge.export.manifest import load_manifest
from loraforge.export.options import LAYOUTS, parse_layouts, parse_policy
from loraforge.files import sha256_file
from loraforge.fleet.lock import save_lock
from loraforge.fleet.locking import make_lock
from loraforge.fleet.peft_io import open_fleet
from loraforge.preview import preview


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_fleet(tmp_path_factory.mktemp("data") / "fleet")


def loraforge(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.run(
        [sys.executable, "-m", "loraforge", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
    )  # fmt: skip


def code_of(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256_file(p) if p.is_file() else "" for p in folder.rglob("*")}


def make_moments(path: Path, fleet: Path) -> Path:
    """Diagonal second moments of every module of a fleet."""
    modules = {module.name: module.d_in for adapter in open_fleet([fleet]) for module in adapter.modules}
    tensors = {}
    for number, (name, d_in) in enumerate(modules.items()):
        row, column = torch.tril_indices(d_in, d_in)
        tensors[name] = torch.diag(1.0 + torch.arange(d_in) * (number + 1) / d_in)[row, column]
    inputs = {name: name for name in tensors}
    write_file(
        path, tensors, {"schema": InputMoments.schema, "base": "0" * 64, "tokens": 7, "inputs": inputs}
    )
    return path


def write_fisher(path: Path, fleet: Path) -> Path:
    """Second moments of core gradients of every module of a fleet; those of some modules are next to nothing."""
    tensors, adapters = {}, {}
    for adapter in open_fleet([fleet]):
        adapters[adapter.name] = identity(adapter)
        for number, module in enumerate(adapter.modules):
            matrix = torch.diag(1.0 + torch.arange(module.rank)) * (1e-9 if number % 3 == 1 else 1.0)
            tensors |= dict.fromkeys(core_keys(adapter.name, module.name), packed(matrix))
    write_file(
        path, tensors, {"schema": FisherMoments.schema, "base": "0" * 64, "tokens": 7, "adapters": adapters}
    )
    return path


@pytest.mark.parametrize(
    ("policy", "dtype", "layout"),
    [
        ("spectral", "bfloat16", "both"),
        ("adapter-relative", "source", "both"),
        ("uniform", "float32", "ragged"),
        ("activation-relative", "bfloat16", "padded"),
        ("fisher-nofloor", "bfloat16", "both"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_preview_is_what_the_run_does(
    fleet: Path, tmp_path: Path, policy: str, dtype: str, layout: str, cached: bool
) -> None:
    moments = None
    if policy.startswith("activation"):
        moments = make_moments(tmp_path / "moments", fleet)
    elif policy.startswith("fisher"):
        moments = write_fisher(tmp_path / "moments", fleet)
    rest: dict[str, Any] = {
        "cache": tmp_path / "cache",
        "policy": parse_policy(policy),
        "layouts": parse_layouts(layout),
        "dtype": dtype,
        "moments": moments,
    }
    if cached:
        compress([fleet], parse_budget("1/2"), tmp_path / "other", **rest)
    before = tree(tmp_path)
    planned = preview([fleet], parse_budget("1/4"), tmp_path / "out", **rest)
    assert tree(tmp_path) == before
    assert planned.estimate.missing == (0 if cached else 5)
    made = compress([fleet], parse_budget("1/4"), tmp_path / "out", **rest)
    assert planned.choice.allocation == made.choice.allocation
    sizes = {
        name: {layout: weights.bytes for layout, weights in entry.layouts.items()}
        for name, entry in made.manifest.adapters.items()
    }
    assert planned.bytes == sizes
    assert [adapter.weights.bytes for adapter in planned.fleet] == [
        entry.original_bytes for entry in made.manifest.adapters.values()
    ]


def test_a_preview_of_what_is_no_plain_lora(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    """Experts in stacks, biases and tensors under other names have sizes that are not those of their factors."""
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias"
    make_adapter(
        tmp_path / "fleet" / "biased",
        lora_bias=True,
        layers=(0,),
        targets=("q_proj",),
        extra={key: torch.ones(32)},
    )
    stack = "base_model.model.model.layers.0.mlp.experts"
    generator = torch.Generator().manual_seed(1)
    make_adapter(
        tmp_path / "fleet" / "experts", targets=("q_proj",), layers=(0,), target_parameters=["mlp.experts.down_proj"],
        extra={
            f"{stack}.lora_A.weight": torch.randn(3 * 4, 24, generator=generator),
            f"{stack}.lora_B.weight": torch.randn(16, 3 * 4, generator=generator),
        },
    )  # fmt: skip
    planned = preview([tmp_path / "fleet"], parse_budget("1/2"), tmp_path / "out", cache=None)
    made = compress([tmp_path / "fleet"], parse_budget("1/2"), tmp_path / "out", cache=tmp_path / "cache")
    for name, entry in made.manifest.adapters.items():
        assert planned.bytes[name] == {layout: weights.bytes for layout, weights in entry.layouts.items()}
        assert planned.choice.allocation.ranks[name] == {module: e.k for module, e in entry.modules.items()}


def test_the_estimate_says_what_it_rests_on(fleet: Path, tmp_path: Path) -> None:
    planned = preview([fleet], parse_budget("1/4"), tmp_path / "out", cache=tmp_path / "cache")
    estimate = planned.estimate
    assert (
        estimate.seconds.keys() == estimate.basis.keys() == {"verify", "hash", "factor", "allocate", "export"}
    )
    for stage in ("verify", "hash", "allocate"):
        assert estimate.basis[stage] == "measured"
        assert estimate.seconds[stage] == planned.seconds[stage]
    assert f"5 of 5 adapters at the pace of {estimate.adapter}, by rank^2" in estimate.basis["factor"]
    assert f"at the pace of {estimate.adapter}, by parameters" in estimate.basis["export"]
    assert estimate.total == sum(estimate.seconds.values()) > 0
    compress([fleet], parse_budget("1/2"), tmp_path / "out", cache=tmp_path / "cache")
    again = preview([fleet], parse_budget("1/4"), tmp_path / "new", cache=tmp_path / "cache")
    assert again.estimate.basis["factor"] == "all factors are cached"
    assert again.estimate.seconds["factor"] == again.seconds["cache"]


def test_a_preview_refuses_what_the_run_would(fleet: Path, tmp_path: Path, make_adapter: MakeAdapter) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").touch()
    cache = tmp_path / "cache"
    with pytest.raises(OutputError, match="not empty; pass --force"):
        preview([fleet], parse_budget("1/4"), full, cache=cache)
    with pytest.raises(OutputError, match="would replace"):
        preview([fleet], parse_budget("1/4"), fleet, cache=cache, force=True)
    with pytest.raises(BudgetError, match="below the rank floor"):
        preview([fleet], parse_budget(params=3), tmp_path / "out", cache=cache)
    with pytest.raises(UsageError, match="measures activations"):
        preview([fleet], parse_budget("1/4"), tmp_path / "out", cache=cache, policy="activation")
    bad = make_adapter(tmp_path / "bad", extra={"base_model.model.x.lora_A.weight": torch.ones(1, 1)})
    with pytest.raises(InputError):
        preview([bad], parse_budget("1/4"), tmp_path / "out", cache=cache)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "full"]


def test_an_output_in_a_read_only_folder_is_refused_before_the_work(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever runs this may write everywhere
    for out in (tmp_path / "out", tmp_path / "no" / "out"):
        for run in (preview, compress):
            with pytest.raises(OutputError, match="not writable"):
                run([fleet], parse_budget("1/4"), out, cache=tmp_path / "cache")
    assert not list(tmp_path.iterdir())


def test_dry_run_in_a_folder_that_stays_as_it_was(fleet: Path, tmp_path: Path) -> None:
    done = loraforge("compress", fleet, "--budget", "1/4", "--out", "out", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    planned = preview([fleet], parse_budget("1/4"), tmp_path / "out", cache=None)
    allocation = planned.choice.allocation
    for words in (
        f"-> {allocation.spent:,}",
        "bytes, ragged",
        "seconds, estimated",
        "at the pace of",
        "nothing was written",
    ):
        assert words in done.stdout
    for name, ranks in allocation.ranks.items():
        (row,) = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == [name]]
        assert row[1:6:2] == [str(min(ranks.values())), row[3], str(max(ranks.values()))]


@pytest.mark.parametrize("dry", [False, True])
def test_json_is_one_object_and_all_of_standard_output(fleet: Path, tmp_path: Path, dry: bool) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    done = loraforge(
        "compress", fleet, "--params", 2000, "--out", out, "--cache", cache, "--json", *["--dry-run"] * dry
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    told = json.loads(done.stdout)
    assert told["dry_run"] is dry
    assert ("spectra: 5/5" if dry else "export: 5/5") in done.stderr
    assert told["schema"] == "loraforge.compress/1"
    assert told["budget"] == {"kind": "params", "value": "2000", "params": 2000}
    if dry:
        assert not out.exists()
        assert not cache.exists()
        compress([fleet], parse_budget(params=2000), out, cache=cache)
    manifest = load_manifest(out)
    assert told["retained_energy"] == manifest.fleet.retained_energy
    assert told["parameters"]["after"] == manifest.fleet.spent == 2000 - told["parameters"]["slack"]
    assert told["adapters"].keys() == manifest.adapters.keys()
    for name, adapter in told["adapters"].items():
        entry = manifest.adapters[name]
        ranks = [module.k for module in entry.modules.values()]
        assert adapter["parameters"]["before"] == entry.original_parameters
        assert adapter["parameters"]["after"] == entry.compact_parameters
        assert adapter["bytes"]["before"] == entry.original_bytes
        assert adapter["bytes"]["after"] == {layout: entry.layouts[layout].bytes for layout in LAYOUTS}
        assert (adapter["ranks"]["least"], adapter["ranks"]["most"]) == (min(ranks), max(ranks))
    assert sum(adapter["budget_share"] for adapter in told["adapters"].values()) == pytest.approx(1)
    if dry:
        assert told["retained"] == {
            name: {module: e.k for module, e in entry.modules.items()}
            for name, entry in manifest.adapters.items()
        }
        assert told["estimate"]["total_s"] == pytest.approx(sum(told["estimate"]["seconds"].values()))
    else:
        assert told["manifest"] == {
            "path": str(out / "manifest.json"),
            "sha256": sha256_file(out / "manifest.json"),
        }
        worst = max(
            m.certificate.relative_error for e in manifest.adapters.values() for m in e.modules.values()
        )
        assert told["worst"]["relative_error"] == worst
        assert told["report"] is None


def test_an_error_with_json_is_still_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("compress", tmp_path / "no", "--budget", "1/2", "--out", tmp_path / "out", "--json") == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert (
        shown.err
        == f"error: {tmp_path}/no: folder not found; name a PEFT adapter folder or a folder of them\n"
    )


def test_report_beside_and_inside_the_output(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("compress", fleet, "--budget", "1/4", "--cache", tmp_path / "cache", "--out", tmp_path / "out")
    for number, report in enumerate((tmp_path / "new" / "report.html", tmp_path / "out" / "report.html")):
        assert code_of(*common, "--report", report, *["--force"] * number) == 0
        assert str(report) in capsys.readouterr().out
        text = report.read_text(encoding="utf-8")
        assert text.startswith("<!doctype html>")
        for name in load_manifest(tmp_path / "out").adapters:
            assert f"<bdi>{name}</bdi>" in text
        assert str(tmp_path) not in text  # no place on this machine
    assert code_of(*common, "--force", "--json", "--report", tmp_path / "r.html") == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(tmp_path / "r.html")


@pytest.mark.parametrize(
    ("report", "code", "message"),
    [
        ("out", 5, "out: is where the output goes; name a file in it, or beside it"),
        ("fleet/a/adapter_config.json", 5, "adapter_config.json: lies in {fleet}, which is in use here"),
        ("cache/report.html", 5, "report.html: lies in {cache}, which is in use here; choose another place"),
        ("folder", 5, "folder: is a folder; name a file in it"),
        ("out/manifest.json", 5, "is a place of the output's own files; give it another name"),
        ("out/ragged/a/adapter_config.json", 5, "is a place of the output's own files"),
        ("out/padded", 5, "is a place of the output's own files"),
        ("z" * 300, 5, "cannot be written (File name too long)"),
    ],
)
def test_a_report_in_the_way_is_refused_before_the_work(
    tmp_path: Path,
    make_adapter: MakeAdapter,
    capsys: pytest.CaptureFixture[str],
    report: str,
    code: int,
    message: str,
) -> None:
    make_adapter(tmp_path / "fleet" / "a")
    (tmp_path / "folder").mkdir()
    before = tree(tmp_path)
    arguments = ("--budget", "1/2", "--out", tmp_path / "out", "--cache", tmp_path / "cache")
    assert code_of("compress", tmp_path / "fleet", *arguments, "--report", tmp_path / report) == code
    told = capsys.readouterr().err
    assert message.format(fleet=tmp_path / "fleet", cache=tmp_path / "cache") in told
    assert told.count("\n") == 1
    assert tree(tmp_path) == before


def test_a_report_takes_the_place_of_no_file_that_a_lock_or_a_link_names(
    tmp_path: Path, make_adapter: MakeAdapter, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_adapter(tmp_path / "fleet" / "a") / "adapter_config.json"
    lock = tmp_path / "fleet.lock.json"
    save_lock(make_lock([tmp_path / "fleet"], lock, name="fleet"), lock)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a").symlink_to(config.parent)
    before = tree(tmp_path)
    arguments = ("--budget", "1/2", "--out", tmp_path / "out", "--no-cache", "--report", config)
    for source in (lock, tmp_path / "links"):
        assert code_of("compress", source, *arguments) == 5
        told = f"{config}: exists and is no page by its name; name a file that ends in .html\n"
        assert told in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_a_dry_run_writes_no_report(fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--budget", "1/2", "--out", tmp_path / "out", "--dry-run", "--report", tmp_path / "r.html")
    assert code_of("compress", fleet, *arguments) == 2
    assert capsys.readouterr().err == "error: --report: a dry run writes nothing; leave out one of the two\n"
