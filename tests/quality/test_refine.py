"""Self-distillation brings truncated adapters back to their originals' answers, and leaves all else as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_folders import MakeAdapter
from tiny_model import PROMPTS

from loraforge.activation.answers import Answered
from loraforge.allocate.budget import parse_budget
from loraforge.cli import main
from loraforge.compress import compress
from loraforge.errors import InputError, IntegrityError, OutputError, UsageError
from loraforge.export.manifest import Manifest, load_manifest
from loraforge.fleet.peft_io import open_adapter, open_fleet
from loraforge.quality.arms import Update, original_updates
from loraforge.quality.evaluate import expanded_arm
from loraforge.refine.distillation import RefineSettings, distil
from loraforge.refine.fleet import refine_fleet
from loraforge.runtime.ranks import check_manifest, live_rank

SETTINGS = RefineSettings(steps=6, max_new_tokens=4, batch_size=2)


@pytest.fixture
def compressed(tmp_path: Path, fleet_folder: Path) -> Path:
    compress(
        [fleet_folder], parse_budget("1/4"), tmp_path / "small", cache=tmp_path / "cache", policy="spectral"
    )
    return tmp_path / "small"


def refined(tmp_path: Path, base: Path, out: str, **changed: object) -> Manifest:
    return refine_fleet(
        tmp_path / "small", open_fleet([tmp_path / "fleet"]), base, PROMPTS, tmp_path / out,
        cache=tmp_path / "cache", settings=replace(SETTINGS, **changed),
    )  # fmt: skip


def test_processes_refine_the_same(compressed: Path, base: Path, tmp_path: Path) -> None:
    one = refined(tmp_path, base, "one")
    (tmp_path / "cache" / "refined").rename(tmp_path / "aside")
    two = refine_fleet(
        compressed, open_fleet([tmp_path / "fleet"]), base, PROMPTS, tmp_path / "two",
        cache=tmp_path / "cache", jobs=2, settings=SETTINGS,
    )  # fmt: skip
    assert list(two.adapters) == list(one.adapters)
    for name, entry in two.adapters.items():
        for module, record in entry.modules.items():
            alone = one.adapters[name].modules[module]
            assert (record.path, record.k) == (alone.path, alone.k)
            off, wanted = record.certificate.relative_error, alone.certificate.relative_error
            assert off == pytest.approx(wanted, rel=0.05)


def test_the_divergence_falls(base: Path, make_adapter: MakeAdapter, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval().requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    original = original_updates(open_adapter(make_adapter(tmp_path / "a", r=4, decay=0.9)))
    truncated = {
        name: Update(update.a[:2], update.b[:, :2], update.scale) for name, update in original.items()
    }
    rows = [Answered((5, 6, 7), (8, 9)), Answered((10, 11), (14, 15, 16)), Answered((20,), (21,))]
    settings = RefineSettings(steps=40, lr=1e-2, batch_size=3)
    done = distil(model, original, truncated, rows, 0, settings)
    assert len(done.curve) == 40
    assert done.curve[-1] < 0.5 * done.curve[0]
    again = distil(model, original, truncated, rows, 0, settings)
    for name, update in done.updates.items():
        assert (update.a.shape, update.b.shape, update.scale) == ((2, 32), truncated[name].b.shape, 1.0)
        assert torch.equal(update.a, again.updates[name].a)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    # what is the original already has nothing to learn
    same = distil(model, original, original, rows, 0, replace(settings, steps=1))
    assert same.curve[0] == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(InputError, match="--lr: the divergence is not finite; lower it"):
        distil(model, original, truncated, rows, 0, replace(settings, lr=1e30))


def test_learning_begins_at_the_truncation_with_factors_of_equal_length(
    base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval().requires_grad_(False)
    original = original_updates(open_adapter(make_adapter(tmp_path / "a", r=4, decay=0.9)))
    truncated = {name: Update(u.a[:3], 50 * u.b[:, :3], u.scale) for name, u in original.items()}
    dead = next(iter(truncated.values()))
    dead.b[:, 2] = 0.0  # a direction that does nothing yet
    rows = [Answered((5, 6, 7), (8, 9))]
    still = distil(model, original, truncated, rows, 0, RefineSettings(steps=1, lr=0.0))
    for name, begun in still.updates.items():
        wanted = truncated[name].scale * truncated[name].b @ truncated[name].a
        torch.testing.assert_close(begun.b @ begun.a, wanted)
        left, right = begun.a.norm(dim=1), begun.b.norm(dim=0)
        live = right > 0
        assert live.sum() == (2 if truncated[name] is dead else 3)
        torch.testing.assert_close(left[live], right[live])
        assert torch.isfinite(begun.a).all()
    moved = distil(model, original, truncated, rows, 0, RefineSettings(steps=3, lr=1e-3))
    assert all(torch.isfinite(update.b @ update.a).all() for update in moved.updates.values())


def test_a_refined_fleet_has_the_form_of_the_compressed_one(
    compressed: Path, base: Path, tmp_path: Path
) -> None:
    before, after = load_manifest(compressed), refined(tmp_path, base, "out")
    assert load_manifest(tmp_path / "out") == after
    assert after.fleet == before.fleet.model_copy(update={"allocation_sha256": after.fleet.allocation_sha256})
    assert expanded_arm(tmp_path / "out") == ("spectral-refined", "1/4")
    with pytest.raises(InputError, match="is no refined fleet"):
        expanded_arm(compressed)
    for name, entry in after.adapters.items():
        for layout in after.fleet.layouts:
            folder = tmp_path / "out" / layout / name
            made = open_adapter(folder)
            assert check_manifest(folder, {m.name: live_rank(*made.factors(m)) for m in made.modules})
            old = open_adapter(compressed / layout / name)
            changed = [
                not torch.equal(made.factors(m)[1], old.factors(n)[1])
                for m, n in zip(made.modules, old.modules, strict=True)
            ]
            assert any(changed)
            for module in made.modules:
                stated = entry.modules[module.name]
                assert (stated.path, stated.k) == ("refined", before.adapters[name].modules[module.name].k)
        # what the certificate says of the distance, against dense matrices
        original = open_adapter(tmp_path / "fleet" / name)
        made = open_adapter(tmp_path / "out" / "ragged" / name)
        for first, second in zip(original.modules, made.modules, strict=True):
            wanted, got = (
                module.scale * (b.double() @ a.double())
                for module, (a, b) in ((first, original.factors(first)), (second, made.factors(second)))
            )
            share = float((got - wanted).norm() / wanted.norm())
            stated = entry.modules[first.name].certificate
            assert stated.relative_error == pytest.approx(share, abs=0.02)
            assert stated.action_error < 0.02


def test_runs_resume(compressed: Path, base: Path, tmp_path: Path) -> None:
    first = refined(tmp_path, base, "one")
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/refined").glob("*.safetensors")}
    assert len(parts) == 2
    second = refined(tmp_path, base, "two")
    assert second.adapters == first.adapters
    assert {path: path.stat().st_mtime_ns for path in parts} == parts
    other = refined(tmp_path, base, "three", seed=1, steps=5)
    assert other.adapters != first.adapters
    with pytest.raises(OutputError, match="exists and is not empty"):
        refined(tmp_path, base, "one")


def test_what_does_not_belong_together(
    compressed: Path, base: Path, tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    fleet = open_fleet([tmp_path / "fleet" / "a"])

    def run(originals: object, prompts: object = PROMPTS) -> None:
        refine_fleet(compressed, originals, base, prompts, tmp_path / "out", cache=tmp_path / "cache")  # type: ignore[arg-type]

    with pytest.raises(InputError, match="b: its original is not among the adapters given"):
        run(fleet)
    with pytest.raises(InputError, match="b: no prompts of this adapter"):
        run(open_fleet([tmp_path / "fleet"]), {"a": ["x"]})
    with pytest.raises(InputError, match="--prompts: the tokenizer finds no token in any prompt"):
        run(open_fleet([tmp_path / "fleet"]), {"a": [""], "b": ["x"]})
    make_adapter(tmp_path / "fleet" / "b", r=4, seed=2)
    with pytest.raises(IntegrityError, match="is not what the fleet was compressed from"):
        run(open_fleet([tmp_path / "fleet"]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lr", [-1e-3, float("inf"), float("nan")])
def test_a_learning_rate_is_finite(lr: float) -> None:
    with pytest.raises(UsageError, match="--lr: no learning rate; give a finite one"):
        replace(SETTINGS, lr=lr)


def test_command_line(
    compressed: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for name, texts in PROMPTS.items():
        (prompts / f"{name}.txt").write_text("\n".join(texts))
    with pytest.raises(SystemExit) as caught:
        main([
            "refine", str(compressed), "--adapters", str(tmp_path / "fleet"), "--base", str(base), "--prompts",
            str(prompts), "-o", str(tmp_path / "out"), "--cache", str(tmp_path / "cache"), "--steps", "2",
        ])  # fmt: skip
    assert not caught.value.code
    assert "2 adapters refined" in capsys.readouterr().err
    assert load_manifest(tmp_path / "out").fleet.policy == "spectral"
