"""lm-eval on a small real model: arms merge exactly, records resume, and any working folder will do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_folders import MakeAdapter
from tiny_model import tiny_model, tiny_tokenizer, write_base

from loraforge.activation.inputs import collect_moments
from loraforge.allocate.allocation import AllocationFile, load_allocation, save_allocation
from loraforge.allocate.budget import parse_budget
from loraforge.cts.export import compress_jointly
from loraforge.errors import InputError, IntegrityError, UsageError
from loraforge.factor.fleet import factorise_fleet
from loraforge.fleet.lock import save_lock
from loraforge.fleet.locking import make_lock
from loraforge.fleet.peft_io import open_adapter
from loraforge.quality.arms import MergedModel, Update, arms_of, original_updates, truncated_updates
from loraforge.quality.evaluate import Settings, evaluate_fleet
from loraforge.quality.metrics import aggregate

TASK = "us_to_uk"


def _weights(model: object) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}  # type: ignore[attr-defined]


def test_merging_equals_peft_and_reset_restores_every_bit(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    from peft import PeftModel

    vocabulary = len(tiny_tokenizer())
    folder = make_adapter(tmp_path / "a", targets=("q_proj", "down_proj"))
    merged = MergedModel(tiny_model(vocabulary).to(torch.bfloat16))
    before = _weights(merged.model)
    merged.merge(original_updates(open_adapter(folder)))
    assert any(not torch.equal(before[name], tensor) for name, tensor in _weights(merged.model).items())
    merged.reset()
    assert all(torch.equal(before[name], tensor) for name, tensor in _weights(merged.model).items())

    exact = MergedModel(tiny_model(vocabulary))
    exact.merge(original_updates(open_adapter(folder)))
    reference = PeftModel.from_pretrained(tiny_model(vocabulary), folder)
    ids = torch.arange(20).reshape(2, 10)
    torch.testing.assert_close(exact.model(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-5)


def test_full_rank_truncation_is_the_original(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    adapter = open_adapter(make_adapter(tmp_path / "a"))
    (cached,) = factorise_fleet([adapter], tmp_path / "cache")
    whole = truncated_updates(adapter, cached, {m.name: m.rank for m in adapter.modules}, torch.float32)
    for name, update in original_updates(adapter).items():
        torch.testing.assert_close(
            whole[name].b @ whole[name].a, update.scale * update.b @ update.a, rtol=1e-4, atol=1e-6
        )
    with pytest.raises(InputError, match="no rank for this module"):
        truncated_updates(adapter, cached, {})


def test_a_module_that_does_not_fit_leaves_the_base_pristine() -> None:
    merged = MergedModel(tiny_model(len(tiny_tokenizer())))
    before = _weights(merged.model)
    good = Update(torch.ones(1, 32), torch.ones(32, 1), 1.0)
    for name, bad in (
        ("model.layers.9.self_attn.q_proj", good),
        ("model.layers.1.mlp.up_proj", good),
    ):
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            merged.merge({"model.layers.0.self_attn.q_proj": good, name: bad})
        assert all(torch.equal(before[key], tensor) for key, tensor in _weights(merged.model).items())


def test_arms_are_base_original_and_the_grid() -> None:
    assert [tuple(arm) for arm in arms_of(["uniform"], ["1/12", "1/4"])] == [
        ("base", "0"),
        ("original", "1"),
        ("uniform", "1/12"),
        ("uniform", "1/4"),
    ]


@pytest.fixture
def study(tmp_path: Path, make_adapter: MakeAdapter) -> tuple[Path, Settings]:
    """A locked adapter over a small base, its factors, and one allocation of rank 1."""
    folder = make_adapter(tmp_path / "fleet" / TASK, lora_alpha=64)
    (folder / "recipe.yaml").write_text(f"task: {TASK}\n")
    lock = tmp_path / "tiny.lock.json"
    save_lock(make_lock([folder], lock, name="tiny"), lock)
    adapter = open_adapter(folder)
    factorise_fleet([adapter], tmp_path / "cache")
    ranks = {module.name: 1 for module in adapter.modules}
    spent = sum(module.d_in + module.d_out for module in adapter.modules)
    allocation = {
        "schema": "loraforge.allocation/1",
        "fleet": "tiny",
        "policy": "uniform",
        "budget": {"kind": "fraction", "value": "1/4", "params": spent},
        "floor": "1",
        "spent": spent,
        "slack": 0,
        "optimality_gap": 0.0,
        "retained_energy": 0.5,
        "ranks": {TASK: ranks},
    }
    save_allocation(AllocationFile.model_validate(allocation), tmp_path / "ranks" / "uniform.json")
    settings = Settings(
        base=write_base(tmp_path / "base"),
        tasks=Path("config/tasks").resolve(),
        cache=tmp_path / "cache",
        allocations=tmp_path / "ranks",
        policies=("uniform",),
        budgets=("1/4",),
        limit=3,
        batch_size=2,
        device="cpu",
    )
    return lock, settings


def test_records_are_scored_by_lm_eval_and_resumed(
    study: tuple[Path, Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, settings = study
    monkeypatch.chdir(tmp_path)  # the task files name their data relative to the repository
    records = evaluate_fleet(lock, [TASK], settings)
    assert [(record["arm"], record["budget"]) for record in records] == [
        ("base", "0"),
        ("original", "1"),
        ("uniform", "1/4"),
    ]
    for record in records:
        assert (record["n"], len(record["stats"]), record["metric"]) == (3, 3, "exact_match")
        assert record["score"] == pytest.approx(aggregate("exact_match", record["stats"]))
    assert records[0]["adapter_sha256"] is None

    files = sorted((settings.cache / "quality").glob("*.json"))
    assert len(files) == 3
    marked = {**json.loads(files[0].read_text()), "seconds": 12345.0}
    files[0].write_text(json.dumps(marked))
    files[1].unlink()
    again = evaluate_fleet(lock, [TASK], settings)
    assert 12345.0 in [record["seconds"] for record in again]  # kept, not run again
    assert [record["stats"] for record in again] == [record["stats"] for record in records]
    assert sorted((settings.cache / "quality").glob("*.json")) == files


def test_policies_that_leave_the_same_ranks_are_scored_once(
    study: tuple[Path, Settings], tmp_path: Path
) -> None:
    lock, settings = study
    uniform = load_allocation(tmp_path / "ranks" / "uniform.json")
    save_allocation(uniform.model_copy(update={"policy": "spectral"}), tmp_path / "ranks" / "spectral.json")
    for lanes in (1, 2):
        both = replace(settings, policies=("uniform", "spectral"), lanes=lanes)
        records = evaluate_fleet(lock, [TASK], both)
        assert [record["arm"] for record in records] == ["base", "original", "uniform", "spectral"]
        assert records[2]["stats"] == records[3]["stats"]
        assert records[2]["seconds"] == records[3]["seconds"]
        assert [record["parameters"] for record in records] == [
            0,
            4 * uniform.spent,
            uniform.spent,
            uniform.spent,
        ]
        assert (
            len(list((settings.cache / "quality").glob("*.json"))) == 3 * lanes
        )  # lanes round in their own way


def test_a_split_is_scored_on_its_own_examples(study: tuple[Path, Settings]) -> None:
    lock, settings = study
    test = evaluate_fleet(lock, [TASK], settings)
    validation = evaluate_fleet(lock, [TASK], replace(settings, split="validation"))
    for one, other in zip(test, validation, strict=True):
        assert (one["split"], other["split"]) == ("test", "validation")
        assert one["task_sha256"] != other["task_sha256"]


def test_bad_requests_are_refused(study: tuple[Path, Settings], tmp_path: Path) -> None:
    lock, settings = study
    with pytest.raises(UsageError, match="nobody: no such adapter in the fleet"):
        evaluate_fleet(lock, ["nobody"], settings)
    (tmp_path / "ranks" / "uniform.json").unlink()
    with pytest.raises(InputError, match="no allocation of uniform at 1/4"):
        evaluate_fleet(lock, [TASK], settings)


def test_a_changed_adapter_is_refused(study: tuple[Path, Settings]) -> None:
    lock, settings = study
    config = lock.parent / "fleet" / TASK / "adapter_config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(IntegrityError, match="is not the locked file"):
        evaluate_fleet(lock, [TASK], settings)


def test_arms_by_activations_and_of_shared_bases(study: tuple[Path, Settings], tmp_path: Path) -> None:
    lock, settings = study
    moments = collect_moments(settings.base, ["Some text.", "More of it."], tmp_path / "m.safetensors")
    uniform = load_allocation(tmp_path / "ranks" / "uniform.json")
    save_allocation(
        uniform.model_copy(update={"policy": "activation-uniform"}), tmp_path / "ranks" / "activation.json"
    )
    fleet = [open_adapter(lock.parent / "fleet" / TASK)]
    for variant in ("full", "diagonal"):
        compress_jointly(
            fleet, "tiny", parse_budget("1/2"), tmp_path / variant, variant=variant, iterations=3
        )
    full = replace(
        settings,
        policies=("uniform", "activation-uniform"),
        moments=(moments.path,),
        expanded=(tmp_path / "full", tmp_path / "diagonal"),
    )
    records = evaluate_fleet(lock, [TASK], full)
    arms = [(record["arm"], record["budget"]) for record in records]
    assert arms[2:] == [
        ("uniform", "1/4"),
        ("activation-uniform", "1/4"),
        ("cts", "1/2"),
        ("cts-diagonal", "1/2"),
    ]
    with pytest.raises(UsageError, match="--moments: the activation-uniform policy measures activations"):
        evaluate_fleet(lock, [TASK], replace(full, moments=()))
    with pytest.raises(InputError, match=r"cts\.json"):
        evaluate_fleet(lock, [TASK], replace(full, expanded=(tmp_path / "ranks",)))
