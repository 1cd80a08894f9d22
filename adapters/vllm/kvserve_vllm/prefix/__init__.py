"""Stored prefixes: cells of prompts in a store, found again by another process or after a restart."""
