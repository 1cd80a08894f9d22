"""The shipped reference library (Qwen2.5-7B, Qasper, RTX 5090) as its own controller prices it, and in true units."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvserve_core.dialect_tables import nearest_row, read_scores, read_speeds
from kvserve_core.importer import Import, import_library
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord, built_in
from kvserve_core.profile import RAW_CHAIN, PipelineSpec

DATA = Path(__file__).parents[2] / "tests" / "data" / "kvserve"
WORKLOAD = "qasper"
MB = 1e6
FREE_RAW = built_in("raw", 1.0, Speed(), Speed())
"""The reference has no cost for raw."""


def text(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def stored() -> dict[str, Any]:
    """The library file."""
    found: dict[str, Any] = json.loads(text("library_qwen7b_qasper_5090.json"))
    return found


def short(name: str) -> str:
    """``qwen25-7b_qasper_5090_c1`` -> ``c1``."""
    return name.rpartition("_")[2]


def buckets() -> dict[int, list[dict[str, Any]]]:
    """Its profiles by bucket."""
    return {b["bucket_id"]: b["pareto_profiles"] for b in stored()["accuracy_buckets"]}


def their_speed(components: list[str], length: int) -> float:
    """Bytes/s as the reference adds them up (MB from GB by 1000): harmonic means, so twice too fast, and codecs on u8
    codes, so twice too slow."""
    table = read_speeds(text("5090_Qwen2.5-7B-Instruct_speed.csv"))
    total = 0.0
    for name in components:
        encode, decode = table[name][length]  # seconds an original byte, of GB of 2^30
        codes = 2.0 if name in ("ans", "bitcomp") else 1.0
        total += (encode + decode) * codes / 2
    return 1e9 / 2**30 / total


def as_they_price(length: int) -> ProfileLibrary:
    """All 12 profiles and free raw; each way takes half of their ``V / S``."""
    return _library([_profile(p, their_speed(p["metadata"]["pipeline_components"], length)) for p in _all()])


def as_stored(bucket: int) -> ProfileLibrary:
    """One bucket with the speeds in the file (MB/s), and free raw."""
    found = [_profile(p, p["performance_metrics"]["harmonic_speed_mbps"] * MB) for p in buckets()[bucket]]
    return _library(found)


def in_true_units(length: int = 4096) -> ProfileLibrary:
    """Imported with the speeds of the machine at a length, and free raw: what a deployment would use."""
    how = Import(scores=read_scores(text("Qwen2.5-7B-Instruct_scores.csv")))
    speeds = read_speeds(text("5090_Qwen2.5-7B-Instruct_speed.csv"))
    speeds = {name: {length: nearest_row(rows, length)} for name, rows in speeds.items()}
    made = import_library(stored(), how, "", speeds=speeds)
    short_names = [p.model_copy(update={"name": short(p.name)}) for p in made.profiles]
    return made.model_copy(update={"profiles": (FREE_RAW, *short_names)})


def _all() -> list[dict[str, Any]]:
    return [p for bucket in buckets().values() for p in bucket]


def _profile(given: dict[str, Any], bytes_per_s: float) -> Profile:
    quality = given["quality_metrics"]["accuracy"]
    record = QualityRecord(value=quality, lower=quality, upper=quality, metric="relative_accuracy", samples=1)
    each = Speed.of(2 * bytes_per_s)
    return Profile(
        name=short(given["profile_id"]),
        pipeline=PipelineSpec(planes={"*": RAW_CHAIN}),
        cr=given["performance_metrics"]["compression_ratio"],
        encode=each,
        decode=each,
        quality={WORKLOAD: record},
    )


def _library(profiles: list[Profile]) -> ProfileLibrary:
    return ProfileLibrary(model_id="qwen", fingerprint="", device="5090", created="", profiles=(FREE_RAW, *profiles))
