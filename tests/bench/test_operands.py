"""Operands, checks, arms and journals on the CPU: layouts agree with the reference, and errors are caught."""

from __future__ import annotations

import errno
import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from loraforge.bench.arms import Ours, filled_plan
from loraforge.bench.cases import PROJECTIONS, Case, Projection, expand_ablation, layers, sweep
from loraforge.bench.check import errors, expand_reference, sampled_rows, shrink_reference
from loraforge.bench.journal import append, take_up
from loraforge.bench.kernels import Journal, describe, reference, uniform_ranks
from loraforge.bench.mix import layer_ranks
from loraforge.bench.native.sites import open_site, unpack
from loraforge.bench.operands import Operands, masters, scales
from loraforge.errors import InputError, LoraForgeError, MissingDependencyError, OutputError
from loraforge.ops import REFERENCE
from loraforge.ops import reference as oracle

TOY = Projection("toy", "qkv", 32, (16, 8, 8))
MIXED = [[7, 2, 0], [1, 3, 5], [4, 4, 4]]


def operands(phase: str = "decode", *, mixed: bool = False, capacity: int = 8) -> Operands:
    case = Case(TOY, phase, 12, 3, 7 if mixed else 5, capacity, "mix" if mixed else None)  # type: ignore[arg-type]
    drawn = masters(TOY, adapters=3, tokens=12, seed=3, device=torch.device("cpu"))
    return Operands(case, drawn, MIXED if mixed else uniform_ranks(case), 11)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_table_over_the_pools_gives_what_the_masters_give(mixed: bool) -> None:
    given = operands(mixed=mixed)
    rows = torch.arange(12)
    z = oracle.shrink(given.x, given.a_pool, given.table, given.token_slots, given.case.rank)
    want = shrink_reference(given, rows)
    torch.testing.assert_close(torch.where(given.live, z, 0.0), want)
    y = oracle.expand(want, given.b_compact, given.table, given.token_slots, given.base, TOY.slices)
    torch.testing.assert_close(y, expand_reference(given, want, rows))


@pytest.mark.parametrize("mixed", [False, True])
def test_an_engine_layout_of_z_and_back(mixed: bool) -> None:
    given = operands(mixed=mixed, capacity=16)
    packed = given.pack(given.z, fill=float("nan"))
    assert packed.shape == (12, 3 * 16)
    torch.testing.assert_close(given.unpack(packed), given.z)
    for token, slot in enumerate(given.token_slots.tolist()):
        width = given.slot_ranks[slot]
        assert torch.isfinite(packed[token, : 3 * width]).all()
        assert torch.isnan(packed[token, 3 * width :]).all()


def test_slices_shorter_than_their_slot_are_padded_with_zeros_in_the_pools() -> None:
    given = operands(mixed=True, capacity=16)
    assert not given.a_pool[0, 7 + 2 : 3 * 7].any()
    assert given.a_pool[0, 3 * 7 :].any(), "what another adapter left"
    assert not given.b_pool[0, 16:24, 2:7].any()
    assert given.b_pool[0, :, 7:].any()


def test_decode_is_shuffled_prefill_is_grouped_and_both_are_even() -> None:
    decode, prefill = operands("decode").token_slots, operands("prefill").token_slots
    assert prefill.tolist() == sorted(prefill.tolist())
    assert decode.tolist() != sorted(decode.tolist())
    assert torch.bincount(decode).tolist() == torch.bincount(prefill).tolist() == [4, 4, 4]


def test_scales_are_powers_of_two_and_never_one() -> None:
    for rank in (1, 3, 8, 64, 128):
        given = operands()
        given.ranks = [[rank] * 3] * 3
        for scale in scales(given.ranks):
            assert scale != 1.0
            assert float(torch.tensor(scale).log2()) % 1 == 0


def test_errors_catch_a_wrong_element_and_a_missing_one() -> None:
    want = torch.randn(64, 64, dtype=torch.float64)
    assert errors(want.bfloat16(), want).passed
    wrong = want.clone()
    wrong[3, 3] += 0.2
    assert errors(wrong, want).relative_l2 < 0.01
    assert not errors(wrong, want).passed
    wrong[3, 3] = torch.nan
    assert not errors(wrong, want).passed
    assert not errors(want * 1.02, want).passed


@pytest.mark.parametrize("op", ["shrink", "expand", "lora"])
@pytest.mark.parametrize("mixed", [False, True])
def test_our_arm_runs_the_ops_and_its_poison_shows_what_is_not_written(op: str, mixed: bool) -> None:
    given = operands(mixed=mixed)
    launch = Ours("reference", lambda op, case: REFERENCE).prepare(op, given)  # type: ignore[arg-type]
    rows = sampled_rows(given)
    want = reference(op, given, rows)  # type: ignore[arg-type]
    for _ in range(2):
        launch.run()
        assert errors(launch.output()[rows], want).passed
        launch.poison()
        assert not errors(launch.output()[rows], want).passed


def test_plans_of_the_arms_hold_every_token() -> None:
    plan = filled_plan(operands(), 4)
    assert int(plan.segments[: int(plan.count), 1].sum()) == 12


def test_a_journal_goes_on_where_it_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    cases = [Case(PROJECTIONS[0], "decode", tokens, 1, 1, 1) for tokens in (1, 2)]
    journal = Journal(path)
    for case in cases:
        journal.add(describe(case, "lora"))
    path.write_bytes(path.read_bytes()[:-9])
    again = Journal(path)
    assert again.has(describe(cases[0], "lora"))
    assert not again.has(describe(cases[1], "lora"))
    again.add(describe(cases[1], "lora"))
    assert [json.loads(line)["tokens"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_damaged_line_of_a_journal_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for damage in (b'{"a":1}\n{"b":\n{"c":3}\n', b'{"a":1}\n\xff\n'):
        path.write_bytes(damage)
        with pytest.raises(InputError, match=r"records.jsonl: line 2 is damaged .*choose another folder"):
            take_up(path)
        assert path.read_bytes() == damage


def test_a_journal_on_a_full_disk_says_so() -> None:
    with pytest.raises(OutputError, match=r"/dev/full: no space left on the device"):
        append(Path("/dev/full"), {"a": 1})


def test_a_torn_journal_that_cannot_be_mended_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"a":1}\n{"b"')

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match="no space left"):
            take_up(path)
    assert path.read_text() == '{"a":1}\n{"b"'
    assert take_up(path) == [{"a": 1}]
    assert path.read_text() == '{"a":1}\n'


def test_the_grids_are_those_of_the_protocol() -> None:
    assert len(list(expand_ablation())) == 256
    works = list(sweep())
    assert len({work.case.key for work in works}) == len(works)
    assert sum("lora" in work.ops for work in works) == 8 * 10 * 9
    assert all(work.case.adapters == min(8, work.case.tokens) for work in works)
    assert {layer.name for layer in layers({"qkv": 43, "o": 23, "gate_up": 15, "down": 28})} == {
        "rank8", "rank8_pool16", "rank8_pool64", "rank64", "spectral12",
    }  # fmt: skip


def test_the_mix_has_a_rank_for_every_adapter_and_slice() -> None:
    mix = layer_ranks()
    assert {name: (len(ranks), len(ranks[0])) for name, ranks in mix.items()} == {
        "qkv": (50, 3), "o": (50, 1), "gate_up": (50, 2), "down": (50, 1),
    }  # fmt: skip
    assert min(rank for rank in (min(mine) for mine in mix["qkv"])) == 0, "modules that an adapter lacks"
    assert min(min(mine) for mine in mix["down"]) >= 1


def test_absent_or_other_engines_give_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match="loraforge bench engines") as caught:
        open_site(tmp_path, "sglang-0.5.22", ["sglang.srt.environ"], {})
    assert str(tmp_path) in str(caught.value)
    site = tmp_path / "sglang-0.5.22"
    (site / "sglang").mkdir(parents=True)
    with pytest.raises(LoraForgeError, match=r"is not sglang 0\.5\.22"):
        open_site(tmp_path, "sglang-0.5.22", [], {})
    (site / "sglang-0.5.22.dist-info").mkdir()
    with pytest.raises(MissingDependencyError, match=r"cannot import sglang\.srt\.environ"):
        open_site(tmp_path, "sglang-0.5.22", ["sglang.srt.environ"], {})


def test_a_site_imports_modules_without_their_packages_and_leaves_no_trace(tmp_path: Path) -> None:
    wheel = tmp_path / "toyengine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toyengine/__init__.py", "raise RuntimeError('the serving stack')")
        archive.writestr(
            "toyengine/deep/kernel.py", "from toyengine.stack import scale\n\ndef run(x): return scale * x\n"
        )
        archive.writestr("toyengine/deep/other.so", b"")
        archive.writestr("toyengine-1.0.dist-info/METADATA", "Version: 1.0")
    unpack(wheel, tmp_path / "engines" / "toyengine-1.0", ("toyengine/deep/*.py",))
    assert not list((tmp_path / "engines").rglob("*.so"))
    site = open_site(
        tmp_path / "engines", "toyengine-1.0", ["toyengine.deep.kernel"], {"toyengine.stack": {"scale": 3}}
    )
    assert site["toyengine.deep.kernel"].run(2) == 6
    assert not [name for name in sys.modules if name.startswith("toyengine")]
