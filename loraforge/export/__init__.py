"""Compressed adapters on disk: PEFT folders in two layouts and the retained-rank manifest.

``manifest`` needs no torch: inspection and serving plugins read it in milliseconds.
"""
