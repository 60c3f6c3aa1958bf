"""Compress-then-Serve, the baseline that shares bases between adapters: dW_i ~ U S_i V^T for every module.

Written from its mathematics: :mod:`full` has orthonormal shared bases and a dense core for each adapter, also weighted
by norms; :mod:`diagonal` has diagonal cores. :mod:`accounting` says what they cost, :mod:`export` writes them as
independent adapters. Everything works on factors.
"""
