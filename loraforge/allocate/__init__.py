"""Choose the retained rank of every module of a fleet under one shared parameter budget. NumPy only."""
