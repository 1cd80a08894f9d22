"""The transform that does nothing."""

from __future__ import annotations

from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig
from kvserve_core.spec import DType, Region
from kvserve_core.stages import Transform
from kvserve_core.tensor import Params


class Identity(Transform):
    """Passes values on unchanged."""

    class Config(ComponentConfig):
        """Nothing to set."""

    config: Config
    caps = Capabilities(
        exact=True,
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        dtypes=frozenset(DType),
        head_local=True,
        layer_local=True,
    )

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        """``x`` itself, no parameters."""
        return x, {}

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        """``y`` itself."""
        return y
