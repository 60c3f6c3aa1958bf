"""A real Llama and a real byte-level tokenizer, small enough to build in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PROMPTS = {
    "a": ["one", "three words here", "2"],
    "b": ["x y", "zz"],
}  # of two adapters, for answers of their own


def tiny_tokenizer() -> Any:
    """One token a byte, and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def tiny_model(vocabulary: int) -> Any:
    """Two layers of width 32 with grouped keys, the shapes of ``TINY_SHAPES``; FP32, seeded."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            initializer_range=0.3,  # at the usual 0.02 so narrow a model cannot be taught anything
        )
    ).eval()


def write_base(folder: Path) -> Path:
    """A base-model folder in BF16, as ``fleet base`` leaves one."""
    import torch

    tokenizer = tiny_tokenizer()
    tiny_model(len(tokenizer)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
