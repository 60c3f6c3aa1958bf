"""Unloading by the server's interface: the engine's own forgets the adapter's name and keeps the adapter.

It would hold its room in the pool until others push it out, and count among those that the pool must have room for. So
once the last request that uses it has ended, it is taken out of the engine, and only then the call answers.
"""

from __future__ import annotations

import asyncio
from typing import Any

_POLL_S = 0.05


def complete() -> None:
    """Have the server's handler of ``/v1/unload_lora_adapter`` do so; does nothing the second time."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    forget = OpenAIServingModels.unload_lora_adapter
    if getattr(forget, "loraforge", False):
        return

    async def unload_lora_adapter(self: Any, request: Any) -> Any:
        known = self.lora_requests.get(request.lora_name)
        answer = await forget(self, request)
        if known is not None and self.lora_requests.get(request.lora_name) is not known:
            await _remove(self.engine_client, known.lora_int_id)
        return answer

    unload_lora_adapter.loraforge = True  # type: ignore[attr-defined]
    OpenAIServingModels.unload_lora_adapter = unload_lora_adapter


async def _remove(client: Any, number: int) -> None:
    """Take an adapter out of the engine once no request of this server uses it."""
    requests = client.output_processor.request_states
    while any(
        state.lora_request is not None and state.lora_request.lora_int_id == number
        for state in requests.values()
    ):
        await asyncio.sleep(_POLL_S)
    await client.remove_lora(number)
