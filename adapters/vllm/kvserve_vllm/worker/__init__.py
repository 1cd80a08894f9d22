"""The worker side of the connector: one per rank, driven by what the scheduler side put into the step's metadata."""
