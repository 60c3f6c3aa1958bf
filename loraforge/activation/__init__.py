"""Measure an update by more than its weights: by what it does to outputs, or to an adapter's answers.

:mod:`moments` is what both kinds of measurement have in common: a hashed file, and a norm that orders directions.
:mod:`inputs` collects second moments C of the inputs of a base model's linear maps from a few unlabelled texts, once;
:mod:`whitened` orders directions by |dW C^1/2|_F. :mod:`fisher_collection` lets adapters answer prompts
(:mod:`answers`) and collects the Fisher information of each one's own answers; :mod:`fisher` orders by it.
:mod:`entries` keeps ordered factors; ranks are then chosen as for any other spectra.
"""
