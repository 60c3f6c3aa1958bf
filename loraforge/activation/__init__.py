"""Measure an update by what it does to the inputs that its module sees, not by its weights alone.

The error that a truncation makes is |(dW - dW_k) x|^2 averaged over inputs x, which is |(dW - dW_k) C^1/2|_F^2 with
C = E[x x^T], every x at one length. :mod:`moments` collects C of every linear map of a base model from a few unlabelled
texts, once; :mod:`whitened` orders the directions of adapters by it; ranks are then chosen as for any other spectra.
"""
