"""Evidence: records of a run in BagIt bags, an index over them, and the audit that recomputes every claim.

Nothing here imports torch: an audit runs in seconds in the core environment.
"""
