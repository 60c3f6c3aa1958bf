"""Core gradients against autograd, ordered factors against a dense optimum, and the chain from prompts to a fleet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_folders import MakeAdapter
from tiny_model import PROMPTS, tiny_tokenizer
from torch import Tensor

from loraforge.activation.answers import Answered, OpenModel, answer, find_prompts
from loraforge.activation.entries import order_fleet, require_moments
from loraforge.activation.fisher import FisherMoments, core_keys, damped, fisher_factors, orthonormal
from loraforge.activation.fisher_collection import (
    FisherSettings,
    answer_log_probabilities,
    backward_draws,
    collect_fisher,
    sample_cores,
    watched,
)
from loraforge.activation.inputs import collect_moments
from loraforge.activation.moments import load_moments
from loraforge.allocate.budget import parse_budget
from loraforge.allocate.policy import allocate, problem_of
from loraforge.allocate.spectral import spectral
from loraforge.cli import main
from loraforge.compress import compress
from loraforge.errors import InputError, IntegrityError, UsageError
from loraforge.export.manifest import load_manifest
from loraforge.fleet.peft_io import open_adapter, open_fleet
from loraforge.quality.arms import MergedModel, Update, original_updates

SETTINGS = FisherSettings(draws=2, max_new_tokens=4, batch_size=2)


@pytest.fixture
def fisher(base: Path, fleet_folder: Path, tmp_path: Path) -> FisherMoments:
    return collect_fisher(
        base, open_fleet([fleet_folder]), PROMPTS, tmp_path / "f.safetensors", cache=tmp_path / "cache",
        settings=SETTINGS,
    )  # fmt: skip


def test_processes_collect_the_same(
    fisher: FisherMoments, base: Path, fleet_folder: Path, tmp_path: Path
) -> None:
    fleet = open_fleet([fleet_folder])
    shared = collect_fisher(
        base,
        fleet,
        PROMPTS,
        tmp_path / "two.safetensors",
        cache=tmp_path / "other",
        jobs=2,
        settings=SETTINGS,
    )
    assert shared.tokens == fisher.tokens
    one, two = fisher.tensors(), shared.tensors()
    assert one.keys() == two.keys()
    for key, matrix in one.items():
        torch.testing.assert_close(two[key], matrix, rtol=0.05, atol=1e-3 * float(matrix.abs().max()))


def _psd(size: int, generator: torch.Generator, samples: int) -> Tensor:
    x = torch.randn(samples, size, generator=generator, dtype=torch.float64) * torch.logspace(0, 1.5, size)
    return x.mT @ x / samples


def _kronecker_norm(change: Tensor, q_b: Tensor, q_a: Tensor, p_out: Tensor, p_in: Tensor) -> float:
    """vec(core)^T (P_out (x) P_in / t) vec(core), built as the r^2 x r^2 matrix that the package never makes."""
    core = (q_b.mT @ change @ q_a).reshape(-1)
    return float(core @ torch.kron(p_out, p_in) @ core / p_out.trace())


@pytest.mark.parametrize(("d_in", "d_out", "rank"), [(20, 12, 5), (9, 14, 4), (7, 9, 7)])
@pytest.mark.parametrize("samples", [60, 3])
def test_ordered_factors_are_the_optimum_in_that_norm(d_in: int, d_out: int, rank: int, samples: int) -> None:
    generator = torch.Generator().manual_seed(d_in + samples)
    a = torch.randn(rank, d_in, generator=generator, dtype=torch.float64)
    b = torch.randn(d_out, rank, generator=generator, dtype=torch.float64)
    p_out, p_in = (_psd(rank, generator, samples) for _ in range(2))
    p_in *= p_out.trace() / p_in.trace()
    sigma, new_a, new_b = fisher_factors(a, b, 0.5, p_out, p_in, damping=0.2)
    update = 0.5 * b @ a
    torch.testing.assert_close(new_b @ new_a, update)
    torch.testing.assert_close(torch.linalg.vector_norm(new_a, dim=1), torch.linalg.vector_norm(new_b, dim=0))

    (q_b, _), (q_a, _) = orthonormal(b), orthonormal(a.mT)
    outer, inner = damped(p_out, 0.2), damped(p_in, 0.2)
    # dense reference: symmetric roots of another making, applied to the update itself
    roots = []
    for matrix in (outer, inner / outer.trace()):
        values, vectors = torch.linalg.eigh(matrix)
        roots.append(vectors * values.sqrt() @ vectors.mT)
    exact = torch.linalg.svdvals(roots[0] @ (q_b.mT @ update @ q_a) @ roots[1])
    torch.testing.assert_close(sigma, exact)
    for k in range(1, rank):
        lost = _kronecker_norm(update - new_b[:, :k] @ new_a[:k], q_b, q_a, outer, inner)
        assert lost == pytest.approx(float(exact[k:].square().sum()), rel=1e-8)
        # no other update of that rank does better: truncations of other orders, and random ones near the best
        u, s, v = torch.linalg.svd(update, full_matrices=False)
        assert lost <= _kronecker_norm(update - u[:, :k] * s[:k] @ v[:k], q_b, q_a, outer, inner) * (1 + 1e-9)
        for _ in range(5):
            other_a = (
                new_a[:k] + 0.05 * torch.randn(k, rank, generator=generator, dtype=torch.float64) @ q_a.mT
            )
            other = _kronecker_norm(update - new_b[:, :k] @ other_a, q_b, q_a, outer, inner)
            assert lost <= other * (1 + 1e-9)


def test_white_information_gives_the_plain_order() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 10, generator=generator), torch.randn(8, 4, generator=generator)
    white = torch.eye(4, dtype=torch.float64)
    sigma, new_a, new_b = fisher_factors(a, b, 2.0, white, white)
    u, exact, v = torch.linalg.svd(2.0 * b.double() @ a.double())
    torch.testing.assert_close(sigma, exact[:4] / 2)  # P_in is divided by the trace, 4
    torch.testing.assert_close(new_b[:, :2] @ new_a[:2], u[:, :2] * exact[:2] @ v[:2])


@pytest.mark.parametrize("silent", [True, False])
def test_degenerate_modules(silent: bool) -> None:
    """No update, factors without full rank, and no answer that depends on the module."""
    generator = torch.Generator().manual_seed(1)
    white = torch.eye(2, dtype=torch.float64) * (0.0 if silent else 1.0)
    row = torch.randn(1, 5, generator=generator)
    for a, b in ((torch.ones(2, 5), torch.zeros(4, 2)), (torch.cat((row, row)), torch.ones(4, 2))):
        sigma, new_a, new_b = fisher_factors(a, b, 1.0, white, white)
        assert torch.isfinite(new_a).all()
        torch.testing.assert_close(new_b @ new_a, (b @ a).double())
        assert not (silent and sigma.any())
        assert not new_b[:, 1:].abs().max() > 1e-7


def test_core_gradients_are_autograds(base: Path, make_adapter: MakeAdapter, tmp_path: Path) -> None:
    """Against derivatives with respect to a core inserted in the weights, row by row, in FP32 and without padding."""
    from torch.func import functional_call
    from transformers import AutoModelForCausalLM

    adapter = open_adapter(make_adapter(tmp_path / "a", targets=("v_proj", "down_proj")))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval().requires_grad_(False)
    MergedModel(model).merge(original_updates(adapter))
    rows = [Answered((5, 6, 7), (8, 9)), Answered((10, 11, 12, 13), (14, 15, 16))]
    draws: list[dict[str, Tensor]] = []
    with watched(model, adapter) as cores:
        for _ in backward_draws(
            model, rows, 0, FisherSettings(draws=2, temperature=2.0), torch.Generator().manual_seed(3)
        ):
            draws.append(dict(cores))
    assert not torch.equal(
        draws[0]["model.layers.0.self_attn.v_proj"], draws[1]["model.layers.0.self_attn.v_proj"]
    )

    # the same Gaussian vectors, and the softmax's covariance as a full matrix
    generator = torch.Generator().manual_seed(3)
    positions = sum(len(row.answer) for row in rows)
    noise = [torch.randn(positions, model.config.vocab_size, generator=generator) for _ in range(2)]
    start = 0
    for number, row in enumerate(rows):
        ids = torch.tensor([row.prompt + row.answer])
        here = slice(len(row.prompt) - 1, len(row.prompt) + len(row.answer) - 1)
        part = slice(start, start + len(row.answer))
        start += len(row.answer)
        for module in adapter.modules:
            a, b = adapter.factors(module)
            (q_b, _), (q_a, _) = orthonormal(b), orthonormal(a.mT)
            weight = model.get_submodule(module.name).weight.detach()
            core = torch.zeros(module.rank, module.rank, requires_grad=True)
            changed = weight + q_b.float() @ core @ q_a.float().mT
            logits = functional_call(model, {f"{module.name}.weight": changed}, (ids,)).logits[0, here]
            root = (logits.detach() / 2.0).softmax(-1).sqrt()
            for draw in range(2):
                pairs = zip(root, noise[draw][part], strict=True)
                vectors = torch.stack([(torch.diag(q) - torch.outer(q**2, q)) @ e for q, e in pairs])
                (wanted,) = torch.autograd.grad((logits * vectors).sum(), core, retain_graph=True)
                torch.testing.assert_close(draws[draw][module.name][number], wanted, rtol=2e-3, atol=2e-5)


def test_divergence_is_predicted(base: Path, make_adapter: MakeAdapter, tmp_path: Path) -> None:
    """Half the Fisher norm of a small change of one core is the divergence that it causes."""
    from transformers import AutoModelForCausalLM

    adapter = open_adapter(make_adapter(tmp_path / "a", r=4, targets=("o_proj",), layers=(1,)))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval().requires_grad_(False)
    merged = MergedModel(model)
    merged.merge(original_updates(adapter))
    rows = [Answered((5, 6, 7), (8, 9)), Answered((10, 11), (14, 15, 16))]
    settings = FisherSettings(draws=400, batch_size=2, temperature=1.0)
    [(name, (p_out, p_in))] = sample_cores(model, adapter, rows, 0, settings).items()
    assert float(p_out.trace()) == pytest.approx(float(p_in.trace()))

    def answers() -> Tensor:
        return torch.cat([
            model(torch.tensor([row.prompt + row.answer])).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
            for row in rows
        ])  # fmt: skip

    a, b = adapter.factors(adapter.modules[0])
    (q_b, _), (q_a, _) = orthonormal(b), orthonormal(a.mT)
    weight = model.get_submodule(name).weight
    own, pristine = answers(), weight.clone()
    # over all directions of the core the Kronecker product has the trace of the whole
    total = 0.0
    for i in range(4):
        for j in range(4):
            weight.copy_(pristine + 0.02 * torch.outer(q_b[:, i], q_a[:, j]).float())
            total += float((own.exp() * (own - answers())).sum()) / len(rows) / 0.02**2
    assert 0.5 * float(p_out.trace()) == pytest.approx(total, rel=0.15)


def test_expected_divergences_are_calibrated(
    base: Path, fleet_folder: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    """What the spectra expect of a truncation to the share that was measured is what happens, adapter by adapter."""
    settings = replace(SETTINGS, shares=(0.5,))
    fleet = open_fleet([fleet_folder])
    fisher = collect_fisher(
        base, fleet, PROMPTS, tmp_path / "half.safetensors", cache=tmp_path / "c", settings=settings
    )
    model = OpenModel(base, "cpu")
    for adapter, entry in zip(fleet, order_fleet(fleet, tmp_path / "c", fisher), strict=True):
        whole = sum(module.rank * (module.d_in + module.d_out) for module in adapter.modules)
        problem = problem_of([entry])
        k = spectral(problem, whole // 2, np.zeros_like(problem.rank)).k
        expected = (problem.energy(problem.rank) - problem.energy(k)) / 2
        model.merged.merge(original_updates(adapter))
        answered = answer(model.causal, model.tokenizer, PROMPTS[adapter.name], model.pad, settings)
        own = answer_log_probabilities(model, answered, settings)
        model.merged.merge({
            module.name: Update(*entry.factors(module.name, kept), 1.0)
            for module, kept in zip(adapter.modules, k.tolist(), strict=True)
        })  # fmt: skip
        other = answer_log_probabilities(model, answered, settings)
        model.merged.reset()
        happened = sum(
            float((mine.exp() * (mine - theirs)).sum()) for mine, theirs in zip(own, other, strict=True)
        )
        assert happened / len(answered) == pytest.approx(expected, rel=0.05)
        assert expected > 1e-4


def test_answers_end_where_they_should(base: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
    tokenizer = tiny_tokenizer()
    together = answer(model, tokenizer, ["longer text", "ab", "c"], tokenizer.eos_token_id, SETTINGS)
    assert [len(row.prompt) for row in together] == [1, 2, 11]
    for row in together:
        assert 1 <= len(row.answer) <= SETTINGS.max_new_tokens
        assert tokenizer.eos_token_id not in row.answer[:-1]
    short = answer(model, tokenizer, ["longer text"], 0, replace(SETTINGS, max_tokens=4))
    assert short[0].prompt == together[2].prompt[-4:]
    tokenizer.eos_token = None  # then an answer is as long as it may be
    endless = answer(model, tokenizer, ["longer text", "ab", "c"], 0, SETTINGS)
    assert [len(row.answer) for row in endless] == 3 * [SETTINGS.max_new_tokens]


def test_collection_resumes_and_is_deterministic(
    base: Path, fleet_folder: Path, fisher: FisherMoments, tmp_path: Path
) -> None:
    fleet = open_fleet([fleet_folder])
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/fisher").iterdir()}
    assert len(parts) == 2

    def again(out: str, cache: str, **changed: object) -> FisherMoments:
        return collect_fisher(
            base,
            fleet,
            PROMPTS,
            tmp_path / out,
            cache=tmp_path / cache,
            settings=replace(SETTINGS, **changed),
        )

    assert again("2", "cache").sha256 == fisher.sha256
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/fisher").iterdir()} == parts
    assert again("3", "other").sha256 == fisher.sha256
    damaged = next(iter(parts))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert again("4", "cache").sha256 == fisher.sha256
    assert again("5", "cache", seed=1).sha256 != fisher.sha256
    for adapter in fleet:
        for module in adapter.modules:
            p_out, p_in = (
                fisher.symmetric(key, module.rank, module=key) for key in core_keys(adapter.name, module.name)
            )
            for matrix in (p_out, p_in):
                assert float(torch.linalg.eigvalsh(matrix)[0]) > -1e-6 * float(matrix.trace())
            assert float(p_out.trace()) == pytest.approx(float(p_in.trace()), rel=1e-5)
            assert float(p_out.trace()) > 0


def test_a_file_is_checked(fisher: FisherMoments, fleet_folder: Path, make_adapter: MakeAdapter) -> None:
    assert load_moments(fisher.path) == fisher
    fleet = open_fleet([fleet_folder])
    make_adapter(fleet_folder / "c", seed=2)
    with pytest.raises(InputError, match=r"c: no moments of this adapter; collect it again"):
        order_fleet(open_fleet([fleet_folder]), fleet_folder.parent / "cache", fisher)
    make_adapter(fleet_folder / "b", r=4, seed=3)
    with pytest.raises(IntegrityError, match="b: its moments were collected with other weights or scales"):
        order_fleet(open_fleet([fleet_folder / "b"]), fleet_folder.parent / "cache", fisher)
    raw = bytearray(fisher.path.read_bytes())
    raw[-1] ^= 1
    fisher.path.write_bytes(raw)
    with pytest.raises(IntegrityError, match="not those that were written"):
        load_moments(fisher.path)
    assert [adapter.name for adapter in fleet] == sorted(fisher.adapters)


@pytest.mark.parametrize("cached", [True, False])
def test_compress_by_fisher(tmp_path: Path, fleet_folder: Path, fisher: FisherMoments, cached: bool) -> None:
    out = tmp_path / "out"
    done = compress(
        [fleet_folder], parse_budget("1/2"), out, cache=tmp_path / "cache" if cached else None,
        policy="fisher", moments=fisher.path, dtype="float32",
    )  # fmt: skip
    assert load_manifest(out / "manifest.json") == done.manifest
    for original in open_fleet([fleet_folder]):
        made = open_adapter(out / "ragged" / original.name)
        for module, new in zip(original.modules, made.modules, strict=True):
            entry = done.manifest.adapters[original.name].modules[module.name]
            assert entry.path == "fisher"
            assert entry.certificate.action_error < 1e-4
            _, best_a, best_b = fisher.ordered(original, module, *original.factors(module))
            new_a, new_b = made.factors(new)
            torch.testing.assert_close(
                new_b @ new_a, (best_b[:, : new.rank] @ best_a[: new.rank]).float(), rtol=1e-4, atol=1e-5
            )


def test_ranks_minimise_the_lost_divergence(
    tmp_path: Path, fleet_folder: Path, fisher: FisherMoments
) -> None:
    problem = problem_of(order_fleet(open_fleet([fleet_folder]), tmp_path / "cache", fisher))
    by_fisher, by_uniform = (
        allocate(problem, policy, parse_budget("1/4")) for policy in ("fisher", "fisher-uniform")
    )
    assert by_fisher.spent <= by_fisher.ceiling.params
    assert problem.energy(by_fisher.k) >= problem.energy(by_uniform.k)


def test_command_lines(
    tmp_path: Path, fleet_folder: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, file, cache = tmp_path / "prompts", tmp_path / "m.safetensors", tmp_path / "cache"
    (prompts / "b").mkdir(parents=True)
    (prompts / "a.txt").write_text("\n".join(PROMPTS["a"]))

    def run(*arguments: object) -> int:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        return int(caught.value.code or 0)

    collect = ("moments", base, "-o", file, "--cache", cache)
    whole = (*collect, "--adapters", fleet_folder, "--prompts", prompts, "--limit", 1, "--draws", 1)
    assert run(*whole) == 3
    assert "no prompts of b; write them to one of b.jsonl, b.txt, b/train.jsonl" in capsys.readouterr().err
    lines = [json.dumps({"prompt": text, "target": "never read"}) for text in PROMPTS["b"]]
    (prompts / "b" / "train.jsonl").write_text("\n".join(lines))
    assert find_prompts(prompts, "b", limit=1) == PROMPTS["b"][:1]
    with pytest.raises(InputError, match=r"b/validation\.jsonl"):
        find_prompts(prompts, "b", split="validation")
    assert run(*whole) == 0
    assert "of 2 answers, 2 adapters" in capsys.readouterr().err
    assert run(*collect, "--adapters", fleet_folder) == 2
    assert "--adapters: adapters answer prompts of their own" in capsys.readouterr().err
    assert run(*collect, "--prompts", prompts) == 2
    assert "nothing to collect from" in capsys.readouterr().err

    common = (fleet_folder, "--cache", cache)
    ranks = tmp_path / "ranks.json"
    assert (
        run("allocate", *common, "--budget", "1/2", "--policy", "fisher", "--moments", file, "-o", ranks) == 0
    )
    assert run("export", ranks, *common, "--out", tmp_path / "out", "--moments", file) == 0
    assert load_manifest(tmp_path / "out/manifest.json").fleet.policy == "fisher"


def test_each_policy_takes_moments_of_its_own_norm(base: Path, fisher: FisherMoments, tmp_path: Path) -> None:
    inputs = collect_moments(base, ["text"], tmp_path / "inputs.safetensors")
    require_moments("fisher", fisher.path)
    require_moments("activation", inputs.path)
    for policy, given in (("fisher", inputs.path), ("activation", fisher.path)):
        with pytest.raises(UsageError, match=f"--moments: the {policy} policy measures .* is for "):
            require_moments(policy, given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the fisher policy measures the Fisher information; collect"):
        require_moments("fisher", None)
