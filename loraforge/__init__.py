"""Compress a fleet of trained LoRA adapters under one shared parameter budget, and serve it faster."""

__version__ = "0.1.0"
