"""The profiler against tables in which every candidate was measured beforehand."""
