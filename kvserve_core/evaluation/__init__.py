"""How quality is measured: an engine, prompts whose KV goes through a roundtrip, statistics with confidence bounds."""
