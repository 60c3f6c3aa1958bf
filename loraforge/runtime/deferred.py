"""When prompts have to wait for running requests (paper, B.1). Knows no engine."""

from __future__ import annotations


class DeferredAdmission:
    """After a step that computed parts of prompts, ``decode_steps`` steps that decode run without any.

    Prompts wait for decodes alone: where nothing can decode, nothing is held, so that an idle engine admits at once and
    a long prompt that has the engine to itself goes on from step to step.
    """

    def __init__(self, decode_steps: int) -> None:
        self.decode_steps = decode_steps
        self._left = 0

    def holds(self, can_decode: bool) -> bool:
        """Whether the next step leaves out new requests and the rest of prompts that are partly computed.

        can_decode: whether any request that runs has a token to make in it.
        """
        return can_decode and self._left > 0

    def ran(self, prefill_tokens: int, decode_tokens: int) -> None:
        """Note a step: tokens of prompts and tokens of requests that decode, both 0 for a step that was empty."""
        if prefill_tokens:
            self._left = self.decode_steps
        elif decode_tokens and self._left:
            self._left -= 1
