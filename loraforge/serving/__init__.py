"""Serving benchmarks of any engine with OpenAI's completions: workloads, client, records, metrics, processes."""
