"""Shape fleets as an engine can serve them: random base weights, a tokenizer, and adapters in every set of weights.

For measuring speed, never quality: no weight is trained, spectra are synthetic, and what is generated means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraforge.allocate.budget import parse_budget
from loraforge.compress import compress
from loraforge.factor.gpu.synthetic import write_fleet
from loraforge.files import atomic_folder, write_json
from loraforge.fleet.shapes import Floats, ShapeFleet
from loraforge.progress import Timer, say
from loraforge.serving.arms import Weights
from loraforge.tensor_file import write_tensors
from loraforge.threads import io_threads

_STD = 0.02
_SHARD_BYTES = 1 << 30
Shapes = dict[str, tuple[int, ...]]

# configurations that the makers of these models publish
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
}
_COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "hidden_act": "silu",
    "initializer_range": _STD,
    "use_cache": True,
}


def base_shapes(config: Mapping[str, Any]) -> Iterator[Shapes]:
    """Shapes of a dense decoder's tensors by name: embeddings first, then layer by layer."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    ends: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        ends["lm_head.weight"] = (config["vocab_size"], hidden)
    yield ends
    layer: Shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    for number in range(config["num_hidden_layers"]):
        yield {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}


def write_base(config: Mapping[str, Any], folder: Path, device: torch.device | str, seed: int) -> None:
    """Write a model of BF16 weights drawn from N(0, 0.02^2), norms of one, with a tokenizer of a word a token.

    ``folder`` appears whole or not at all. Raises OutputError where it is there and not empty.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return drawn.normal_(std=_STD, generator=generator).cpu()

    with atomic_folder(folder) as place, ThreadPoolExecutor(io_threads()) as threads:
        shards = list(_shards(base_shapes(config)))
        writes = []
        index: dict[str, str] = {}
        for number, shapes in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = {name: draw(shape) for name, shape in shapes.items()}
            index |= dict.fromkeys(shapes, file)
            writes.append(threads.submit(write_tensors, place / file, tensors, {"format": "pt"}))
        for write in writes:
            write.result()
        total = sum(2 * torch.Size(shape).numel() for shapes in shards for shape in shapes.values())
        write_json(
            place / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
        )
        write_json(place / "config.json", {**_COMMON, **config})
        _write_tokenizer(place, config)


def _shards(parts: Iterator[Shapes]) -> Iterator[Shapes]:
    """Parts put together to about a GiB each."""
    shard: Shapes = {}
    for part in parts:
        shard |= part
        if sum(2 * torch.Size(shape).numel() for shape in shard.values()) >= _SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """A word for each token id, so that whatever is generated has text; id 0 begins, id 1 ends."""
    words = ["<begin>", "<end>", *(f"w{number}" for number in range(2, config["vocab_size"]))]
    special = [
        {
            "id": number,
            "content": words[number],
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number in (0, 1)
    ]
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {word: number for number, word in enumerate(words)},
                "unk_token": words[1],
            },
        },
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": words[0],
            "eos_token": words[1],
            "model_max_length": config["max_position_embeddings"],
        },
    )


def write_served_fleet(
    shapes: ShapeFleet,
    config: Mapping[str, Any],
    folder: Path,
    device: torch.device,
    seed: int,
    *,
    weights: Sequence[Weights] = ("original", "uniform", "spectral"),
    budget: str = "1/12",
    pool: Sequence[Floats] | None = None,
) -> dict[str, float]:
    """Write ``folder/base`` and a folder each of ``weights``; seconds by folder, of those that were not there.

    Original adapters are PEFT folders of their nominal rank; the others compressed fleets of both policies under one
    budget, padded to one rank an adapter, from the same originals, in folders named as ``spectral_1-12``. ``pool``:
    measured spectra to draw from.
    """
    seconds: dict[str, float] = {}

    def make(name: str) -> bool:
        return not (folder / name).exists()

    if make("base"):
        with Timer() as timer:
            write_base(config, folder / "base", device, seed)
        seconds["base"] = timer.s
    if make("original"):
        with Timer() as timer, atomic_folder(folder / "original") as place:
            write_fleet(shapes, place, device, seed, pool, writers=io_threads())
        seconds["original"] = timer.s
    for kind in weights:
        name = f"{kind}_{budget.replace('/', '-')}"
        if kind != "original" and make(name):
            with Timer() as timer:
                compress(
                    [folder / "original"],
                    parse_budget(budget),
                    folder / name,
                    cache=None,
                    policy=kind,
                    layouts=("padded",),
                )
            seconds[name] = timer.s
    for name, taken in seconds.items():
        say(f"{folder / name}: {taken:.1f} s")
    return seconds
