"""What ``gpu_vllm.py`` is made of: the model, its library, calls into the engines, figures."""
