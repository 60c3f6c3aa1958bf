"""Moments against a plain sum, whitened factors against a dense SVD, and the chain from texts to a compressed fleet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapter_folders import MakeAdapter

from loraforge.activation.entries import order_fleet, require_moments
from loraforge.activation.inputs import InputMoments, collect_moments, read_texts
from loraforge.activation.moments import load_moments
from loraforge.activation.whitened import shrunk, whitened_factors
from loraforge.allocate.budget import parse_budget
from loraforge.allocate.policy import problem_of
from loraforge.cli import main
from loraforge.compress import compress
from loraforge.errors import InputError, IntegrityError, UsageError
from loraforge.export.manifest import load_manifest
from loraforge.fleet.peft_io import open_adapter, open_fleet

TEXTS = ["The first text.", "A second one, which is longer.", "3"]


@pytest.fixture
def moments(base: Path, tmp_path: Path) -> InputMoments:
    return collect_moments(base, TEXTS, tmp_path / "moments.safetensors", batch_size=2)


def test_moments_are_those_of_single_texts(base: Path, moments: InputMoments) -> None:
    """Batches are padded; their sums must be those of texts one by one, seen by hooks of another making."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    for name, d_in in (("model.layers.1.self_attn.v_proj", 32), ("model.layers.1.mlp.down_proj", 48)):
        seen: list[torch.Tensor] = []
        hook = model.get_submodule(name).register_forward_hook(
            lambda _, args, __, seen=seen: seen.append(args[0][0])
        )
        with torch.no_grad():
            for text in TEXTS:
                model(input_ids=torch.tensor([tokenizer(text)["input_ids"]]))
        hook.remove()
        rows = torch.cat(seen).double()
        rows *= d_in**0.5 / rows.norm(dim=1, keepdim=True)
        assert moments.tokens == len(rows) == sum(map(len, TEXTS))
        found = moments.second_moment(name, d_in)
        assert torch.equal(found, found.mT)
        assert float(found.trace()) == pytest.approx(d_in, rel=1e-4)
        torch.testing.assert_close(
            found, rows.mT @ rows / len(rows), rtol=0.02, atol=0.02
        )  # BF16, other batches


def test_projections_of_one_input_share_one_matrix(moments: InputMoments) -> None:
    attention = {moments.inputs[f"model.layers.0.self_attn.{kind}_proj"] for kind in "qkv"}
    assert len(attention) == 1
    assert moments.inputs["model.layers.0.mlp.gate_proj"] == moments.inputs["model.layers.0.mlp.up_proj"]
    assert moments.inputs["model.layers.1.self_attn.q_proj"] not in attention
    assert len(moments.inputs) == 14
    assert len(set(moments.inputs.values())) == 8
    assert not any("lm_head" in name for name in moments.inputs)


def test_a_file_of_moments_is_checked(base: Path, moments: InputMoments, tmp_path: Path) -> None:
    again = collect_moments(base, TEXTS, tmp_path / "again.safetensors", batch_size=2)
    assert again.sha256 == moments.sha256 == load_moments(moments.path).sha256
    with pytest.raises(InputError, match=r"lm_head: no moments of this module's inputs; collect"):
        moments.second_moment("lm_head", 32)
    with pytest.raises(InputError, match="are not those of 31 inputs"):
        moments.second_moment("model.layers.0.self_attn.q_proj", 31)
    raw = bytearray(moments.path.read_bytes())
    raw[-1] ^= 1
    moments.path.write_bytes(raw)
    with pytest.raises(IntegrityError, match="not those that were written"):
        load_moments(moments.path)
    moments.path.write_bytes(b"text")
    with pytest.raises(InputError, match="not a file of moments"):
        load_moments(moments.path)
    with pytest.raises(InputError, match="not a file of moments"):
        load_moments(tmp_path / "none")


def test_texts(tmp_path: Path) -> None:
    lines, plain = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text("".join(json.dumps({"prompt": f"p{i}", "target": "t"}) + "\n" for i in range(3)))
    plain.write_text("one\n\ntwo\n")
    assert read_texts([lines, plain], limit=2) == ["p0", "p1", "one", "two"]
    plain.write_text("\n")
    with pytest.raises(InputError, match=r"b\.txt: holds no text"):
        read_texts([plain])
    with pytest.raises(InputError, match="cannot be read"):
        read_texts([tmp_path / "none.txt"])


@pytest.mark.parametrize(("d_in", "d_out", "rank"), [(20, 12, 5), (12, 20, 5), (7, 9, 7)])
@pytest.mark.parametrize("samples", [200, 3])
def test_whitened_factors_are_the_optimum_in_that_norm(
    d_in: int, d_out: int, rank: int, samples: int
) -> None:
    generator = torch.Generator().manual_seed(d_in + samples)
    a = torch.randn(rank, d_in, generator=generator, dtype=torch.float64)
    b = torch.randn(d_out, rank, generator=generator, dtype=torch.float64)
    x = torch.randn(samples, d_in, generator=generator, dtype=torch.float64) * torch.logspace(0, 2, d_in)
    second = x.mT @ x / samples  # singular where samples are few
    s, new_a, new_b = whitened_factors(a, b, 0.5, second)
    update = 0.5 * b @ a
    torch.testing.assert_close(new_b @ new_a, update)
    outputs = x @ update.mT / samples**0.5  # its singular values are those of dW C^1/2
    exact = torch.linalg.svdvals(outputs)
    wanted = torch.zeros(rank, dtype=torch.float64)
    wanted[: min(rank, len(exact))] = exact[:rank]
    torch.testing.assert_close(s, wanted, rtol=1e-6, atol=1e-6 * float(s[0]))
    for k in range(1, rank):
        lost = torch.linalg.norm(outputs - x @ (new_b[:, :k] @ new_a[:k]).mT / samples**0.5)
        assert float(lost) == pytest.approx(
            float(torch.linalg.norm(wanted[k:])), rel=1e-5, abs=1e-5 * float(s[0])
        )
    lengths = torch.linalg.vector_norm(new_a, dim=1)
    torch.testing.assert_close(torch.linalg.vector_norm(new_b, dim=0), lengths)


def test_white_inputs_give_the_plain_order() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 10, generator=generator), torch.randn(8, 4, generator=generator)
    s, new_a, new_b = whitened_factors(a, b, 2.0, torch.eye(10, dtype=torch.float64))
    u, exact, v = torch.linalg.svd(2.0 * b.double() @ a.double())
    torch.testing.assert_close(s, exact[:4])
    torch.testing.assert_close(new_b[:, :2] @ new_a[:2], u[:, :2] * exact[:2] @ v[:2])


def test_zero_update() -> None:
    s, new_a, new_b = whitened_factors(
        torch.ones(2, 5), torch.zeros(4, 2), 1.0, torch.eye(5, dtype=torch.float64)
    )
    assert not s.any()
    assert not (new_b @ new_a).any()
    assert torch.isfinite(new_a).all()


def test_shrinkage_keeps_the_trace() -> None:
    second = torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64))
    assert shrunk(second, 0.5).tolist() == [[3.0, 0.0], [0.0, 1.0]]


def test_entries_are_made_once_per_moments(
    tmp_path: Path, make_adapter: MakeAdapter, base: Path, moments: InputMoments
) -> None:
    make_adapter(tmp_path / "fleet" / "a", targets=("q_proj", "down_proj"))
    make_adapter(tmp_path / "fleet" / "b", seed=1, dtype=torch.bfloat16)
    fleet = open_fleet([tmp_path / "fleet"])
    entries = order_fleet(fleet, tmp_path / "cache", moments)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/activation").iterdir()}
    assert [entry.adapter for entry in entries] == ["a", "b"]
    order_fleet(fleet, tmp_path / "cache", moments)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/activation").iterdir()} == files
    other = collect_moments(base, TEXTS[:1], tmp_path / "other.safetensors")
    order_fleet(fleet, tmp_path / "cache", other)
    assert len(list((tmp_path / "cache/activation").iterdir())) == 4
    problem = problem_of(entries)
    module = fleet[0].modules[0]
    a, b = fleet[0].factors(module)
    second = shrunk(moments.second_moment(module.name, module.d_in))
    expected = whitened_factors(a, b, module.scale, second)[0]
    assert problem.sigma[: module.rank] == pytest.approx(expected.numpy())


@pytest.mark.parametrize("cached", [True, False])
def test_compress_by_activations(
    tmp_path: Path, make_adapter: MakeAdapter, moments: InputMoments, cached: bool
) -> None:
    make_adapter(tmp_path / "fleet" / "a", r=8, targets=("q_proj", "down_proj"), decay=0.9)
    make_adapter(tmp_path / "fleet" / "b", r=4, seed=1)
    out = tmp_path / "out"
    done = compress(
        [tmp_path / "fleet"], parse_budget("1/2"), out, cache=tmp_path / "cache" if cached else None,
        policy="activation-relative", moments=moments.path, dtype="float32",
    )  # fmt: skip
    assert load_manifest(out / "manifest.json") == done.manifest
    for original in open_fleet([tmp_path / "fleet"]):
        made = open_adapter(out / "ragged" / original.name)
        for module, new in zip(original.modules, made.modules, strict=True):
            entry = done.manifest.adapters[original.name].modules[module.name]
            assert entry.path == "whitened"
            assert entry.certificate.action_error < 1e-4
            a, b = original.factors(module)
            second = shrunk(moments.second_moment(module.name, module.d_in))
            _, best_a, best_b = whitened_factors(a, b, module.scale, second)
            new_a, new_b = made.factors(new)
            torch.testing.assert_close(
                new_b @ new_a, (best_b[:, : new.rank] @ best_a[: new.rank]).float(), rtol=1e-4, atol=1e-5
            )


def test_command_lines(
    tmp_path: Path, make_adapter: MakeAdapter, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, file = tmp_path / "texts.txt", tmp_path / "m.safetensors"
    texts.write_text("\n".join(TEXTS))
    folder = make_adapter(tmp_path / "a")

    def run(*arguments: object) -> int:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        return int(caught.value.code or 0)

    assert run("moments", base, texts, "-o", file) == 0
    assert f"{sum(map(len, TEXTS))} tokens of 3 texts, 14 modules" in capsys.readouterr().err
    common = (folder, "--cache", tmp_path / "cache")
    ranks = tmp_path / "ranks.json"
    assert (
        run("allocate", *common, "--budget", "1/2", "--policy", "activation", "--moments", file, "-o", ranks)
        == 0
    )
    assert run("export", ranks, *common, "--out", tmp_path / "out", "--moments", file) == 0
    assert load_manifest(tmp_path / "out/manifest.json").fleet.policy == "activation"
    capsys.readouterr()
    assert run("export", ranks, *common, "--out", tmp_path / "more") == 2
    assert "--moments: the activation policy measures activations; collect them" in capsys.readouterr().err
    spectral = (*common, "--budget", "1/2", "--policy", "spectral")
    assert run("allocate", *spectral, "--moments", file, "-o", ranks) == 2
    assert "--moments: the spectral policy measures weights alone" in capsys.readouterr().err


def test_moments_are_needed_where_they_are_measured_by() -> None:
    require_moments("uniform", None)
    require_moments("activation-fair", "file")
    for policy, given in (("activation", None), ("spectral", "file")):
        with pytest.raises(UsageError, match="--moments"):
            require_moments(policy, given)  # type: ignore[arg-type]
