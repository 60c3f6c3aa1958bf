"""Benchmarks: shape fleets (``fleets``), the whole chain (``end_to_end``), and the serving kernels: cases and operands,
arms (ours and the engines'), checks, graph-replay timing, the tuner."""
