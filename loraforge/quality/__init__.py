"""Task data, lm-eval driver, scores and metrics."""
