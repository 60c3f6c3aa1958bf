"""Shared bases: the published ranks, the mathematics against dense references, and folders that can be scored."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_folders import MakeAdapter
from torch import Tensor

from loraforge.allocate.budget import ceiling, parse_budget
from loraforge.cli import main
from loraforge.cts.accounting import Sharing, shared_rank, sharing_of
from loraforge.cts.diagonal import joint_diagonal
from loraforge.cts.export import compress_jointly
from loraforge.cts.factors import Stack, stack
from loraforge.cts.full import joint_full, norm_weights
from loraforge.cts.report import CtsReport, load_report, save_report
from loraforge.errors import BudgetError, InputError
from loraforge.fleet.peft_io import open_adapter, open_fleet
from loraforge.fleet.shapes import shape_fleet


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("qwen50", {12: 125, 8: 174, 4: 272, 2: 412}), ("llama35", {12: 113, 8: 165, 4: 273, 2: 432})],
)
def test_published_shared_ranks(name: str, ranks: dict[int, int]) -> None:
    fleet = shape_fleet(name)
    names = [module for _, module in fleet.names]
    sharing = sharing_of(list(zip(names, fleet.d_in.tolist(), fleet.d_out.tolist(), strict=True)))
    for divisor, rank in ranks.items():
        limit = ceiling(parse_budget(f"1/{divisor}"), fleet.rank, fleet.cost).params
        assert shared_rank(sharing, limit) == rank
        assert sharing.parameters(rank) <= limit < sharing.parameters(rank + 1)
    layers, width, cores = (36, 57344, 347) if name == "qwen50" else (32, 81920, 245)
    assert sharing.parameters(100) == layers * (width * 100 + cores * 100**2)


def test_accounting_of_variants_and_whole_bases() -> None:
    sharing = Sharing(("q", "v"), np.array([6, 6]), np.array([6, 2]), np.array([3, 2]))
    assert sharing.parameters(2) == 2 * 12 + 3 * 4 + 2 * 8 + 2 * 4
    assert sharing.parameters(2, "diagonal") == 2 * 12 + 3 * 2 + 2 * 8 + 2 * 2
    assert sharing.parameters(5) == 5 * 12 + 3 * 25 + 2 * 8 + 2 * 4  # v's basis is whole at 2
    assert shared_rank(sharing, 10**6) == 6
    with pytest.raises(BudgetError, match="a shared rank of 1 takes 25 parameters, the ceiling is 24"):
        shared_rank(sharing, 24)
    with pytest.raises(ValueError, match="q has two shapes"):
        sharing_of([("q", 3, 4), ("q", 4, 4)])


def updates(g: int = 2, n: int = 4, d_out: int = 9, d_in: int = 12, seed: int = 0) -> Stack:
    """Updates of ranks 1 to 3 and of norms that differ by orders."""
    generator = torch.Generator().manual_seed(seed)
    modules = []
    for _ in range(g):
        pairs = []
        for i in range(n):
            rank = 1 + i % 3
            a = torch.randn(rank, d_in, generator=generator, dtype=torch.float64)
            b = torch.randn(d_out, rank, generator=generator, dtype=torch.float64)
            pairs.append((a, b * 4.0**-i))
        modules.append(pairs)
    return stack(modules, torch.float64)


def dense(found: Stack) -> Tensor:
    return found.b @ found.a


def full_error(found: Stack, left: Tensor, right: Tensor, weight: Tensor | None = None) -> Tensor:
    """The objective of bases from dense updates."""
    whole = dense(found)
    fitted = left[:, None] @ (left.mT[:, None] @ whole @ right[:, None]) @ right.mT[:, None]
    each = (whole - fitted).square().sum(dim=(2, 3))
    return (each if weight is None else each * weight).sum(dim=1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("power", [False, True])
def test_full_against_dense_alternation(weighted: bool, power: bool) -> None:
    found = updates()
    weight = norm_weights(found) if weighted else torch.ones(2, 4, dtype=torch.float64)
    assert norm_weights(found) == pytest.approx(1 / dense(found).square().sum(dim=(2, 3)))
    iterations = 400 if power else 60
    bases = joint_full(found, 3, weighted=weighted, power=power, iterations=iterations)
    for basis in (bases.left, bases.right):
        torch.testing.assert_close(basis.mT @ basis, torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
    exact = full_error(found, bases.left, bases.right, weight)
    torch.testing.assert_close(bases.error, exact, rtol=1e-8, atol=1e-10)
    # a dense alternation from other starts ends no lower, bar another local optimum of one start
    ends = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        right = torch.linalg.qr(torch.randn(2, 12, 3, generator=generator, dtype=torch.float64))[0]
        scaled = dense(found) * weight.sqrt()[..., None, None]
        for _ in range(60):
            images = (scaled @ right[:, None]).permute(0, 2, 1, 3).flatten(2)
            left = torch.linalg.svd(images)[0][..., :3]
            images = (scaled.mT @ left[:, None]).permute(0, 2, 1, 3).flatten(2)
            right = torch.linalg.svd(images)[0][..., :3]
        ends.append(full_error(found, left, right, weight))
    assert (bases.error <= torch.stack(ends).amax(dim=0) * (1 + 1e-3)).all()


def test_more_iterations_and_ranks_keep_more() -> None:
    found = updates(seed=3)
    errors = [joint_full(found, 3, iterations=n, seeds=(101,)).error for n in (1, 2, 5, 30)]
    assert all((later <= earlier + 1e-12).all() for earlier, later in pairwise(errors))
    by_rank = [joint_full(found, r, iterations=60).error for r in (1, 3, 5, 9)]
    assert all((more < less).all() for less, more in pairwise(by_rank))
    assert by_rank[-1] == pytest.approx(0.0, abs=1e-10)  # U and, of 8 directions in all, V are whole


def test_the_better_start_wins_module_by_module() -> None:
    found = updates(g=8, seed=5)
    one, two = (joint_full(found, 2, iterations=2, seeds=(seed,)) for seed in (101, 202))
    both = joint_full(found, 2, iterations=2)
    assert set(both.seed.tolist()) == {101, 202}
    torch.testing.assert_close(both.error, torch.minimum(one.error, two.error))
    for g, seed in enumerate(both.seed.tolist()):
        assert torch.equal(both.left[g], (one if seed == 101 else two).left[g])


def test_raw_objective_serves_the_loud_and_weights_mend_that() -> None:
    found = updates(g=1, n=6, seed=2)

    def kept(weighted: bool) -> Tensor:
        bases = joint_full(found, 3, weighted=weighted)
        core = (bases.left.mT[:, None] @ found.b) @ (found.a @ bases.right[:, None])
        return core.square().sum(dim=(2, 3))[0] / found.squared_norms()[0]

    raw, weighted = kept(False), kept(True)
    assert raw[0] > 0.9
    assert raw.min() < weighted.min()
    assert raw.mean() < weighted.mean()


def test_zero_updates_do_no_harm() -> None:
    found = updates()
    silent = Stack(found.a, found.b * torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)[:, None, None])
    for weighted in (False, True):
        assert torch.isfinite(joint_full(silent, 3, weighted=weighted).error).all()
    assert torch.isfinite(joint_diagonal(silent, 3).error).all()


def test_diagonal_fits_what_is_diagonal_and_never_gets_worse() -> None:
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.randn(d, 3, generator=generator, dtype=torch.float64) for d in (9, 12))
    s = torch.rand(5, 3, generator=generator, dtype=torch.float64) + 0.5
    made = stack([[(v.mT, u * row) for row in s]], torch.float64)
    fit = joint_diagonal(made, 3, iterations=2000)
    assert float(fit.error[0]) < 1e-6 * float(made.squared_norms().sum())
    found = updates(seed=4)
    errors = [joint_diagonal(found, 4, iterations=n, seeds=(202,)).error for n in (1, 3, 10, 100)]
    assert all((later <= earlier * (1 + 1e-9)).all() for earlier, later in pairwise(errors))
    fit = joint_diagonal(found, 4)
    fitted = torch.einsum("gok,gnk,gik->gnoi", fit.left, fit.scales, fit.right)
    torch.testing.assert_close(fit.error, (dense(found) - fitted).square().sum(dim=(1, 2, 3)))


def test_fp32_agrees_with_fp64() -> None:
    found = updates()
    single = Stack(found.a.float(), found.b.float())
    one, two = joint_full(found, 3), joint_full(single, 3)
    assert two.left.dtype == torch.float32
    torch.testing.assert_close(one.error, two.error, rtol=1e-3, atol=1e-3)


@pytest.fixture
def fleet(tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    for index, (rank, targets) in enumerate(
        ((4, ("q_proj", "v_proj")), (8, ("q_proj",)), (2, ("q_proj", "v_proj")))
    ):
        make_adapter(tmp_path / "fleet" / f"a{index}", r=rank, seed=index, targets=targets, lora_alpha=3)
    return tmp_path / "fleet"


@pytest.mark.parametrize("variant", ["full", "weighted", "diagonal"])
def test_export_is_a_fleet_of_the_fit(tmp_path: Path, fleet: Path, variant: str) -> None:
    originals = open_fleet([fleet])
    report = compress_jointly(
        originals, "mine", parse_budget("1/2"), tmp_path / "out", variant=variant, precision="float64",
        dtype=torch.float32, iterations=200,
    )  # fmt: skip
    assert load_report(tmp_path / "out") == report
    assert report.spent <= report.ceiling
    assert report.rounding_error < 1e-6
    lost = dict.fromkeys(report.modules, 0.0)
    for original in originals:
        made = open_adapter(tmp_path / "out" / original.name)
        assert [m.name for m in made.modules] == [m.name for m in original.modules]
        for module, new in zip(original.modules, made.modules, strict=True):
            assert new.scale == 1.0
            a, b = original.factors(module)
            new_a, new_b = made.factors(new)
            whole = module.scale * (b.double() @ a.double())
            difference = float((whole - new_b.double() @ new_a.double()).square().sum())
            lost[module.name] += difference / (float(whole.square().sum()) if variant == "weighted" else 1.0)
    for name, module in report.modules.items():
        assert lost[name] == pytest.approx(module.error, rel=1e-3, abs=1e-6)


def test_command_line(tmp_path: Path, fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as caught:
        main(["cts", str(fleet), "--budget", "1/2", "-o", str(out), "--iterations", "5", "--steps", "power"])
    assert caught.value.code == 0
    report = load_report(out)
    assert (report.arm, report.budget, report.steps, report.iterations) == ("cts", "1/2", "power", 5)
    assert f"shared rank {report.rank}" in capsys.readouterr().err
    for arguments, message in (
        (
            ["--variant", "half"],
            "error: --variant: unknown variant 'half'; choose from full, weighted, diagonal",
        ),
        (["--precision", "int8"], "error: --precision: unknown precision 'int8'"),
        ([], f"error: {out}: "),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["cts", str(fleet), "--budget", "1/2", "-o", str(out), *arguments])
        assert caught.value.code != 0
        assert capsys.readouterr().err.splitlines()[-1].startswith(message)


def test_a_report_that_overspends_is_refused(tmp_path: Path, fleet: Path) -> None:
    report = compress_jointly(open_fleet([fleet]), "x", parse_budget("1/2"), tmp_path / "out", iterations=1)
    save_report(
        tmp_path / "copy", CtsReport.model_construct(**(dict(report) | {"spent": report.ceiling + 1}))
    )
    with pytest.raises(InputError, match="exceeds the ceiling"):
        load_report(tmp_path / "copy")


@pytest.mark.parametrize("wide", [False, True])
def test_few_updates_of_tall_modules(wide: bool) -> None:
    """Fewer images than rows take another way to the same vectors."""
    found = updates(g=2, n=2, d_out=40, d_in=30) if wide else updates(g=2, n=2, d_out=40, d_in=30).transposed
    bases = joint_full(found, 2, iterations=50)
    torch.testing.assert_close(bases.error, full_error(found, bases.left, bases.right), rtol=1e-8, atol=1e-10)
    whole = joint_full(found, 5, iterations=50)
    assert (whole.error < 1e-10).all()  # ranks 1 and 2: three directions hold both
    for basis in (whole.left, whole.right):
        eye = torch.eye(basis.shape[-1], dtype=torch.float64).expand(2, -1, -1)
        torch.testing.assert_close(basis.mT @ basis, eye)
