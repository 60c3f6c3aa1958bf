"""Real adapters, prompts and answers on a GPU: throughput and latencies over the offered rate, four arms."""

from __future__ import annotations

from loraforge.figures.serving import draw_curves as draw
from loraforge.figures.serving import table

__all__ = ["draw", "table"]
