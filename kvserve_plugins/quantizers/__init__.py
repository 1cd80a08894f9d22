"""Built-in quantizers."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_quantizers() -> Iterator[Component]:
    """Declare the quantizers."""
    yield Component(
        "identity",
        "kvserve_plugins.quantizers.identity:Identity",
        "Hands the plane's own bytes to the codec; exact.",
    )
    yield Component(
        "bitplane",
        "kvserve_plugins.quantizers.bitplane:Bitplane",
        "Splits floats into an exponent stream and mantissa streams that carry the sign; exact.",
    )
    yield Component(
        "uniform",
        "kvserve_plugins.quantizers.uniform:Uniform",
        "Rounds to equal steps between the minimum and maximum of each group of values.",
    )
    yield Component(
        "channel_mean",
        "kvserve_plugins.quantizers.channel_mean:ChannelMean",
        "Replaces each channel of a head by its mean over the segment.",
    )
    yield Component(
        "mixhq",
        "kvserve_plugins.quantizers.mixhq:MixHQ",
        "Gives the heads with the lowest scores a coarser quantizer than the others.",
    )
