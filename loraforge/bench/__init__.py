"""Kernel benchmarks: cases and operands, arms (ours and the engines'), checks, graph-replay timing, and the tuner."""
