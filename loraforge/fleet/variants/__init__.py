"""The kinds of PEFT adapters whose update is one product of two thin matrices a module, exactly.

One module a kind: which tensors it stores, and how A, B and the scale follow from them.
"""
