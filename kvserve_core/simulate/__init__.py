"""Replays of the controller against a world that it sees only through outcomes: arrivals, links, drift and noise.

``Scenario`` says what the world is, ``run.play_seed`` plays one seed of it, ``run.simulate`` several in several
processes, and ``report`` sums them up with confidence bounds.
"""
