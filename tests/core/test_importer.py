"""The importer on files of the reference implementation (tests/data/kvserve)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvserve_core.dialect_tables import nearest_row, read_scores, read_speeds
from kvserve_core.errors import ConfigError
from kvserve_core.importer import Import, import_library, import_pipeline, ranks
from kvserve_core.latency import critical_bandwidth, lower_envelope
from kvserve_core.library import Profile, ProfileLibrary
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import RAW_PIPELINE
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, whole
from kvserve_plugins.kernels.ranking import low_heads

DATA = Path(__file__).parents[1] / "data" / "kvserve"
SCORES = read_scores((DATA / "Qwen2.5-7B-Instruct_scores.csv").read_text())
CONFIGS = json.loads((DATA / "reference_configs.json").read_text())
LIBRARY = json.loads((DATA / "library_qwen7b_qasper_5090.json").read_text())
SPEEDS = read_speeds((DATA / "5090_Qwen2.5-7B-Instruct_speed.csv").read_text())


def qwen() -> KVSpec:
    planes = tuple(PlaneSpec(n, 4, (PlanePart(n, 128),), DType.BF16) for n in ("k", "v"))
    return KVSpec("qwen", (LayerGroup(0, tuple(range(28)), planes),))


def how(**given: Any) -> Import:
    return Import(**{"scores": SCORES, **given})


def quantizer(**config: Any) -> dict[str, Any]:
    return {"pipeline": ["quantizer", "codec"], "quantizer_config": config}


def test_the_default_configuration() -> None:
    spec = import_pipeline(CONFIGS["default"], how())
    k, v = spec.planes["k"], spec.planes["v"]
    assert k.transforms == v.transforms == ()
    assert k.codec.name == v.codec.name == "nvcomp_ans"
    assert k.quantizer.name == v.quantizer.name == "mixhq"
    keys, values = dict(k.quantizer.configuration), dict(v.quantizer.configuration)
    assert keys.pop("scores") == values.pop("scores") == ranks(SCORES)
    assert keys == {
        "low_ratio": 0.8,
        "high": {"name": "uniform", "configuration": {"levels": 12, "axis": "channel"}},
        "low": {"name": "uniform", "configuration": {"levels": 6, "axis": "channel"}},
    }
    assert [values[c]["configuration"] for c in ("high", "low")] == [
        {"levels": 8, "axis": "token"},
        {"levels": 4, "axis": "token"},
    ]
    assert spec.sink_tokens == spec.recent_tokens == 0


@pytest.mark.parametrize("name", ["default", "original_top_nvcomp", "fused_top_lc"])
def test_imported_pipelines_can_be_built(name: str) -> None:
    spec = import_pipeline(CONFIGS[name], how(codec="zstd"))
    built = Pipeline.build(spec, qwen(), whole(qwen()))
    assert not built.lossless
    assert any("codec:zstd" in stage for chain in built.chains for stage in chain)


def test_a_transformer_keeps_its_seed() -> None:
    k = import_pipeline(CONFIGS["original_top_nvcomp"], how()).planes["k"]
    assert [t.model_dump() for t in k.transforms] == [{"name": "hadamard", "configuration": {"seed": 0xC0FEBABE}}]
    given = {"pipeline": ["transformer", "quantizer"], "transformer_config": {"seed": "0x3333"}}
    assert import_pipeline(given, how()).planes["v"].transforms[0].configuration == {"seed": 0x3333}


def test_the_fused_kernel_always_rotates_and_drops_a_transformer() -> None:
    given = quantizer(impl="tilelang_fused")
    given |= {"pipeline": ["transformer", "quantizer", "codec"], "transformer_config": {"seed": 1}}
    (rotation,) = import_pipeline(given, how()).planes["k"].transforms
    assert rotation.configuration == {"seed": 0xC0FEBABE}


def test_one_level_count_for_both_classes_of_keys_needs_no_classes() -> None:
    config = import_pipeline(CONFIGS["fused_top_lc"], how(codec="zstd")).planes
    assert config["k"].quantizer.name == "uniform"
    assert config["v"].quantizer.name == "mixhq"


def test_values_with_one_range_for_all_heads() -> None:
    given = quantizer(value_token_mode="global", value_token_global_max_value=5)
    spec = import_pipeline(given, how())
    assert spec.planes["v"].quantizer.configuration == {"levels": 5, "axis": "token"}


def test_a_split_by_layers_ignores_the_ratio_as_the_reference_does() -> None:
    reading = how(scores=None)
    spec = import_pipeline(quantizer(split_type="layer", hybrid_ratio=0.9), reading)
    config = spec.planes["k"].quantizer.configuration
    assert (config["granularity"], config["low_ratio"]) == ("layer", 0.33)
    assert any("hybrid_ratio" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("given", "name"),
    [([2], "channel"), ([1, 3], "token"), ([3, 1], "token"), (3, "token"), ([1, 2, 3], "tensor"), ("token", "token")],
)
def test_axes_by_number_or_name(given: object, name: str) -> None:
    spec = import_pipeline(quantizer(axis_key=given), how())
    assert spec.planes["k"].quantizer.configuration["high"]["configuration"]["axis"] == name


def test_switched_off_and_codec_only() -> None:
    assert import_pipeline({"enabled": False}, how()) == RAW_PIPELINE
    only = import_pipeline({"pipeline": ["codec"], "codec_config": {"nvcomp_algorithm": "Bitcomp"}}, how())
    assert (only.planes["*"].quantizer.name, only.planes["*"].codec.name) == ("identity", "nvcomp_bitcomp")


def test_without_a_codec_codes_are_packed() -> None:
    reading = how()
    assert import_pipeline({"pipeline": ["quantizer"]}, reading).planes["k"].codec.name == "bitpack"
    assert any("bitpack" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            quantizer(high_key_max_valu=3),
            r"^c\.quantizer_config\.high_key_max_valu: .*mean 'high_key_max_value'",
        ),
        ({"pipelin": []}, r"^c\.pipelin: unknown key 'pipelin'; did you mean 'pipeline'"),
        (quantizer(high_key_max_value=1), r"^c\.quantizer_config\.high_key_max_value: "),
        (quantizer(axis_key=[0]), r"^c\.quantizer_config\.axis_key: .*none of \[2\]"),
        (quantizer(axis_key=[None, "x"]), r"^c\.quantizer_config\.axis_key: axes are numbers, got \[None, 'x'\]"),
        (quantizer(axis_key=[[1], [2]]), r"^c\.quantizer_config\.axis_key: axes are numbers"),
        (quantizer(axis_key=[True]), r"^c\.quantizer_config\.axis_key: axes are numbers"),
        (quantizer(base_seed="red"), r"^c\.quantizer_config\.base_seed: .*is not a number"),
        (quantizer(low_key_max_value=20), r"^c\.quantizer_config: 20 levels for low heads, only 16"),
        (quantizer(quant_type="absmax"), "absmax"),
        ({"pipeline": ["transformer", "codec"]}, "without a quantizer"),
        (CONFIGS["controller_mode"], "configures the controller"),
        (CONFIGS["fused_top_lc"], "--codec"),
        ([], "c: "),
    ],
)
def test_what_cannot_be_imported_is_named(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_pipeline(given, how(), "c")


def test_a_split_by_heads_needs_scores() -> None:
    with pytest.raises(ConfigError, match=r"^c\.quantizer_config\.split_type: .*--scores"):
        import_pipeline(CONFIGS["default"], Import(), "c")


def test_ranks_choose_the_heads_that_scores_choose() -> None:
    assert ranks([[0.5, 0.1], [0.5, 0.9]]) == [[1, 0], [1, 2]]
    both = (tuple(map(tuple, table)) for table in (SCORES, ranks(SCORES)))
    by_score, by_rank = (low_heads(table, 0.8) for table in both)
    assert by_score.tolist() == by_rank.tolist()


def test_many_scores_must_be_an_artefact() -> None:
    many = [[0.5] * 8] * 32
    with pytest.raises(ConfigError, match="more than 128 head scores"):
        import_pipeline(CONFIGS["default"], how(scores=many))
    spec = import_pipeline(CONFIGS["default"], how(scores=many, scores_artefact="abc"))
    assert spec.planes["k"].quantizer.configuration["scores_artefact"] == "abc"


@pytest.fixture
def imported() -> ProfileLibrary:
    return import_library(LIBRARY, how(codec="zstd"), "f" * 64)


def profile(library: ProfileLibrary, config: str) -> Profile:
    found = library.profile(f"qwen25-7b_qasper_5090_{config}")
    assert found is not None
    return found


def test_a_library_becomes_ours(imported: ProfileLibrary, tmp_path: Path) -> None:
    assert len(imported.profiles) == 12
    assert (imported.model_id, imported.device, imported.fingerprint) == ("Qwen2.5-7B-Instruct", "5090", "f" * 64)
    c1 = profile(imported, "c1")
    assert c1.cr == 8.6194
    record = c1.quality_for("qasper")
    assert record is not None
    assert (record.value, record.metric) == (0.982, "relative_accuracy")
    assert json.loads(imported.artefacts.read(c1.artefacts[0])) == SCORES
    imported.save(tmp_path / "q.kvlib")
    loaded = ProfileLibrary.load(tmp_path / "q.kvlib")
    assert loaded.model_dump(mode="json") == imported.model_dump(mode="json")
    built = Pipeline.build(c1.pipeline, qwen(), whole(qwen()), artefacts=loaded.artefacts)
    assert built.used_artefacts == set(c1.artefacts)
    assert profile(imported, "c15").artefacts == ()  # split by layers, so it reads no scores


def test_its_notes_name_every_correction(imported: ProfileLibrary) -> None:
    notes = " / ".join(imported.provenance["notes"])
    for said in ("MiB/s", "harmonic mean", "u8 codes", "levels - 1", "hybrid_ratio", "lower envelope", "accuracies"):
        assert said in notes


def test_aggregated_speeds_lose_the_factor_of_the_mean(imported: ProfileLibrary) -> None:
    c0 = profile(imported, "c0")
    both = c0.encode.s_per_byte + c0.decode.s_per_byte
    assert 1 / both == pytest.approx(36264.3407931457 * 2**20 / 2)


@pytest.mark.parametrize(
    ("config", "theirs", "factor"),
    [("c0", 36264, 1.77), ("c6", 38596, 1.82), ("c15", 61238, 1.71), ("c13", 55568, 1.64), ("c4", 26052, 1.83)],
)
def test_speeds_of_the_table_are_on_original_bytes(config: str, theirs: float, factor: float) -> None:
    """Their aggregate is 1.64 to 1.83 times too fast, by their own measurements."""
    library = import_library(LIBRARY, how(codec="zstd"), "f" * 64, speeds=SPEEDS)
    found = profile(library, config)
    ours = 1 / (found.encode.s_per_byte + found.decode.s_per_byte)
    assert theirs * 2**20 / ours == pytest.approx(factor, abs=0.01)


def test_the_threshold_of_their_profiles_falls_with_the_speed(imported: ProfileLibrary) -> None:
    c0 = profile(imported, "c0")
    ours = critical_bandwidth(c0.cr, 1 / (c0.encode.s_per_byte + c0.decode.s_per_byte))
    assert ours == pytest.approx(32080.396080928138 * 2**20 / 2)


def test_the_envelope_of_a_bucket_is_the_true_one(imported: ProfileLibrary) -> None:
    members = ("c14", "c12", "c9", "c3", "c5")
    lines = [profile(imported, c).line(2**30) for c in members]
    order = [members[i] for i in lower_envelope(lines).order]
    assert order == ["c14", "c12", "c3", "c5"]


@pytest.mark.parametrize(
    ("where", "key", "message"),
    [
        ((), "library_metadat", r"^library\.library_metadat: .*did you mean 'library_metadata'"),
        (("accuracy_buckets", 1), "bucket", r"^library\.accuracy_buckets\.1\.bucket: "),
        (("accuracy_buckets", 0, "pareto_profiles", 1), "profile", r"pareto_profiles\.1\.profile: .*'profile_id'"),
        (
            ("accuracy_buckets", 0, "pareto_profiles", 1, "compression_config"),
            "pipelines",
            r"compression_config\.p",
        ),
        (("accuracy_buckets", 0, "pareto_profiles", 0, "quality_metrics"), "acc", r"pareto_profiles\.0\.quality_metri"),
    ],
)
def test_unknown_keys_of_a_library_are_refused(where: tuple[str | int, ...], key: str, message: str) -> None:
    raw = json.loads(json.dumps(LIBRARY))
    inner = raw
    for step in where:
        inner = inner[step]
    inner[key] = 1
    with pytest.raises(ConfigError, match=message):
        import_library(raw, how(), "f" * 64)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("profile_id", "raw", r": the name 'raw' is reserved"),
        ("profile_id", "", r"\.profile_id: "),
        ("profile_id", "a b", r"\.profile_id: .*got 'a b'"),
        ("performance_metrics.compression_ratio", float("inf"), r"compression_ratio: .*finite"),
        ("performance_metrics.harmonic_speed_mbps", 1e-320, r"harmonic_speed_mbps: .*greater than"),
        ("performance_metrics.harmonic_speed_mbps", float("inf"), r"harmonic_speed_mbps: .*less than"),
        ("quality_metrics.accuracy", float("inf"), r"quality_metrics\.accuracy: inf is no fraction"),
        ("quality_metrics.accuracy", 95.0, r"quality_metrics\.accuracy: 95 is no fraction.*by 100"),
        ("quality_metrics.metric_name", "", r"quality_metrics\.metric_name: "),
    ],
)
def test_values_that_no_profile_has(where: str, value: object, message: str) -> None:
    raw = json.loads(json.dumps(LIBRARY))
    inner = raw["accuracy_buckets"][0]["pareto_profiles"][1]
    *steps, key = where.split(".")
    for step in steps:
        inner = inner[step]
    inner[key] = value
    with pytest.raises(ConfigError, match=r"^library\.accuracy_buckets\.0\.pareto_profiles\.1.*" + message):
        import_library(raw, how(), "f" * 64)


def test_two_profiles_of_one_name() -> None:
    raw = json.loads(json.dumps(LIBRARY))
    bucket = raw["accuracy_buckets"][0]["pareto_profiles"]
    bucket.append(bucket[0])
    place = rf"^library\.accuracy_buckets\.0\.pareto_profiles\.{len(bucket) - 1}\.profile_id: .* is also the id of"
    with pytest.raises(ConfigError, match=place):
        import_library(raw, how(), "f" * 64)


def test_components_must_be_in_the_speed_table() -> None:
    with pytest.raises(ConfigError, match=r"metadata: pipeline_components are \['quantizer', 'ans'\]"):
        import_library(LIBRARY, how(), "f" * 64, speeds={"ans": SPEEDS["ans"]})


def test_score_files(tmp_path: Path) -> None:
    assert (len(SCORES), len(SCORES[0])) == (28, 4)
    assert SCORES[0][0] == 0.16663034
    tsv = "1.000000000000000000e+00\t9.5e-01\n0.0\t5.0e-01\n"
    assert read_scores(tsv) == [[1.0, 0.95], [0.0, 0.5]]
    assert read_scores('{"scores": [[1, 2]], "provenance": {}}') == read_scores("[[1, 2]]") == [[1.0, 2.0]]


@pytest.mark.parametrize("text", ["", "1,2\n3\n", "1,a\n", "[1, 2]", "{}", "nan,1\n", "inf,1\n", "[[]]", "[broken"])
def test_what_is_no_table_of_scores(text: str) -> None:
    with pytest.raises(ConfigError, match="scores: "):
        read_scores(text)


def test_speed_tables() -> None:
    encode, decode = SPEEDS["ans"][4096]
    assert 1 / encode == pytest.approx(149 * 2 * 2**30, rel=0.01)  # 149 GB/s of codes, on half of the bytes
    assert 1 / decode == pytest.approx(156 * 2 * 2**30, rel=0.01)
    assert 1 / SPEEDS["hadamard"][4096][0] == pytest.approx(82 * 2**30, rel=0.01)
    assert nearest_row({10: (1.0, 1.0), 20: (2.0, 2.0)}, 15) == (1.0, 1.0)


@pytest.mark.parametrize("text", [f"[[{10**400}]]", "[" * 100_000, '["12", "34"]', '[["1", "2"]]', "[[true]]"])
def test_json_that_is_no_table_of_scores(text: str) -> None:
    with pytest.raises(ConfigError, match="scores: not a table"):
        read_scores(text)


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_speeds_are_numbers_above_0(rate: str) -> None:
    text = f"type,input_length,prefill_throughput(GB/s),decode_throughput(GB/s)\nans,4096,{rate},2\n"
    with pytest.raises(ConfigError, match=r"speeds: row 1: .*expected numbers above 0"):
        read_speeds(text)


@pytest.mark.parametrize("text", ["", "type,input_length\nans,1\n", "a\nb\n"])
def test_what_is_no_speed_table(text: str) -> None:
    with pytest.raises(ConfigError, match="speeds: "):
        read_speeds(text)
