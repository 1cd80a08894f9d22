"""The configuration files of the KVServe reference implementation (arXiv 2605.13734), as they are written there.

Its ``*_max_value`` is a number of levels, not a largest code. Unknown keys are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

AxisName = Literal["channel", "token", "tensor"]
_AXES: dict[tuple[int, ...], AxisName] = {(2,): "channel", (1, 3): "token", (1,): "token", (3,): "token"}
MAX_ACCURACY = 1.5
_TENSOR = ((1, 2, 3), (0, 1, 2, 3))
Levels = Annotated[int, Field(ge=2, le=256)]


def axis_name(given: object) -> object:
    """``[2]`` (axes of ``[B, H, S, D]`` that are reduced) -> ``channel``; names as they are."""
    if type(given) is int:
        given = [given]
    if not isinstance(given, (list, tuple)):
        return given
    if any(type(axis) is not int for axis in given):
        raise ValueError(f"axes are numbers, got {list(given)}")
    axes = tuple(sorted(given))
    if axes in _TENSOR:
        return "tensor"
    if axes not in _AXES:
        raise ValueError(f"axes {list(given)} are none of [2] (channel), [1, 3] (token) and [1, 2, 3] (tensor)")
    return _AXES[axes]


def seed(given: object) -> object:
    """``"0x3333"`` -> 13107; numbers as they are."""
    if isinstance(given, str):
        try:
            return int(given, 0)
        except ValueError:
            raise ValueError(f"{given!r} is not a number; write for example 13107 or '0x3333'") from None
    return given


Axis = Annotated[AxisName, BeforeValidator(axis_name)]
Seed = Annotated[int, BeforeValidator(seed), Field(ge=0, lt=2**63)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class TransformerConfig(_Model):
    """``transformer_config``; a seed left out is 0x3333."""

    transform_type: Literal["hadamard", "none"] = "hadamard"
    seed: Seed = 0x3333


class QuantizerConfig(_Model):
    """``quantizer_config`` with the defaults of its class."""

    impl: Literal["torch", "pytorch", "tilelang_fused"] | None = None
    quant_type: Literal["minmax", "absmax"] = "minmax"
    base_seed: Seed | None = None
    seed: Seed | None = None
    dtype: str | None = None
    model_name: str | None = None
    hybrid_ratio: float = Field(0.3, ge=0, le=1)
    high_key_max_value: Levels = 16
    high_value_max_value: Levels = 16
    low_key_max_value: Levels = 12
    low_value_max_value: Levels = 12
    axis_key: Axis = "channel"
    axis_value: Axis = "token"
    split_type: Literal["head", "layer"] = "head"
    value_token_mode: Literal["grouped", "global"] = "grouped"
    value_token_global_max_value: Levels | None = None
    tp_rank: int | None = None
    tensor_parallel_size: int | None = None


class CodecConfig(_Model):
    """``codec_config``."""

    codec_type: Literal["nvcomp", "lc"] = "nvcomp"
    nvcomp_algorithm: Literal["ANS", "Bitcomp", "Cascaded", "Deflate", "GDeflate", "LZ4", "Zstd"] = "ANS"
    data_type: str | None = None
    algorithm_type: int | None = None
    lc_algorithm: str | None = None
    lc_meta_path: str | None = None


class Compression(_Model):
    """``kv_connector_extra_config["compression"]``, a custom one, and the ``compression_config`` of a profile."""

    enabled: bool = True
    pipeline: tuple[Literal["transformer", "quantizer", "codec"], ...] = ("quantizer", "codec")
    transformer_config: TransformerConfig = TransformerConfig()
    quantizer_config: QuantizerConfig = QuantizerConfig()
    codec_config: CodecConfig = CodecConfig()
    min_compress_size: int = Field(0, ge=0)
    impl: str | None = None
    quantizer_impl: str | None = None


class ProfileMetadata(_Model):
    """``metadata`` of a profile."""

    model_name: str
    dataset: str = "default"
    machine: str = ""
    config_id: str | int = ""
    source: str = ""
    input_length: int | None = None
    pipeline_components: tuple[str, ...] = ()


class Performance(_Model):
    """``performance_metrics``: MB/s that are MiB/s, of a harmonic mean. What is outside the limits was not measured."""

    compression_ratio: float = Field(gt=0, allow_inf_nan=False)
    harmonic_speed_mbps: float = Field(ge=1e-6, le=1e12)
    critical_bandwidth_mbps: float | None = None
    encode_speed_mbps: float | None = None
    decode_speed_mbps: float | None = None


def fraction(given: float) -> float:
    """Refuse what can only be a percentage: a relative accuracy is about 1 at best."""
    if not given <= MAX_ACCURACY:
        raise ValueError(f"{given:g} is no fraction of the raw accuracy; divide percentages by 100")
    return given


Accuracy = Annotated[float, Field(ge=0), AfterValidator(fraction)]


class Quality(_Model):
    """``quality_metrics``."""

    accuracy: Accuracy
    metric_name: str = Field("relative_accuracy", min_length=1)


class TheirProfile(_Model):
    """A member of ``pareto_profiles``; ``compression_config`` is a :class:`Compression`."""

    profile_id: str
    metadata: ProfileMetadata
    compression_config: Mapping[str, Any]
    performance_metrics: Performance
    quality_metrics: Quality


class Bucket(_Model):
    """A member of ``accuracy_buckets``, with :class:`TheirProfile`. Its intervals are no lower envelope: not read."""

    bucket_id: int | str
    acc_range: tuple[float, float]
    pareto_profiles: tuple[Mapping[str, Any], ...] = ()
    bandwidth_intervals: tuple[Mapping[str, Any], ...] = ()
    n_raw_in_bucket: int | None = None


class LibraryMetadata(_Model):
    """``library_metadata``."""

    model_name: str
    dataset: str = "default"
    machine: str = ""
    source: str = ""
    input_length: int | None = None
    num_profiles: int | None = None
    num_raw_profiles: int | None = None
    description: str = ""
    units: Any = None


class TheirLibrary(_Model):
    """A profile-library JSON, with :class:`Bucket`."""

    library_metadata: LibraryMetadata
    accuracy_buckets: tuple[Mapping[str, Any], ...]
