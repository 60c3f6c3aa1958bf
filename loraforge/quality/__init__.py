"""Task data, lm-eval driver, scores and metrics."""

# Source that scores depend on: part of a finished record's name, and of what the workflow looks at.
SCORING = (
    "quality/arms.py",
    "quality/attention.py",
    "quality/decoding.py",
    "quality/harness.py",
    "quality/lanes.py",
    "quality/metrics.py",
    "quality/tasks.py",
)
