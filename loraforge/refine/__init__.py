"""Teach truncated adapters their originals' own answers: an option after compression, the only part that trains.

No label is read: :mod:`distillation` lets the original answer unlabelled prompts and minimises the divergence of the
truncated adapter's distributions from the original's. Ranks, files and serving stay as they are; :mod:`fleet` writes
the refined fleet as any other.
"""

# Source that refined factors depend on: part of a finished adapter's name, and of what the workflow looks at.
SOURCE = (
    "refine",
    "activation/answers.py",
    "quality/arms.py",
    "quality/decoding.py",
    "fleet/train.py",
)
