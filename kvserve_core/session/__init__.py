"""The only objects of the data path that an adapter drives: a Producer and a Consumer per worker rank."""

from kvserve_core.session.consumer import Consumer
from kvserve_core.session.events import Event, Failed, Freed, Gather, Loaded, LoadFailed, Scatter
from kvserve_core.session.producer import Producer

__all__ = ["Consumer", "Event", "Failed", "Freed", "Gather", "LoadFailed", "Loaded", "Producer", "Scatter"]
