"""Greedy decoding of a batch of prompts: what transformers' ``generate`` computes, without what it costs.

:func:`decode_growing` keeps a cache that grows, and drops stopped rows once they are enough to pay for it: on a
processor a row costs time. :class:`FixedDecoder` keeps every tensor in its place, so that a step is one CUDA graph: on
a GPU a launch costs time, and a row hardly any. Both call the model's own forward pass, and neither reads on behind a
stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loraforge.progress import say

_DROP = 0.25  # share of stopped rows at which a growing cache is made smaller; the copy costs about a step
_LOOK = 8  # steps of a fixed decoder between looks at whether every row has stopped, each of which waits for the device
_ALIGNED = (
    16  # cache lengths are multiples of this, since attention pads masks of other lengths at every step
)
_WARM_UP = 2  # steps before a capture, in which libraries allocate what they need


class Prompts(NamedTuple):
    """Encoded prompts that are decoded together.

    Parameters
    ----------
    ids, mask: int64 [n, width], padded on the left; the mask is 0 at padding. limit: most tokens to make, at least 1.
    """

    ids: Tensor
    mask: Tensor
    limit: int


def stop_tokens(tokenizer: Any, until: Sequence[str], ends: Sequence[int], vocabulary: int) -> Tensor:
    """Tokens at which a row has stopped: ``ends``, and those whose own text has one of ``until``. bool [vocabulary].

    A stop that only several tokens spell is not among them: such a row runs to its limit, and its text is cut after.
    """
    texts = tokenizer.batch_decode([[token] for token in range(min(vocabulary, len(tokenizer)))])
    found = torch.zeros(vocabulary, dtype=torch.bool)
    found[: len(texts)] = torch.tensor([any(stop in text for stop in until if stop) for text in texts])
    found[list(ends)] = True
    return found


def first_positions(mask: Tensor) -> Tensor:
    """Positions of prompt tokens, int64 [n, width]; 0 at padding, as ``generate`` has it."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)


@torch.inference_mode()
def decode_growing(model: Any, prompts: Prompts, stops: Tensor) -> list[list[int]]:
    """Tokens of every row, its stop included, in the order of the prompts.

    ``stops``: bool [vocabulary], on the CPU as the prompts; the model may be anywhere.
    """
    from transformers import DynamicCache

    device = model.device

    cache = DynamicCache(config=model.config)
    ids, mask, positions = prompts.ids, prompts.mask, first_positions(prompts.mask)
    found: list[list[int]] = [[] for _ in range(len(ids))]
    rows = torch.arange(len(ids))  # of the prompts, by row of the cache
    going = torch.ones(len(ids), dtype=torch.bool)
    for _ in range(prompts.limit):
        logits = model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        tokens = logits[:, -1].float().argmax(dim=-1).cpu()
        for row, token in zip(rows[going].tolist(), tokens[going].tolist(), strict=True):
            found[row].append(token)
        going &= ~stops[tokens]
        left = int(going.sum())
        if not left:
            break
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        positions = positions[:, -1:] + 1
        ids = tokens[:, None]
        if left <= (1 - _DROP) * len(going):
            kept = going.nonzero()[:, 0]
            cache.batch_select_indices(kept.to(device))
            ids, mask, positions, rows, going = (part[kept] for part in (ids, mask, positions, rows, going))
    return found


class FixedDecoder:
    """Decode batches of ``rows`` prompts of up to ``width`` tokens, ``limit`` new ones each.

    On CUDA all steps but the first replay one graph, which reads the model's weights where they lie: they may change
    between calls, and their addresses may not. Elsewhere the same steps run one by one.
    """

    def __init__(self, model: Any, rows: int, width: int, limit: int, stops: Tensor) -> None:
        from transformers import StaticCache

        self._model, self._width, self._limit = model, width, limit
        device = stops.device
        length = -(-(width + limit) // _ALIGNED) * _ALIGNED
        self._stops = stops
        self._cache = StaticCache(config=model.config, max_cache_len=length)
        self._token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._position = torch.zeros_like(self._token)
        self._seen = torch.zeros(rows, 1, 1, length, dtype=torch.bool, device=device)
        self._column = torch.zeros(1, dtype=torch.long, device=device)
        self._written = torch.zeros_like(self._column)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self._found = torch.zeros(rows, limit, dtype=torch.long, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures = device.type == "cuda"

    @torch.inference_mode()
    def __call__(self, prompts: Prompts) -> list[list[int]]:
        """Tokens of every row, its stop included; ``prompts`` [rows, <= width], with the decoder's limit."""
        self._begin(prompts)
        for step in range(1, self._limit):
            if step % _LOOK == 0 and bool(self._stopped.all()):
                break
            if self._captures and self._graph is None and step > _WARM_UP:
                self._capture()
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        return self._rows(int(self._written))

    def _begin(self, prompts: Prompts) -> None:
        """The pass over the prompts, which gives the first token."""
        pad = self._width - prompts.ids.shape[1]
        ids, mask = (torch.nn.functional.pad(part, (pad, 0)) for part in (prompts.ids, prompts.mask))
        device = self._stops.device
        ids, mask = ids.to(device), mask.to(device)
        for layer in self._cache.layers:
            layer.cumulative_length.zero_()
        self._seen.zero_()
        self._seen[..., : self._width] = mask.bool()[:, None, None]
        # a position of padding sees itself: a row that sees nothing has no softmax, and its NaN would spread as 0 * NaN
        here = torch.ones(self._width, self._width, dtype=torch.bool, device=device)
        visible = self._seen.repeat(1, 1, self._width, 1)
        visible[..., : self._width] = (here.tril() & mask.bool()[:, None, None]) | torch.eye(
            self._width, dtype=torch.bool, device=device
        )
        positions = first_positions(mask)
        tokens = self._next(ids, visible, positions)
        self._position.copy_(positions[:, -1:])
        self._column.fill_(self._width)
        self._written.zero_()
        self._stopped.zero_()
        self._take(tokens)

    def _step(self) -> None:
        """One more token of every row; reads and writes nothing but tensors that stay where they are."""
        self._seen.index_fill_(3, self._column, True)
        self._column.add_(1)
        self._take(self._next(self._token, self._seen, self._position))

    def _next(self, ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        logits = self._model(
            input_ids=ids,
            attention_mask=visible,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        tokens: Tensor = logits[:, -1].float().argmax(dim=-1)
        return tokens

    def _take(self, tokens: Tensor) -> None:
        self._found.index_copy_(1, self._written, tokens[:, None])
        self._stopped.logical_or_(self._stops[tokens])
        self._token.copy_(tokens[:, None])
        self._position.add_(1)
        self._written.add_(1)

    def _capture(self) -> None:
        """Record one step; nothing runs meanwhile. A device that will not record goes on without."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            say(f"decoding goes on without a CUDA graph ({str(error).splitlines()[0]})")
            self._captures = False
            return
        self._graph = graph

    def _rows(self, written: int) -> list[list[int]]:
        found = self._found[:, :written]
        # a row ends with its first stop
        before = self._stops[found].long().cumsum(dim=1) - self._stops[found].long() == 0
        lengths = before.sum(dim=1).tolist()
        return [tokens[:length] for tokens, length in zip(found.tolist(), lengths, strict=True)]
