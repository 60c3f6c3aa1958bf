"""Prefill kernels in Triton. Imported by :mod:`loraforge.ops.api` when one is chosen, so that nothing else needs it.

An engine that keeps CSGMV's chunked batch (SGLang's ``LoRABatchInfo``) runs these kernels as they are:

- ``permutation`` is ``plan.order``; segment i is (``seg_indptr[i]``, ``seg_indptr[i + 1] - seg_indptr[i]``,
  ``weight_indices[i]``, 0) of ``plan.segments``; ``num_segments`` is ``plan.count``. Segments must not be taller than
  ``plan.tile``. ``token_slots`` is read by the kernels for single tokens alone.
- ``lora_ranks`` and ``scalings`` are the ranks and scales of the slot table, so that neither is passed at a step.
- Slot s of a pool of capacity R with c slices of A [slots, c R, d_in] and B [slots, d_out, R] is, for slice p of an
  adapter that was loaded at rank r, the table row a_offset = (s c R + p r) d_in, b_offset = (s d_out + first_p) R,
  width R: SGLang packs the slices of A at the adapter's rank, not at the pool's.
"""

from loraforge.ops.triton.expand import expand
from loraforge.ops.triton.shrink import shrink

__all__ = ["expand", "shrink"]
