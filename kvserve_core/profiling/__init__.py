"""The profiler: a search space made of what is installed, and a search for the profiles worth keeping."""
