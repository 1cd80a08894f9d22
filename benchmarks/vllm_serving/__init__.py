"""Parts of ``benchmarks/vllm_pd.py``; ``gpu_vllm.py`` has its records."""
