"""A router for prefill and decode servers that run the KVServe connector. Imports no vllm; needs ``kvserve[proxy]``.

Each request takes two steps: a prefill server computes the prompt and answers with a locator, then a decode server
fetches the KV cache through it and generates. Where the first step is not possible the decode server computes alone.
"""
