"""kvserve inside vLLM: a KV connector (V1) that sends and fetches compressed KV. Importing it imports no vLLM."""
