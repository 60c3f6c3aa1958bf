"""Low-rank products of many adapters in one batch: shrink Z = X A^T and expand Y += scale Z B^T (paper, section 5).

Every backend (reference, CUDA, Triton, CPU) takes the same operands, described by :mod:`loraforge.ops.slots` (which
adapter lies where, at which rank) and :mod:`loraforge.ops.plan` (which token belongs to which adapter). The public
functions are here; :mod:`loraforge.ops.choice` says how a kernel is named.
"""

from loraforge.ops.api import expand, fill, lora, shrink
from loraforge.ops.choice import NATIVE, REFERENCE, Choice, Kernel

__all__ = ["NATIVE", "REFERENCE", "Choice", "Kernel", "expand", "fill", "lora", "shrink"]
