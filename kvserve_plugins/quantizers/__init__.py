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
        "Gives heads, layers or tokens of low score a coarser quantizer than the others.",
    )
    yield Component(
        "kivi",
        "kvserve_plugins.quantizers.kivi:Kivi",
        "Rounds groups of tokens (keys) or of channels (values) to 2 or 4 bits.",
    )
    yield Component(
        "cachegen",
        "kvserve_plugins.quantizers.cachegen:CacheGen",
        "Rounds to levels that fall with depth, against the largest magnitude of each token.",
    )
    yield Component(
        "turboquant",
        "kvserve_plugins.quantizers.turboquant:TurboQuant",
        "Rotates each head at random, then rounds to the best levels for a normal variable.",
    )
    yield Component(
        "fp8",
        "kvserve_plugins.quantizers.fp8:FP8",
        "Casts to 8-bit floats (e4m3), scaled so that the largest value of a group just fits.",
    )
    yield Component(
        "fixed_step",
        "kvserve_plugins.quantizers.fixed_step:FixedStep",
        "Rounds to multiples of one step; with ``klt`` and an entropy coder, reverse water-filling.",
    )
