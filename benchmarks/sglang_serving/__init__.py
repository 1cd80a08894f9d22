"""Parts of ``benchmarks/sglang_pd.py``."""
