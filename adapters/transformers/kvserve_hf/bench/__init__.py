"""Rate against quality, measured: pipelines through real frames, on pinned texts and on tasks with one right answer."""
