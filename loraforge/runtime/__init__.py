"""Serving: adapters in slots, in an engine's process. ``vllm`` holds the only module that knows that engine.

:mod:`loraforge.runtime.ranks` says which directions of an adapter are live, :mod:`loraforge.runtime.pool` keeps them in
memory and their metadata on the device, :mod:`loraforge.runtime.batch` sorts the tokens of a step.
"""
