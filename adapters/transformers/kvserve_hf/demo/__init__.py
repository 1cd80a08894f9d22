"""``kvserve demo``: two processes, a real model, real links, and the controller choosing per request."""
