"""Both fleets on one device, SGLang: throughput and latencies over the offered rate, four arms (paper, figure 6)."""

from __future__ import annotations

from loraforge.figures.serving import draw_curves as draw
from loraforge.figures.serving import table

__all__ = ["draw", "table"]
