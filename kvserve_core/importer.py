"""From the dialect of the KVServe reference implementation to ours: pipelines, head scores, profile libraries.

What is known to be wrong there is put right and said in ``notes``: units of its speeds, a code beyond the levels, a
ratio that a split by layers ignores. Its intervals are dropped, since the controller computes the lower envelope.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ComponentSpec, config_error
from kvserve_core.dialect import Bucket, Compression, Performance, QuantizerConfig, TheirLibrary, TheirProfile
from kvserve_core.dialect_tables import Scores, SpeedTable, nearest_row
from kvserve_core.errors import ConfigError
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord
from kvserve_core.profile import RAW_PIPELINE, Chain, PipelineSpec

ModelT = TypeVar("ModelT", bound=BaseModel)
FUSED_SEED = 0xC0FEBABE
LAYER_RATIO = 0.33
"""The share of layers that a split by layers makes low there, whatever ``hybrid_ratio`` says."""
MIB = 2**20
INLINE_HEADS = 128
THEIRS = {"name": "profile_id"}
"""Fields of a profile of ours that are called otherwise in their file."""
DEFAULT_LENGTH = 4096
"""Input length, in tokens, of a library that names none."""


@dataclass
class Import:
    """How to read a file. scores: ``[L][H]`` of the model, for splits by heads; scores_artefact: the hash of
    a file that holds them. codec: instead of the file's.

    notes: what was corrected or could not be kept, each once.
    """

    scores: Scores | None = None
    codec: str | None = None
    scores_artefact: str | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def score_fields(self, path: str) -> dict[str, Any]:
        """What a ``mixhq`` by heads needs: the artefact, or the scores inline, as ranks since only their order counts.

        Raises:
            ConfigError: there are no scores, or too many for a frame's header.
        """
        if self.scores_artefact is not None:
            return {"scores_artefact": self.scores_artefact}
        if self.scores is None:
            raise ConfigError("a split by heads needs the model's head scores; give the score file with --scores", path)
        if not fits_inline(self.scores):
            raise ConfigError(f"more than {INLINE_HEADS} head scores must be an artefact; set 'scores_artefact'", path)
        return {"scores": ranks(self.scores)}


def fits_inline(scores: Scores) -> bool:
    """Whether a frame's header has room for them, once for each plane."""
    return sum(map(len, scores)) <= INLINE_HEADS


def ranks(scores: Scores) -> list[list[int]]:
    """Scores by their place among all; equal ones stay equal."""
    place = {score: i for i, score in enumerate(sorted({x for row in scores for x in row}))}
    return [[place[x] for x in row] for row in scores]


def import_pipeline(raw: object, how: Import, path: str = "compression") -> PipelineSpec:
    """A compression configuration as a pipeline.

    Raises:
        ConfigError: an unknown key or value, or something that has no counterpart; names its path.
    """
    if isinstance(raw, Mapping) and raw.get("mode") == "controller":
        raise ConfigError(
            "this configures the controller: import the library that 'library_path' names, and set 'library',"
            " 'min_quality' and 'slo' in kvserve's own settings",
            path,
        )
    return _pipeline(_parse(Compression, raw, path), how, path)


def _pipeline(given: Compression, how: Import, path: str) -> PipelineSpec:
    if not given.enabled:
        return RAW_PIPELINE
    if "quantizer" not in given.pipeline:
        return _lossless(given, how, path)
    cfg = given.quantizer_config
    fused = "tilelang_fused" in (cfg.impl, given.impl, given.quantizer_impl)
    if cfg.quant_type == "absmax":
        raise ConfigError("'absmax' is a legacy mode of one kernel and has no counterpart", f"{path}.quantizer_config")
    transforms = _transforms(given, fused)
    how.note("codes stop at levels - 1: the reference clips one code later, so it can emit a code too many")
    codec = _codec(given, how, path)
    planes = {
        plane: Chain(transforms=transforms, quantizer=_quantizer(cfg, plane, how, path), codec=codec)
        for plane in ("k", "v")
    }
    return PipelineSpec(planes=planes, sink_tokens=0)


def _lossless(given: Compression, how: Import, path: str) -> PipelineSpec:
    if "transformer" in given.pipeline:
        raise ConfigError("a transformer without a quantizer changes values and saves nothing", f"{path}.pipeline")
    chain = Chain(quantizer=ComponentSpec(name="identity"), codec=_codec(given, how, path))
    return PipelineSpec(planes={"*": chain}, sink_tokens=0)


def _transforms(given: Compression, fused: bool) -> tuple[ComponentSpec, ...]:
    """The fused kernel rotates in any case, with a seed of its own, and drops a transformer before it."""
    cfg, transformer = given.quantizer_config, given.transformer_config
    if fused:
        seed = cfg.base_seed if cfg.base_seed is not None else cfg.seed if cfg.seed is not None else FUSED_SEED
    elif "transformer" in given.pipeline and transformer.transform_type == "hadamard":
        seed = transformer.seed
    else:
        return ()
    return (ComponentSpec(name="hadamard", configuration={"seed": seed}),)


def _codec(given: Compression, how: Import, path: str) -> ComponentSpec:
    if how.codec is not None:
        return ComponentSpec(name=how.codec)
    if "codec" not in given.pipeline:
        how.note("without a codec codes are packed ('bitpack'); the reference sends a byte a code")
        return ComponentSpec(name="bitpack")
    if given.codec_config.codec_type == "lc":
        raise ConfigError(
            "the LC framework has no counterpart; name a codec with --codec, for example nvcomp_ans or zstd",
            f"{path}.codec_config.codec_type",
        )
    return ComponentSpec(name=f"nvcomp_{given.codec_config.nvcomp_algorithm.lower()}")


def _quantizer(cfg: QuantizerConfig, plane: str, how: Import, path: str) -> ComponentSpec:
    high, low, axis = (
        (cfg.high_key_max_value, cfg.low_key_max_value, cfg.axis_key)
        if plane == "k"
        else (cfg.high_value_max_value, cfg.low_value_max_value, cfg.axis_value)
    )
    if plane == "v" and cfg.value_token_mode == "global":
        return _uniform(cfg.value_token_global_max_value or high, "token")
    if high < low:
        raise ConfigError(f"{low} levels for low heads, only {high} for the others", f"{path}.quantizer_config")
    if high == low and axis == "channel":
        return _uniform(high, axis)  # the classes coincide
    both = {"high": _uniform(high, axis).model_dump(), "low": _uniform(low, axis).model_dump()}
    if cfg.split_type == "layer":
        how.note(f"a split by layers makes the last {LAYER_RATIO:.0%} low: the reference ignores 'hybrid_ratio' there")
        return ComponentSpec(name="mixhq", configuration={"granularity": "layer", "low_ratio": LAYER_RATIO, **both})
    scores = how.score_fields(f"{path}.quantizer_config.split_type")
    return ComponentSpec(name="mixhq", configuration={"low_ratio": cfg.hybrid_ratio, **scores, **both})


def _uniform(levels: int, axis: str) -> ComponentSpec:
    return ComponentSpec(name="uniform", configuration={"levels": levels, "axis": axis})


def import_library(
    raw: object, how: Import, fingerprint: str, model_id: str | None = None, speeds: SpeedTable | None = None
) -> ProfileLibrary:
    """A profile library; head scores become an artefact of it.

    fingerprint: of our KVSpec of the model, which the file cannot know. speeds: of its machine, to replace its
    aggregated speeds.

    Raises:
        ConfigError: an unknown key or value; names its path.
    """
    theirs = _parse(TheirLibrary, raw, "library")
    artefacts = Artefacts()
    if how.scores is not None:
        how.scores_artefact = artefacts.add(json.dumps([list(row) for row in how.scores]).encode())
    buckets = {f"library.accuracy_buckets.{i}": bucket for i, bucket in enumerate(theirs.accuracy_buckets)}
    parsed = {path: _parse(Bucket, bucket, path) for path, bucket in buckets.items()}
    found = {
        f"{path}.pareto_profiles.{j}": p
        for path, bucket in parsed.items()
        for j, p in enumerate(bucket.pareto_profiles)
    }
    profiles = _distinct({path: _profile(p, how, speeds, path) for path, p in found.items()})
    if any(bucket.bandwidth_intervals for bucket in parsed.values()):
        how.note("bandwidth intervals are dropped: the controller computes the lower envelope, which they are not")
    how.note("accuracies come without an interval: 'lower' repeats the value, so leave a margin in min_quality")
    how.note("compression ratios are kept; the reference counts too little metadata, so they are optimistic")
    about = theirs.library_metadata
    library = _made(
        ProfileLibrary,
        "library",
        model_id=model_id or about.model_name,
        fingerprint=fingerprint,
        device=about.machine or "unknown",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance={"imported_from": about.model_dump(mode="json"), "notes": list(how.notes)},
        profiles=tuple(profiles),
    )
    return library.with_artefacts(artefacts)


def _profile(raw: object, how: Import, speeds: SpeedTable | None, path: str) -> Profile:
    theirs = _parse(TheirProfile, raw, path)
    pipeline = import_pipeline(theirs.compression_config, how, f"{path}.compression_config")
    encode, decode = _speeds(theirs, how, speeds, path)
    quality, used = theirs.quality_metrics, how.scores_artefact
    bounds = dict.fromkeys(("value", "lower", "upper"), quality.accuracy)
    record = QualityRecord(**bounds, metric=quality.metric_name, samples=1)
    reads = used is not None and used in pipeline.model_dump_json()
    return _made(
        Profile,
        path,
        name=theirs.profile_id,
        pipeline=pipeline,
        cr=theirs.performance_metrics.compression_ratio,
        encode=encode,
        decode=decode,
        quality={theirs.metadata.dataset: record},
        artefacts=(used,) if used is not None and reads else (),
        notes="imported",
    )


def _distinct(profiles: Mapping[str, Profile]) -> list[Profile]:
    """Profiles by their place in the file, each of a name of its own.

    Raises:
        ConfigError: two have the same name.
    """
    first: dict[str, str] = {}
    for path, profile in profiles.items():
        if (other := first.setdefault(profile.name, path)) != path:
            raise ConfigError(f"{profile.name!r} is also the id of {other}; rename one", f"{path}.profile_id")
    return list(profiles.values())


def _made(model: type[ModelT], where: str, **fields: Any) -> ModelT:
    """One of ours from values of theirs that are valid there.

    Raises:
        ConfigError: not valid here, as the name of a profile may be; ``where`` is its place in their file.
    """
    try:
        return model(**fields)
    except ValidationError as error:
        found = config_error(error, model, fields)
        raise ConfigError(found.reason, THEIRS.get(found.path, found.path)).under(where) from None


def _speeds(theirs: TheirProfile, how: Import, speeds: SpeedTable | None, path: str) -> tuple[Speed, Speed]:
    if speeds is None:
        return _corrected(theirs.performance_metrics, how)
    parts = [name.lower() for name in theirs.metadata.pipeline_components]
    missing = [name for name in parts if name not in speeds]
    if missing or not parts:
        raise ConfigError(f"pipeline_components are {parts}, the speed table has {sorted(speeds)}", f"{path}.metadata")
    rows = [nearest_row(speeds[name], theirs.metadata.input_length or DEFAULT_LENGTH) for name in parts]
    how.note("speeds are those of the table: GB of 2^30 bytes, codecs on original bytes, no factor 2 of the mean")
    return Speed(0.0, sum(encode for encode, _ in rows)), Speed(0.0, sum(decode for _, decode in rows))


def _corrected(given: Performance, how: Import) -> tuple[Speed, Speed]:
    """``S = 2 / (1/e + 1/d)`` in MiB/s: shared evenly, each way costs ``1 / S`` and both cost twice that."""
    how.note("speeds are MiB/s and a harmonic mean, twice too fast: encoding and decoding each get 1 / S seconds")
    how.note("a codec's share of these speeds counts u8 codes and is left too slow; give the speed table for better")
    each = Speed(0.0, 1 / (given.harmonic_speed_mbps * MIB))
    return each, each


def _parse(model: type[ModelT], raw: object, path: str) -> ModelT:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise config_error(error, model, raw, "key").under(path) from None
