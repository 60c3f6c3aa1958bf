"""The engines' own LoRA kernels as baselines, loaded from where the engines are installed or unpacked.

Nothing of an engine is in this package. :mod:`loraforge.bench.native.sites` fetches and imports exactly the modules
that hold the kernels; the other modules drive them as the engines do, and say where that choice favours them.
"""
