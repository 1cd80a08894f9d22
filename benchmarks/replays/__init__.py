"""Replays of what the KVServe paper and its repository publish, from the tables in ``tests/data/kvserve``."""
