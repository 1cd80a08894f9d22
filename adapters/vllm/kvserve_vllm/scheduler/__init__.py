"""The scheduler side of the connector: what to offer, what to fetch, and what is decided."""
