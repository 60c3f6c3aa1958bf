"""Training of LoRA adapters by recipe: a plain loop over transformers and PEFT, one process an adapter.

Loss is taken on the completion alone. Base weights stay BF16, A and B are FP32 while they train, and what is
validated and saved is their BF16 rounding.
"""

from __future__ import annotations

import math
import platform
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from loraforge.errors import InputError, LoraForgeError, UsageError
from loraforge.files import atomic_folder, pretty_json, read_jsonl
from loraforge.fleet.base_model import SMOLLM2
from loraforge.fleet.offline import offline_imports
from loraforge.fleet.recipe import Recipe, load_recipe
from loraforge.fleet.validation import score
from loraforge.progress import Timer, progress, say
from loraforge.quality.arms import MergedModel, Update
from loraforge.quality.builders.registry import task as task_spec
from loraforge.workers import each

MAX_VALIDATION = 200
LOSS_EVERY = 20  # steps that one point of the loss curve averages over
_CLIP = 1.0  # largest gradient norm of a step
_BUCKET = 16  # batches that are sorted by length together: little padding, and still random batches


@dataclass(frozen=True)
class Encoded:
    """Token ids of prompt and completion; the loss counts ids from ``n_prompt`` on."""

    ids: tuple[int, ...]
    n_prompt: int


def encode(tokenizer: Any, prompt: str, target: str, max_length: int) -> Encoded:
    """Tokens of ``prompt`` and of ``" " + target`` with the end token.

    The two are tokenised apart, because generation starts from the prompt's own tokens. A prompt that does not
    fit loses its start, as in lm-eval. Raises InputError where the target alone does not fit.
    """
    completion = [*tokenizer(" " + target, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    room = max_length - len(completion)
    if room < 1:
        raise InputError(
            f"target of {len(completion)} tokens exceeds max_length {max_length}", key=target[:40]
        )
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"][-room:]
    return Encoded((*start, *completion), len(start))


def collate(batch: Sequence[Encoded], pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ``ids`` [b, L], flat ``positions`` [t] of what predicts a completion token, ``targets`` [t].

    No attention mask is needed: attention is causal, and no counted position sees the padding behind it.
    """
    width = max(len(example.ids) for example in batch)
    ids = torch.full((len(batch), width), pad)
    positions: list[int] = []
    targets: list[int] = []
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        positions += range(row * width + example.n_prompt - 1, row * width + len(example.ids) - 1)
        targets += example.ids[example.n_prompt :]
    return ids, torch.tensor(positions), torch.tensor(targets)


def batches(lengths: Sequence[int], batch_size: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Yield ``steps`` lists of example indices: shuffled epochs, cut into batches of similar length.

    Every example comes once an epoch; the last batch of an epoch may be smaller.
    """
    chance = random.Random(seed)
    done = 0
    while done < steps:
        order = list(range(len(lengths)))
        chance.shuffle(order)
        pool = batch_size * _BUCKET
        epoch: list[list[int]] = []
        for start in range(0, len(order), pool):
            window = sorted(order[start : start + pool], key=lambda i: lengths[i])
            epoch += [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
        chance.shuffle(epoch)
        yield from epoch[: steps - done]
        done += len(epoch)


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Linear rise over the first ``warmup * steps`` steps, then a half cosine to zero; ``step`` counts from 0."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def train_adapter(
    recipe: Recipe,
    *,
    base: Path,
    tasks: Path,
    device: str = "cpu",
    limit_steps: int | None = None,
    title: str | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Train one adapter; returns its BF16 tensors by PEFT key, its ``adapter_config``, and the training record.

    Raises InputError for missing or empty splits and a loss that is not finite, MissingDependencyError without
    transformers and peft.
    """
    with offline_imports():
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    logging.disable_progress_bar()
    spec = task_spec(recipe.task)
    train = _split(tasks, recipe.task, "train")
    validation = _split(tasks, recipe.task, "validation")[:MAX_VALIDATION]
    tokenizer = AutoTokenizer.from_pretrained(base)
    examples = [encode(tokenizer, record["prompt"], record["target"], recipe.max_length) for record in train]
    steps = recipe.n_steps(len(examples))
    steps = steps if limit_steps is None else min(steps, limit_steps)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device)

    torch.manual_seed(recipe.seed)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=recipe.dropout,
        use_rslora=recipe.rslora,
        target_modules=list(recipe.target_modules),
        layers_to_transform=None if recipe.layers is None else list(recipe.layers),
        rank_pattern=dict(recipe.rank_pattern),
        alpha_pattern=dict(recipe.alpha_pattern),
    )
    model: Any = get_peft_model(load(), lora, autocast_adapter_dtype=True)
    causal = model.get_base_model()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
    merged = MergedModel(load().eval())

    def validate() -> float:
        return score(
            merged.model, tokenizer, validation, metric=spec.metric, max_new_tokens=spec.max_gen_toks
        )

    curve: list[list[float]] = []
    history: list[dict[str, float]] = []
    best: dict[str, Update] = {}
    best_score, best_step = -math.inf, 0
    points = {round(steps * (i + 1) / recipe.evaluations) for i in range(recipe.evaluations)} | {steps}
    lengths = [len(example.ids) for example in examples]
    with Timer() as timer, progress(title or recipe.task, steps) as ticker:
        base_score = validate()
        running: list[torch.Tensor] = []
        model.train()
        for step, batch in enumerate(batches(lengths, recipe.batch_size, steps, recipe.seed), start=1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step - 1, steps, recipe.lr, recipe.warmup)
            ids, positions, targets = collate([examples[i] for i in batch], tokenizer.pad_token_id)
            hidden = causal.model(input_ids=ids.to(device), use_cache=False).last_hidden_state
            logits = causal.lm_head(hidden.flatten(0, 1)[positions.to(device)]).float()
            loss = torch.nn.functional.cross_entropy(logits, targets.to(device))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            running.append(loss.detach())
            note = ""
            if step % LOSS_EVERY == 0 or step == steps:
                curve.append([step, round(float(torch.stack(running).mean()), 5)])
                running.clear()
                if not math.isfinite(curve[-1][1]):
                    raise InputError("the loss is not finite", key=recipe.task, remedy="lower lr or alpha")
                note = f"loss {curve[-1][1]:.3f}"
            if step in points:
                updates = _updates(causal)
                merged.merge(updates)
                history.append({"step": step, "score": round(validate(), 3)})
                note = f"{note} validation {history[-1]['score']:.1f}"
                if history[-1]["score"] > best_score:
                    best, best_score, best_step = updates, history[-1]["score"], step
            ticker.advance(note)
    record = {
        "schema": "loraforge.training/1",
        "task": recipe.task,
        "base_model": SMOLLM2.name,
        "steps": steps,
        "train_examples": len(examples),
        "train_loss": {"first": curve[0][1], "last": curve[-1][1], "curve": curve},
        "validation": {
            "metric": spec.metric,
            "n": len(validation),
            "base": round(base_score, 3),
            "adapter": best_score,
            "best_step": best_step,
            "history": history,
        },
        "parameters": sum(parameter.numel() for parameter in parameters),
        "seconds": round(timer.s, 1),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }
    return _tensors(best), _adapter_config(lora), record


def train_fleet(
    recipes: Sequence[Path],
    *,
    base: Path,
    tasks: Path,
    out: Path,
    device: str = "cpu",
    jobs: int = 1,
    limit_steps: int | None = None,
) -> dict[str, str]:
    """Train an adapter a recipe into ``out/NAME``; NAME is the recipe's folder, or its stem if not ``recipe``.

    Finished adapters are skipped, so that an interrupted run resumes. One failure does not stop the others.
    Returns the failures: name to message. Raises LoraForgeError where one of ``jobs`` processes dies.
    """
    names = {adapter_name(path): path for path in recipes}
    if len(names) != len(recipes):
        raise UsageError("two recipes have one name", remedy="put each in a folder of its own name")
    for path in recipes:  # a typing mistake in the last one shows now, not in an hour
        task_spec(load_recipe(path).task)
    waiting = {name: path for name, path in names.items() if not (out / name / "training.json").is_file()}
    if len(waiting) < len(names):
        say(f"{len(names) - len(waiting)} of {len(names)} adapters are trained already")
    options: dict[str, Any] = {"base": base, "tasks": tasks, "device": device, "limit_steps": limit_steps}
    failures: dict[str, str] = {}
    asked = {name: (path, out / name, options) for name, path in waiting.items()}
    for name, outcome in each(_train_to, asked, jobs):
        _report(name, outcome, failures)
    return failures


def adapter_name(recipe: Path) -> str:
    """The name of a recipe's adapter: its folder for ``NAME/recipe.yaml``, its stem for ``NAME.yaml``."""
    return recipe.resolve().parent.name if recipe.stem == "recipe" else recipe.stem


def _report(name: str, outcome: str, failures: dict[str, str]) -> None:
    say(f"{name}: {outcome}")
    if outcome.startswith("error"):
        failures[name] = outcome


def _train_to(path: Path, folder: Path, options: Mapping[str, Any]) -> str:
    """Train and save one adapter; one line on how it went, beginning with ``error`` if it did not."""
    from safetensors.torch import save_file

    try:
        recipe = load_recipe(path)
        tensors, config, record = train_adapter(recipe, title=folder.name, **options)
        with atomic_folder(folder, force=folder.resolve() == path.resolve().parent) as temporary:
            save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
            (temporary / "adapter_model.safetensors").chmod(0o644)
            (temporary / "adapter_config.json").write_text(pretty_json(config), encoding="utf-8")
            (temporary / "recipe.yaml").write_bytes(path.read_bytes())
            (temporary / "training.json").write_text(pretty_json(record), encoding="utf-8")
    except (LoraForgeError, RuntimeError) as error:  # torch reports a lack of memory as RuntimeError
        return f"error: {error}"
    result = record["validation"]
    return (
        f"{result['metric']} {result['base']:.1f} -> {result['adapter']:.1f} on validation (step "
        f"{result['best_step']}), loss {record['train_loss']['first']:.3f} -> {record['train_loss']['last']:.3f}, "
        f"{record['seconds']:.0f} s"
    )


def _split(tasks: Path, task: str, split: str) -> list[dict[str, Any]]:
    path = tasks / task / f"{split}.jsonl"
    if not path.is_file():
        raise InputError("file not found", path=path, remedy=f"run `loraforge tasks build {task}`")
    records = list(read_jsonl(path))
    if not records:
        raise InputError("no examples", path=path)
    return records


def _updates(causal: Any) -> dict[str, Update]:
    """The BF16 factors of every adapted module, copied, by module name."""
    from peft.tuners.lora import LoraLayer

    found: dict[str, Update] = {}
    for name, module in causal.named_modules():
        if isinstance(module, LoraLayer):
            a, b = (
                factor["default"].weight.detach().to(torch.bfloat16, copy=True)
                for factor in (module.lora_A, module.lora_B)
            )
            found[name] = Update(a, b, module.scaling["default"])
    return found


def _tensors(updates: Mapping[str, Update]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, update in updates.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = update.a.cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = update.b.cpu().contiguous()
    return tensors


def _adapter_config(lora: Any) -> dict[str, Any]:
    """``adapter_config.json`` as PEFT writes it, for inference, with sets in sorted order."""
    values = {
        key: sorted(value) if isinstance(value, set) else value for key, value in lora.to_dict().items()
    }
    return {**values, "base_model_name_or_path": SMOLLM2.name, "inference_mode": True}
