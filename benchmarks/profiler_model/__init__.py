"""The profiler on a real model, beside all of the reference's own space."""
