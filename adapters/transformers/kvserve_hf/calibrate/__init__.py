"""Calibration: from a model and texts to the files that some components read, with their provenance."""
