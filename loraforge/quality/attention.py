"""Attention of one new token over a cache with fewer key heads than query heads, without copies of the cache.

transformers repeats keys and values for every query head where there is a mask. The query heads of one key head can as
well be taken for as many queries: they see the same keys, and the same mask.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "loraforge_folded"


def folded_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [n, heads, t, d] over keys [n, key heads, length, d] to [n, t, heads, d].

    ``attention_mask``: bool [n, 1, t, length]. More than one new token goes to transformers' own function.
    """
    rows, heads, new, width = query.shape
    if new > 1 or attention_mask is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
        return found
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    seen = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return seen.reshape(rows, 1, heads, width), None


def register() -> str:
    """Have transformers know this function; the name to ask for it by."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, folded_attention)
    return NAME
