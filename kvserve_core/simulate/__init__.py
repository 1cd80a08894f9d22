"""Replays of the controller against a world that it sees only through outcomes: arrivals, links, drift and noise.

``Scenario`` says what the world is, ``run`` plays one seed of it, ``simulate`` several seeds with confidence bounds.
"""
