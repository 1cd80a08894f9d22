"""The transformers reference engine: prefill, export and inject KV, continue; and quality measured through it.

It serves the demo and the profiler, not traffic. Import its modules directly; this one imports nothing heavy.
"""
