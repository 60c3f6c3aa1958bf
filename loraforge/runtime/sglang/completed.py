"""Adapters for the engine's own execution, with all parts of a fused layer of which they change any.

The engine's loader stacks q_proj, k_proj and v_proj, and fails where q_proj or v_proj is not there: at the start where
v_proj is missing, at first use, which ends the server, where q_proj is. Zeros of the adapter's rank in their place
change no sum, and are what the loader itself takes for a missing k_proj.
"""

from __future__ import annotations

from sglang.srt.lora.lora import LoRAAdapter

from loraforge.runtime.sglang.modules import ATTENTION, missing


class CompletedAdapter(LoRAAdapter):
    """An adapter as the engine loads it, completed before the engine puts its parts together."""

    def _normalize_weights(self) -> None:
        config = self.base_hf_config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv = config.num_key_value_heads * head
        outputs = dict(zip(ATTENTION, (config.num_attention_heads * head, kv, kv), strict=True))
        for layer in self.layers:
            layer.weights.update(missing(layer.weights, outputs))
        super()._normalize_weights()
