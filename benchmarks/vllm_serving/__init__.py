"""Parts of ``benchmarks/vllm_pd.py``."""
