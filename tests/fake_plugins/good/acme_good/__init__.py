"""A plugin as it should be: a codec and a policy, and words that must not reach the user at load."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl

sys.stdout.write("acme was imported\n")
sys.stderr.write("acme complains\n")
warnings.warn("acme is old", DeprecationWarning, stacklevel=1)


@hookimpl
def kvserve_codecs() -> Iterator[Component]:
    """One codec, and one that needs a library nobody has."""
    yield Component("acme.rle", "acme_good.rle:RunLength", "Run-length codes.")
    yield Component(
        "acme.fpga",
        "acme_good.fpga:Fpga",
        "Codes on an FPGA.",
        requires=("acme_missing_driver.codecs",),
        extra="acme-good[fpga]",
    )


@hookimpl
def kvserve_policies() -> Iterator[Component]:
    """One policy."""
    yield Component("acme.first", "acme_good.policies:First", "Always the first candidate.")
