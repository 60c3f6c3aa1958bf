"""The Fisher information of adapters: each answers its own unlabelled prompts, and its own answers are differentiated.

For every answered prompt, Gaussian vectors with the covariance diag(p) - p p^T of the softmax's Fisher information are
put on the logits of the answer's positions and taken back through the model. What arrives at a module,
D = sum_t (Q_B^T g_t) (x_t^T Q_A), is a sample of its core's gradient whose second moment is the Fisher information of
the whole answer: exact over tokens, and without the rare large samples of labels drawn from a sure distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraforge.activation.fisher import FisherMoments, core_keys, identity, orthonormal
from loraforge.activation.inputs import read_texts
from loraforge.activation.moments import load_moments, packed, read_header, write_moments
from loraforge.digest import source_digest
from loraforge.errors import InputError, LoraForgeError
from loraforge.factor.fleet import hash_weights
from loraforge.files import canonical_json, sha256_text
from loraforge.fleet.base_model import tensors_sha256
from loraforge.fleet.offline import offline_imports
from loraforge.fleet.peft_io import Adapter
from loraforge.progress import progress
from loraforge.quality.arms import MergedModel, original_updates

_PLACES = ("{}.jsonl", "{}.txt", "{}/train.jsonl")  # of an adapter's prompts in their folder


@dataclass(frozen=True)
class FisherSettings:
    """How the Fisher information is sampled.

    Parameters
    ----------
    draws: Gaussian vectors an answer; each costs a backward pass.
    max_tokens: the last so many tokens of a prompt count. max_new_tokens: an answer ends there at the latest.
    seed: of the Gaussian vectors. batch_size: answers a pass.
    """

    draws: int = 4
    max_tokens: int = 512
    max_new_tokens: int = 96
    seed: int = 20261130
    batch_size: int = 16


DEFAULTS = FisherSettings()


@dataclass(frozen=True)
class Answered:
    """Token ids of a prompt, and of the answer that an adapter gave to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def find_prompts(folder: Path, adapter: str, *, limit: int | None = None) -> list[str]:
    """Prompts of ``adapter``, the first ``limit``: in NAME.jsonl, NAME.txt or NAME/train.jsonl of ``folder``.

    Raises InputError where none of these exists, or it holds no text.
    """
    places = [folder / place.format(adapter) for place in _PLACES]
    for path in places:
        if path.is_file():
            return read_texts([path], limit=limit)
    raise InputError(
        f"no prompts of {adapter}",
        path=folder,
        remedy=f"write them to one of {', '.join(path.relative_to(folder).as_posix() for path in places)}",
    )


def collect_fisher(
    base: Path,
    fleet: Sequence[Adapter],
    prompts: Mapping[str, Sequence[str]],
    out: Path,
    *,
    cache: Path,
    device: str = "cpu",
    settings: FisherSettings = DEFAULTS,
) -> FisherMoments:
    """Collect the Fisher information of every adapter of ``fleet`` and write it to ``out``.

    What an adapter gave is kept in ``cache`` by a name that hashes all that it depends on, so that an interrupted run
    resumes. Raises InputError for an adapter without prompts, that does not fit the base model, or whose modules
    are not linear maps of their own.
    """
    base_sha256 = tensors_sha256(base / "model.safetensors")
    hash_weights(fleet)
    for adapter in fleet:
        if not prompts.get(adapter.name):
            raise InputError("no prompts of this adapter", key=adapter.name, remedy="give it some")
    model: _Model | None = None
    parts: list[FisherMoments] = []
    with progress("fisher", len(fleet)) as ticker:
        for adapter in fleet:
            texts = prompts[adapter.name]
            path = (
                cache / "fisher" / f"{_part_key(adapter, base_sha256, texts, device, settings)}.safetensors"
            )
            part = _find(path)
            if part is None:
                model = model or _Model(base, device)
                part = _collect(model, adapter, texts, path, base_sha256, settings)
            parts.append(part)
            ticker.advance(f"{adapter.name} {part.tokens} tokens")
    return _join(out, parts, base_sha256)


class _Model:
    """The base model and its tokenizer, loaded once."""

    def __init__(self, base: Path, device: str) -> None:
        with offline_imports():
            from transformers import AutoModelForCausalLM, AutoTokenizer
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base)
        # BF16, as adapters are scored and served
        self.causal: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device).eval()
        self.causal.requires_grad_(False)
        self.merged = MergedModel(self.causal)

    @property
    def pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if pad is None else pad)


def _part_key(
    adapter: Adapter, base_sha256: str, texts: Sequence[str], device: str, settings: FisherSettings
) -> str:
    return sha256_text(
        canonical_json(
            {
                "adapter": identity(adapter),
                "base": base_sha256,
                "texts": list(texts),
                "device": device.partition(":")[0],
                "settings": asdict(settings),
                "source": source_digest("activation"),
            }
        )
    )


def _find(path: Path) -> FisherMoments | None:
    try:
        found = load_moments(path)
    except LoraForgeError:
        return None
    return found if isinstance(found, FisherMoments) else None


def _collect(
    model: _Model,
    adapter: Adapter,
    texts: Sequence[str],
    path: Path,
    base_sha256: str,
    settings: FisherSettings,
) -> FisherMoments:
    try:
        model.merged.merge(original_updates(adapter))
        answered = answer(model.causal, model.tokenizer, texts, model.pad, settings)
        cores = sample_cores(model.causal, adapter, answered, model.pad, settings)
    finally:
        model.merged.reset()
    tensors: dict[str, Tensor] = {}
    for module, (p_out, p_in) in cores.items():
        keys = core_keys(adapter.name, module)
        tensors |= dict(zip(keys, (packed(p_out), packed(p_in)), strict=True))
    tokens = sum(len(row.prompt) + len(row.answer) for row in answered)
    return _write(path, tensors, base_sha256, tokens, {adapter.name: identity(adapter)})


@torch.no_grad()
def answer(
    model: Any, tokenizer: Any, texts: Sequence[str], pad: int, settings: FisherSettings
) -> list[Answered]:
    """Greedy answers of ``model`` to ``texts``, the end token included, shortest prompt first."""
    encoded = sorted(
        (tokenizer(text, add_special_tokens=False)["input_ids"][-settings.max_tokens :] for text in texts),
        key=len,
    )
    encoded = [ids for ids in encoded if ids]
    end = tokenizer.eos_token_id
    found: list[Answered] = []
    for start in range(0, len(encoded), settings.batch_size):
        rows = encoded[start : start + settings.batch_size]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), pad)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for row, tokens in enumerate(rows):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            mask[row, width - len(tokens) :] = 1
        generated = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=settings.max_new_tokens,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=pad,
        )[:, width:].tolist()
        for tokens, new in zip(rows, generated, strict=True):
            stop = new.index(end) + 1 if end in new else len(new)
            found.append(Answered(tuple(tokens), tuple(new[:stop])))
    return found


def sample_cores(
    model: Any, adapter: Adapter, answered: Sequence[Answered], pad: int, settings: FisherSettings
) -> dict[str, tuple[Tensor, Tensor]]:
    """P_out and P_in, float64 [r, r], of every module of ``adapter``, which is merged into ``model``."""
    sums = {
        module.name: torch.zeros(2, module.rank, module.rank, dtype=torch.float64)
        for module in adapter.modules
    }
    generator = torch.Generator().manual_seed(settings.seed)
    samples = 0
    with watched(model, adapter) as cores:
        for start in range(0, len(answered), settings.batch_size):
            rows = answered[start : start + settings.batch_size]
            for _ in backward_draws(model, rows, pad, settings.draws, generator):
                for name, sample in cores.items():
                    exact = sample.double()
                    sums[name] += torch.stack(((exact @ exact.mT).sum(0), (exact.mT @ exact).sum(0))).cpu()
                samples += len(rows)
    return {name: (total[0] / samples, total[1] / samples) for name, total in sums.items()}


def backward_draws(
    model: Any, rows: Sequence[Answered], pad: int, draws: int, generator: torch.Generator
) -> Iterator[None]:
    """Run ``rows`` once forward and ``draws`` times backward, from Gaussian vectors on the answers' logits."""
    width = max(len(row.prompt) + len(row.answer) for row in rows)
    ids = torch.full((len(rows), width), pad)
    positions: list[int] = []
    for number, row in enumerate(rows):
        ids[number, : len(row.prompt) + len(row.answer)] = torch.tensor(row.prompt + row.answer)
        first = number * width + len(row.prompt) - 1
        positions += range(first, first + len(row.answer))
    # no mask: attention is causal, and no position that counts sees the padding behind it
    embedded = model.get_input_embeddings()(ids.to(model.device)).requires_grad_(True)
    hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state.flatten(0, 1)
    logits = model.get_output_embeddings()(hidden[torch.tensor(positions, device=hidden.device)])
    root = torch.softmax(logits.detach().float(), dim=-1).sqrt()
    for draw in range(draws):
        noise = torch.randn(root.shape, generator=generator).to(root.device)
        vector = root * (noise - root * (root * noise).sum(-1, keepdim=True))
        torch.autograd.grad(logits, embedded, vector.to(logits.dtype), retain_graph=draw + 1 < draws)
        yield


@contextmanager
def watched(model: Any, adapter: Adapter) -> Iterator[dict[str, Tensor]]:
    """A table that every backward pass fills with the gradients of the cores of ``adapter``: float32 [rows, r, r]."""
    cores: dict[str, Tensor] = {}

    def watch(name: str, q_a: Tensor, q_b: Tensor) -> Any:
        def forward(_: Any, args: tuple[Tensor], out: Tensor) -> None:
            inner = (args[0].detach() @ q_a).float()

            def backward(gradient: Tensor) -> None:
                cores[name] = (gradient @ q_b).float().mT @ inner

            out.register_hook(backward)  # type: ignore[no-untyped-call]

        return forward

    handles = []
    with adapter.reader() as reader:
        for module in adapter.modules:
            linear = model.get_submodule(module.name)
            a, b = reader.factors(module)
            q_a, q_b = (orthonormal(factor)[0].to(linear.weight) for factor in (a.mT, b))
            handles.append(linear.register_forward_hook(watch(module.name, q_a, q_b)))
    try:
        yield cores
    finally:
        for handle in handles:
            handle.remove()


def _join(out: Path, parts: Sequence[FisherMoments], base_sha256: str) -> FisherMoments:
    """One file of those of single adapters."""
    tensors: dict[str, Tensor] = {}
    adapters: dict[str, Any] = {}
    for part in parts:
        tensors |= part.tensors()
        adapters |= part.adapters
    return _write(out, tensors, base_sha256, sum(part.tokens for part in parts), adapters)


def _write(
    path: Path, tensors: Mapping[str, Tensor], base_sha256: str, tokens: int, adapters: Mapping[str, Any]
) -> FisherMoments:
    header = {
        "schema": FisherMoments.schema,
        "base": base_sha256,
        "tokens": tokens,
        "adapters": dict(adapters),
    }
    write_moments(path, tensors, header)
    return FisherMoments.of(path, read_header(path))
