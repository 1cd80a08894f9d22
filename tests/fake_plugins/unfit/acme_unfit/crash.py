"""A module that fails when imported."""

raise RuntimeError("driver too old")
