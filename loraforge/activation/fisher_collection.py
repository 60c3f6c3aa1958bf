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

import numpy as np
import torch
from torch import Tensor

from loraforge.activation.answers import (
    Answered,
    AnswerSettings,
    OpenModel,
    answer,
    collate,
    log_probabilities,
    states_at,
)
from loraforge.activation.fisher import FisherMoments, core_keys, fisher_factors, identity, orthonormal
from loraforge.activation.moments import load_moments, packed, read_header, write_moments
from loraforge.allocate.problem import Problem
from loraforge.allocate.spectral import spectral
from loraforge.digest import source_digest
from loraforge.errors import InputError, LoraForgeError
from loraforge.factor.fleet import hash_weights
from loraforge.files import canonical_json, sha256_text
from loraforge.fleet.base_model import tensors_sha256
from loraforge.fleet.peft_io import Adapter
from loraforge.progress import progress
from loraforge.quality.arms import Update, original_updates
from loraforge.workers import each


@dataclass(frozen=True)
class FisherSettings(AnswerSettings):
    """How the Fisher information is sampled.

    Parameters
    ----------
    draws: Gaussian vectors an answer; each costs a backward pass.
    temperature: the softmax's. At 1 an answer that is nearly certain depends on nothing, and a truncation large enough
        to change it is not foreseen; as in distillation, a softened softmax tells what it was chosen from.
    shares: of its parameters, to which an adapter is truncated to compare what happens with what was expected.
    seed: of the Gaussian vectors.
    """

    draws: int = 4
    temperature: float = 3.0
    shares: tuple[float, ...] = (1 / 24, 1 / 12)
    seed: int = 20261130


_SOURCE = (
    *(f"activation/{name}.py" for name in ("answers", "fisher", "fisher_collection")),
    "quality/arms.py",
    "quality/decoding.py",
)
DEFAULTS = FisherSettings()


def collect_fisher(
    base: Path,
    fleet: Sequence[Adapter],
    prompts: Mapping[str, Sequence[str]],
    out: Path,
    *,
    cache: Path,
    device: str = "cpu",
    jobs: int = 1,
    settings: FisherSettings = DEFAULTS,
) -> FisherMoments:
    """Collect the Fisher information of every adapter of ``fleet`` and write it to ``out``.

    ``jobs``: processes, each with a model of its own, that share ``device``: one leaves a GPU idle between its small
    kernels. What an adapter gave is kept in ``cache`` by a name that hashes all that it depends on, so that an
    interrupted run resumes. Raises InputError for an adapter without prompts, that does not fit the base model, or
    whose modules are not linear maps of their own.
    """
    base_sha256 = tensors_sha256(base / "model.safetensors")
    hash_weights(fleet)
    for adapter in fleet:
        if not prompts.get(adapter.name):
            raise InputError("no prompts of this adapter", key=adapter.name, remedy="give it some")
    parts: dict[str, FisherMoments] = {}
    missing: dict[str, tuple[Any, ...]] = {}
    with progress("fisher", len(fleet)) as ticker:
        for adapter in fleet:
            texts = prompts[adapter.name]
            path = (
                cache / "fisher" / f"{_part_key(adapter, base_sha256, texts, device, settings)}.safetensors"
            )
            part = _find(path)
            if part is None:
                missing[adapter.name] = (base, device, adapter, texts, path, base_sha256, settings)
            else:
                parts[adapter.name] = part
                ticker.advance(f"{adapter.name} {part.tokens} tokens, as before")
        for name, path in each(_collect, missing, jobs):
            parts[name] = FisherMoments.of(path, read_header(path))
            ticker.advance(f"{name} {parts[name].tokens} tokens")
    return _join(out, [parts[adapter.name] for adapter in fleet], base_sha256)


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
                "source": source_digest(*_SOURCE),
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
    base: Path,
    device: str,
    adapter: Adapter,
    texts: Sequence[str],
    path: Path,
    base_sha256: str,
    settings: FisherSettings,
) -> Path:
    model = OpenModel.of(base, device)
    try:
        model.merged.merge(original_updates(adapter))
        answered = answer(model.causal, model.tokenizer, texts, model.pad, settings)
        cores = sample_cores(model.causal, adapter, answered, model.pad, settings)
        gain = calibration(model, adapter, cores, answered, settings)
    finally:
        model.merged.reset()
    tensors: dict[str, Tensor] = {}
    for module, pair in cores.items():
        for key, matrix in zip(core_keys(adapter.name, module), pair, strict=True):
            tensors[key] = packed(gain * matrix)
    tokens = sum(len(row.prompt) + len(row.answer) for row in answered)
    _write(path, tensors, base_sha256, tokens, {adapter.name: identity(adapter)})
    return path


def calibration(
    model: OpenModel,
    adapter: Adapter,
    cores: Mapping[str, tuple[Tensor, Tensor]],
    answered: Sequence[Answered],
    settings: FisherSettings,
) -> float:
    """Measured over expected divergence of truncations of ``adapter``: what its Fisher information is multiplied by.

    To second order alone some adapters look several times as robust as others that they are not. So each is truncated
    to ``settings.shares`` of its parameters in the order of ``cores``, and all that happens is divided by all that was
    expected: tiny divergences, which are mostly noise, do not count for much.
    Expects the adapter merged into ``model``; leaves a truncated one in it.
    """
    ordered: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    with adapter.reader() as reader:
        for module in adapter.modules:
            ordered[module.name] = fisher_factors(*reader.factors(module), module.scale, *cores[module.name])
    names = [(adapter.name, name) for name in ordered]
    rank, cost = np.array([(m.rank, m.d_in + m.d_out) for m in adapter.modules], dtype=np.int64).T
    problem = Problem(names, rank, cost, torch.cat([sigma for sigma, _, _ in ordered.values()]).numpy())
    own = answer_log_probabilities(model, answered, settings)
    expected = measured = 0.0
    for share in settings.shares:
        k = spectral(problem, int(share * problem.parameters(rank)), np.zeros_like(rank)).k
        expected += (problem.energy(rank) - problem.energy(k)) / 2
        model.merged.merge(
            {
                name: Update(a[:kept].float(), b[:, :kept].float(), 1.0)
                for (name, (_, a, b)), kept in zip(ordered.items(), k.tolist(), strict=True)
            }
        )
        measured += sum(
            float((mine.exp() * (mine - other)).sum())
            for mine, other in zip(own, answer_log_probabilities(model, answered, settings), strict=True)
        ) / len(answered)
    # an adapter whose answers did not change keeps its order of directions
    return max(1e-3, measured / expected) if expected > 0 else 1.0


@torch.no_grad()
def answer_log_probabilities(
    model: OpenModel, answered: Sequence[Answered], settings: FisherSettings
) -> list[Tensor]:
    """Log probabilities of every token where one of an answer is chosen, float32 [positions, vocabulary] a batch."""
    found: list[Tensor] = []
    for start in range(0, len(answered), settings.batch_size):
        ids, positions = (
            tensor.to(model.causal.device)
            for tensor in collate(answered[start : start + settings.batch_size], model.pad)
        )
        found.append(log_probabilities(model.causal, states_at(model.causal, ids, positions)))
    return found


def sample_cores(
    model: Any, adapter: Adapter, answered: Sequence[Answered], pad: int, settings: FisherSettings
) -> dict[str, tuple[Tensor, Tensor]]:
    """P_out and P_in, float64 [r, r], of every module of ``adapter``, which is merged into ``model``."""
    sums = {
        module.name: torch.zeros(2, module.rank, module.rank, dtype=torch.float64, device=model.device)
        for module in adapter.modules
    }
    generator = torch.Generator().manual_seed(settings.seed)
    samples = 0
    with watched(model, adapter) as cores:
        for start in range(0, len(answered), settings.batch_size):
            rows = answered[start : start + settings.batch_size]
            for _ in backward_draws(model, rows, pad, settings, generator):
                for name, sample in cores.items():
                    exact = sample.double()
                    sums[name] += torch.stack(((exact @ exact.mT).sum(0), (exact.mT @ exact).sum(0)))
                samples += len(rows)
    means = {name: (total / samples).cpu() for name, total in sums.items()}
    return {name: (mean[0], mean[1]) for name, mean in means.items()}


def backward_draws(
    model: Any, rows: Sequence[Answered], pad: int, settings: FisherSettings, generator: torch.Generator
) -> Iterator[None]:
    """Run ``rows`` once forward and ``settings.draws`` times backward, from Gaussian vectors on the answers' logits."""
    ids, positions = collate(rows, pad)
    embedded = model.get_input_embeddings()(ids.to(model.device)).requires_grad_(True)
    hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state.flatten(0, 1)
    logits = model.get_output_embeddings()(hidden[positions.to(hidden.device)])
    root = torch.softmax(logits.detach().float() / settings.temperature, dim=-1).sqrt()
    for draw in range(settings.draws):
        noise = torch.randn(root.shape, generator=generator).to(root.device)
        vector = root * (noise - root * (root * noise).sum(-1, keepdim=True))
        torch.autograd.grad(logits, embedded, vector.to(logits.dtype), retain_graph=draw + 1 < settings.draws)
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
