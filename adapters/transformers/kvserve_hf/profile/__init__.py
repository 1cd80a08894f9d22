"""``kvserve profile``: candidates measured on a real model, and the profile library that a search of them leaves."""
