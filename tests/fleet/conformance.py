"""Adapters of every kind that PEFT makes, over models of a few thousand weights, and what becomes of each.

``python tests/fleet/conformance.py`` runs all of them and writes the table in ``docs/formats.md``; a test compares.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraforge.cli import main as loraforge
from loraforge.export.manifest import load_manifest
from loraforge.fleet.options import ReadOptions
from loraforge.fleet.peft_io import open_adapter

DOCS = Path(__file__).resolve().parents[2] / "docs" / "formats.md"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
VOCABULARY = 40
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# relative to the largest entry of what is compared: float32 factors, float64 arithmetic
TOLERANCE = 2e-6
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**changes: Any) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | changes))


def tied_llama() -> torch.nn.Module:
    return llama(tie_word_embeddings=True)


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> torch.nn.Module:
    changes = {"num_local_experts": 3, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA | changes))
    model.set_experts_implementation("eager")  # the only one in double precision
    return model


@cache
def model_state(make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = make()
    return model, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def fresh(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """The same random model each time."""
    _, state = model_state(make)
    model = make()
    model.load_state_dict(state)
    return model


def randomise(model: torch.nn.Module) -> None:
    """Give every trainable weight a random value, as training would; those that count to something stay."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "ranknum" not in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


Change = Callable[[Path], None]


def as_saved(folder: Path) -> None:
    """PEFT's own file."""


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def edit(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_prefix(folder: Path) -> None:
    rewrite(folder, lambda t: {key.removeprefix("base_model.model."): value for key, value in t.items()})


def with_adapter_name(folder: Path) -> None:
    rewrite(
        folder,
        lambda t: {
            re.sub(r"(lora_(?:embedding_)?[AB])(?=\.|$)", r"\1.default", key): v for key, v in t.items()
        },
    )


def mixed_types(folder: Path) -> None:
    types = (torch.bfloat16, torch.float16, torch.float32)
    rewrite(folder, lambda t: {key: t[key].to(types[index % 3]) for index, key in enumerate(sorted(t))})


def sharded(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    table: dict[str, str] = {}
    for number in range(3):
        file = f"adapter_model-{number + 1:05}-of-00003.safetensors"
        save_file({key: tensors[key] for key in names[number::3]}, folder / file)
        table |= dict.fromkeys(names[number::3], file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (folder / WEIGHTS).unlink()


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def mask_adalora(model: torch.nn.Module) -> None:
    """A third of E at zero, as its rank allocator leaves it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_E" in name:
                parameter[::3] = 0


def per_expert_linears(folder: Path) -> None:
    """An adapter as saved while a Mixtral's experts were linear maps of their own."""
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for layer in range(2):
        for expert in range(3):
            for part, (d_out, d_in) in {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)}.items():
                stem = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}"
                tensors[f"{stem}.lora_A.weight"] = 0.2 * torch.randn(4, d_in, generator=generator)
                tensors[f"{stem}.lora_B.weight"] = 0.2 * torch.randn(d_out, 4, generator=generator)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    edit(folder, target_modules=["w1", "w2", "w3"])


@dataclass(frozen=True)
class Case:
    """One row: what it is, the model, PEFT's configuration, and what is done to what PEFT saved.

    ``trained`` changes the model before it is saved; ``written`` the folder before both readers see it, ``stored`` the
    one that LoRAForge alone reads, for forms that PEFT itself does not load. ``flags``: arguments of ``compress``.
    """

    name: str
    make: Callable[[], torch.nn.Module]
    config: Callable[[], Any]
    trained: Callable[[torch.nn.Module], None] | None = None
    written: Change = as_saved
    stored: Change = as_saved
    flags: tuple[str, ...] = ()
    taken: str = "as it is"


def lora(**options: Any) -> Callable[[], Any]:
    fields = {
        "r": 4,
        "lora_alpha": 6,
        "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "v_proj"],
    } | options
    return lambda: peft.LoraConfig(**fields)


def _adalora() -> Any:
    return peft.AdaLoraConfig(
        init_r=6,
        target_r=4,
        lora_alpha=5,
        total_step=10,
        tinit=1,
        tfinal=1,
        target_modules=["q_proj", "up_proj"],
    )


def _vera(**options: Any) -> Any:
    return peft.VeraConfig(r=8, target_modules=["q_proj", "v_proj"], **options)


FOLDED = "as LoRA"
TAKEN = [
    Case("LoRA on all linear maps", llama, lora(target_modules=SEVEN)),
    Case(
        "`rank_pattern`, `alpha_pattern`",
        llama,
        lora(
            target_modules=SEVEN,
            rank_pattern={r"layers\.1\.self_attn\.q_proj": 7, "v_proj": 3, "^model.layers.0.mlp.up_proj": 2},
            alpha_pattern={"o_proj": 3, "layers.1.self_attn.q_proj": 12},
        ),
    ),
    Case("rsLoRA (`use_rslora`)", llama, lora(use_rslora=True)),
    Case("`layers_to_transform`", llama, lora(layers_to_transform=[1])),
    Case("regex `target_modules`", llama, lora(target_modules=r".*\.(self_attn\.(q|k)|mlp\.down)_proj")),
    Case("`all-linear`, `exclude_modules`", llama, lora(target_modules="all-linear", exclude_modules=["o_proj"])),
    Case("`fan_in_fan_out` (Conv1D)", gpt2, lora(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    Case(
        'trained biases (`bias="all"`)', gpt2,
        lora(target_modules=["c_attn"], bias="all", fan_in_fan_out=True), taken="biases byte for byte",
    ),
    Case("`lora_bias`", gpt2, lora(target_modules=["c_attn"], lora_bias=True, fan_in_fan_out=True),
         taken="bias times the scale"),
    Case("`embed_tokens` and `lm_head`", llama, lora(target_modules=["embed_tokens", "lm_head", "q_proj"]),
         taken="base embedding byte for byte"),
    Case("`embed_tokens` of a model that ties `lm_head` to it", tied_llama,
         lora(target_modules=["embed_tokens", "q_proj"]), taken="base embedding byte for byte"),
    Case("tied weights, tied adapters (`ensure_weight_tying`)", tied_llama,
         lora(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
         taken="base embedding byte for byte"),
    Case("`modules_to_save`", llama, lora(modules_to_save=["lm_head"]), taken="modules byte for byte"),
    Case("`trainable_token_indices`", llama, lora(trainable_token_indices=[3, 5]), taken="tokens byte for byte"),
    Case(
        "MoE experts as parameters (`target_parameters`)", mixtral,
        lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        taken="each expert by itself, stored at one rank",
    ),
    Case(
        "MoE parameters of several ranks", mixtral,
        lora(target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
             rank_pattern={r".*\.gate_up_proj": 8}, alpha_pattern={r".*\.gate_up_proj": 3}),
        taken="each expert by itself, stored at one rank",
    ),
    Case("MoE experts as linear maps", mixtral, lora(), written=per_expert_linears, taken="stored at one rank"),
    Case("without `base_model.model.`", llama, lora(), stored=without_prefix, taken="names as PEFT's"),
    Case("with `.default` in names", llama, lora(target_modules=["embed_tokens", "q_proj"]),
         stored=with_adapter_name, taken="names as PEFT's"),
    Case("sharded safetensors with index", llama, lora(target_modules=SEVEN), stored=sharded, taken="as one file"),
    Case("BF16, FP16 and FP32 mixed", llama, lora(), written=mixed_types),
    Case("`.bin` with `--allow-pickle`", llama, lora(), stored=pickled, flags=("--allow-pickle",),
         taken="by torch's weights_only reader"),
    Case("AdaLoRA", llama, _adalora, trained=mask_adalora, taken=f"{FOLDED}: E folded, masked directions left out"),
    Case("VeRA with projections", llama, _vera, flags=("--base",), taken=f"{FOLDED}: both vectors folded"),
    Case("LoHa", llama, lambda: peft.LoHaConfig(r=3, alpha=5, target_modules=["q_proj", "v_proj"]),
         taken=f"{FOLDED} of rank r²"),
    Case("LoKr", llama, lambda: peft.LoKrConfig(r=1, alpha=3, target_modules=["q_proj", "up_proj"]),
         taken=f"{FOLDED} of the product of both ranks"),
    Case("LoKr, no factor decomposed", llama,
         lambda: peft.LoKrConfig(r=64, alpha=3, target_modules=["q_proj", "down_proj"]),
         taken=f"{FOLDED} of the product of both ranks"),
    Case("LoKr, both factors decomposed", llama,
         lambda: peft.LoKrConfig(r=2, alpha=3, decompose_both=True, target_modules=["up_proj"]),
         taken=f"{FOLDED} of the product of both ranks"),
]  # fmt: skip
REFUSED = [
    Case("`.bin`", llama, lora(), stored=pickled),
    Case("DoRA", llama, lora(use_dora=True)),
    Case("VeRA without projections", llama, lambda: _vera(save_projection=False)),
    Case("VeRA, base model unknown", llama, _vera),
    Case("LoHa whose r² exceeds a module", llama, lambda: peft.LoHaConfig(r=6, target_modules=["q_proj"])),
    Case("PiSSA, not converted", llama, lora(init_lora_weights="pissa")),
    Case("QALoRA", llama, lora(), written=lambda folder: edit(folder, use_qalora=True)),
    Case("IA³", llama, lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])),
    Case("OFT", llama, lambda: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"])),
    Case(
        "prompt tuning", llama, lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    ),
]


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_case(case: Case, root: Path) -> tuple[Path, Path]:
    """The adapter as PEFT loads it, and as LoRAForge reads it."""
    original, stored = root / "original" / "adapter", root / "stored" / "adapter"
    with quietly():
        model = peft.get_peft_model(fresh(case.make), case.config())
        randomise(model)
        if case.trained:
            case.trained(model)
        model.save_pretrained(original)
    edit(original, base_model_name_or_path="tiny/base")
    case.written(original)
    shutil.copytree(original, stored)
    case.stored(stored)
    return original, stored


def compress(case: Case, stored: Path, root: Path, budget: str) -> Path:
    out = root / f"out-{budget.replace('/', '-')}"
    flags = list(case.flags)
    if flags == ["--base"]:
        fresh(case.make).save_pretrained(root / "base")
        flags.append(str(root / "base"))
    arguments = ["compress", str(stored), "--out", str(out), "--budget", budget, "--dtype", "float32",
                 "--cache", str(root / "cache"), *flags]  # fmt: skip
    try:
        loraforge(arguments)
    except SystemExit as stopped:
        if stopped.code:
            raise AssertionError(f"compress ended with {stopped.code}") from stopped
    return out


def load(case: Case, folder: Path) -> torch.nn.Module:
    """The adapter in PEFT, which is to find every key that it wants and no other; in double precision."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*(missing|unexpected|Found).*keys.*")
        return peft.PeftModel.from_pretrained(fresh(case.make), folder).double().eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    tokens = torch.randint(0, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(2))
    return model(tokens).logits


@torch.no_grad()
def deltas(model: torch.nn.Module) -> dict[str, Tensor]:
    """Dense updates of a PEFT model by module, one an expert where the experts are a stack."""
    found: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        name = name.removeprefix("base_model.model.")
        if not isinstance(layer, BaseTunerLayer) or "token_adapter" in name:
            continue
        update = layer.get_delta_weight("default").detach()
        if isinstance(layer, ParamWrapper):
            found |= {
                f"{name}[{index}]": part for index, part in enumerate(update.reshape(-1, *update.shape[-2:]))
            }
        else:
            found[name] = update
    return found


def truncated(update: Tensor, k: int) -> Tensor:
    u, s, vh = torch.linalg.svd(update, full_matrices=False)
    return (u[:, :k] * s[:k]) @ vh[:k]


def close(got: Tensor, wanted: Tensor, scale: Tensor) -> None:
    error = float((got - wanted).abs().max() / scale.abs().max())
    assert error <= TOLERANCE, error


def check_taken(case: Case, root: Path) -> None:
    """Raise AssertionError where an export is not the original, or not the truncated original, to PEFT."""
    original, stored = write_case(case, root)
    theirs = load(case, original)
    wanted, base = logits(theirs), logits(fresh(case.make).double())
    fused = case.written is per_expert_linears
    updates = stored_deltas(original) if fused else deltas(theirs)
    assert (wanted - base).abs().max() > 1e-3
    for budget in ("1/1", "1/2"):
        out = compress(case, stored, root, budget)
        entry = load_manifest(out).adapters["adapter"]
        for layout in ("ragged", "padded"):
            folder = out / layout / "adapter"
            ours = load(case, folder)
            if budget == "1/1":
                close(logits(ours), wanted, wanted - base)
            exported = stored_deltas(folder) if fused else deltas(ours)
            check_deltas(updates, exported, {name: m.k for name, m in entry.modules.items()})
            check_untouched(stored, original, folder)
        if budget == "1/2":
            assert sum(m.k for m in entry.modules.values()) < sum(m.r for m in entry.modules.values())


def check_deltas(
    updates: Mapping[str, Tensor], exported: Mapping[str, Tensor], ranks: Mapping[str, int]
) -> None:
    """Every exported update is the best of its rank."""
    assert updates.keys() == exported.keys() == ranks.keys()
    for name, update in updates.items():
        close(exported[name], truncated(update, ranks[name]), update)


def stored_deltas(folder: Path) -> dict[str, Tensor]:
    """Dense updates of an adapter of one scale, out of its file: for modules that PEFT fuses when it loads them."""
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    names = [key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")]
    return {
        name.removeprefix("base_model.model."): config["lora_alpha"]
        / config["r"]
        * tensors[f"{name}.lora_B.weight"].double()
        @ tensors[f"{name}.lora_A.weight"].double()
        for name in names
    }


def check_untouched(stored: Path, original: Path, folder: Path) -> None:
    """What is not a factor is in the export byte for byte."""
    before, after = load_file(original / WEIGHTS), load_file(folder / WEIGHTS)
    beside = {key for key in before if not re.search(r"\.(lora_|hada_|lokr_)|vera_", key)}
    assert beside == {key for key in after if ".lora_" not in key}
    for key in beside:
        assert before[key].dtype == after[key].dtype
        assert torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8))


def refusal(case: Case, root: Path) -> str:
    """The error with which a case is refused, without the folder that it is in."""
    from loraforge.errors import InputError

    _, stored = write_case(case, root)
    try:
        open_adapter(stored, options=ReadOptions())
    except InputError as error:
        return f"{Path(error.path or '').name}: {error.problem}"
    raise AssertionError("was not refused")


def rows(cases: Sequence[tuple[Case, str]]) -> list[str]:
    return ["| adapter | taken | in PEFT |", "|---|---|---|", *(row(case, text) for case, text in cases)]


def row(case: Case, refused: str) -> str:
    if refused:
        return f"| {case.name} | no: {refused.replace('|', chr(92) + '|')} | |"
    return f"| {case.name} | {case.taken} | same logits; at 1/2 the truncated updates |"


def documented() -> list[str]:
    table = DOCS.read_text(encoding="utf-8").partition("<!-- table -->\n")[2].partition("<!-- end -->")[0]
    return table.splitlines()[2:]


def write_docs() -> None:
    """Run every case and write the table into ``docs/formats.md``."""
    lines = []
    for case in (*TAKEN, *REFUSED):
        with tempfile.TemporaryDirectory() as name:
            if case in TAKEN:
                check_taken(case, Path(name))
                lines.append((case, ""))
            else:
                lines.append((case, refusal(case, Path(name))))
        print(case.name, file=sys.stderr)
    before, _, rest = DOCS.read_text(encoding="utf-8").partition("<!-- table -->\n")
    after = rest.partition("<!-- end -->\n")[2]
    DOCS.write_text(
        f"{before}<!-- table -->\n" + "\n".join(rows(lines)) + f"\n<!-- end -->\n{after}", encoding="utf-8"
    )


if __name__ == "__main__":
    write_docs()
