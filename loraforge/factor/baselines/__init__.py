"""Published recompression methods, written from their mathematics, behind one signature.

Each takes FP32 factors with the scale folded in, ``a`` [m, r, d_in] and ``b`` [m, d_out, r], and returns
:class:`loraforge.factor.batch.Ordered`: the same spectrum and balanced factors as the paths of this package.
"""
