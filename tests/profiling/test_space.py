from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from kvserve_core.decoder import Decoder
from kvserve_core.errors import ConfigError, UnknownNameError
from kvserve_core.pipeline import Pipeline
from kvserve_core.plugins import ENTRY_POINT_GROUP, load_plugins
from kvserve_core.profiling.build import build_space
from kvserve_core.profiling.calibrated import Calibrated
from kvserve_core.profiling.families import SpaceConfig, named, shipped
from kvserve_core.profiling.space import Space, fingerprint, share
from kvserve_core.registry import Registry, default_registry
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, RopeSpec, whole
from plugin_folders import BUILT_INS

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "kvserve-example"
DOCUMENT = EXAMPLE.parents[1] / "profiling.md"
HEADS = Calibrated("heads", "a" * 64)
BASES = [Calibrated("klt-head-15", "b" * 64, 15, {"per": "head"}), Calibrated("klt-all-5", "c" * 64, 5, {"per": "all"})]
LEVELS = {"$try": [8, 4]}


def model() -> KVSpec:
    rope = RopeSpec(tuple(0.1**i for i in range(8)), 16, "neox")
    planes = (
        PlaneSpec("k", 2, (PlanePart("k", 16, rope),), DType.BF16),
        PlaneSpec("v", 2, (PlanePart("v", 16),), DType.BF16),
    )
    return KVSpec("m", (LayerGroup(0, (0, 1), planes),))


def uniform(levels: Any = LEVELS, **configuration: Any) -> dict[str, Any]:
    return {"name": "uniform", "configuration": {"levels": levels, "axis": "token_head", **configuration}}


def config(*families: dict[str, Any], **fields: Any) -> SpaceConfig:
    return SpaceConfig.parse({"families": families, **fields})


def slots(quantizer: Any = None, codec: Any = ("bitpack",), **fields: Any) -> dict[str, Any]:
    return {"quantizer": [quantizer or uniform()], "codec": list(codec), **fields}


def family(**fields: Any) -> dict[str, Any]:
    return {"name": "f", "planes": {"k": slots(), "v": slots()}} | fields


@pytest.fixture
def with_example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The registry of somebody who installed the example package."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    point = EntryPoint("example", "kvserve_example", ENTRY_POINT_GROUP)
    yield Registry(load_plugins([point, *BUILT_INS], {}))
    for name in [m for m in sys.modules if m.startswith("kvserve_example")]:
        del sys.modules[name]


def test_planes_are_searched_apart_and_beside_them_exempt_tokens_and_protected_layers() -> None:
    made = build_space(config(family(sink_tokens=[0, 4], raw_layers=[[], [0, -1]], layer_block=[1, 2])))
    points = made.points()
    assert made.count() == len(points) == 2 * 2 * 2 * 2 * 2
    assert {p.spec.sink_tokens for p in points} == {0, 4}
    assert {p.spec.raw_layers for p in points} == {(), (0, -1)}
    both = {(p.at["k.uniform.levels"], p.at["v.uniform.levels"]) for p in points}
    assert both == {(8, 8), (8, 4), (4, 8), (4, 4)}
    assert points[0].name == "f-k.levels8-v.levels8-layer_block1-sink_tokens0-raw_layers-none"


def test_one_chain_may_serve_both_planes() -> None:
    points = build_space(config(family(planes={"kv": slots()}))).points()
    assert [list(p.spec.planes) for p in points] == [["kv"], ["kv"]]


def test_what_planes_share_is_one_dimension() -> None:
    both = slots(codec=["bitpack", "rans"])
    made = build_space(config(family(planes={"k": both, "v": both}, same=["codec", "uniform.levels"])))
    points = made.points()
    assert made.count() == len(points) == 4
    assert {(p.at["codec"], p.at["uniform.levels"]) for p in points} == {
        ("bitpack", 8),
        ("bitpack", 4),
        ("rans", 8),
        ("rans", 4),
    }
    assert all(p.spec.planes["k"].codec == p.spec.planes["v"].codec for p in points)


def test_the_reference_space_has_its_144_pipelines_and_none_with_high_below_low() -> None:
    made = build_space(shipped().model_copy(update={"only": ("reference",)}), calibrated=[HEADS])
    points = made.points()
    assert made.count() == len(points) == 144
    assert {p.at["mixhq.low_ratio"] for p in points} == {0.3, 0.5, 0.7, 0.9}
    assert all(p.spec.planes["k"].quantizer.configuration["scores_artefact"] == HEADS.digest for p in points)
    mixed = shipped().model_dump()["families"][0]
    for slot in mixed["planes"].values():
        slot["quantizer"][0]["configuration"]["low"]["configuration"]["levels"] = {"$try": [10, 4]}
    narrower = build_space(config(mixed), calibrated=[HEADS])
    assert narrower.count() == 4 * (2 + 3) ** 2  # of 3 x 2 pairs of levels a plane, 8 >= 10 is none
    for p in narrower.points():
        assert p.at["k.mixhq.high.levels"] >= p.at["k.mixhq.low.levels"]  # type: ignore[operator]  # both numbers


def test_a_family_is_made_once_for_each_calibrated_file() -> None:
    made = build_space(shipped().model_copy(update={"only": ("klt",)}), calibrated=BASES)
    assert [f.name for f in made.families] == ["klt-all-5", "klt-head-15"]
    for f in made.families:
        spec = f.point(0).spec
        configuration = spec.planes["kv"].transforms[0].configuration
        file = next(b for b in BASES if b.name == f.name)
        assert (configuration["basis"], configuration["per"]) == (file.digest, file.about["per"])
        assert spec.layer_block == file.layer_block
        step = spec.planes["kv"].quantizer.configuration["step"]
        assert configuration["cutoff"] == pytest.approx(0.12 * step)


def test_what_was_not_calibrated_is_left_out_with_the_reason() -> None:
    left = build_space(shipped()).left_out
    assert left["klt"] == "needs a calibrated file 'klt'; there are: none; make it with 'kvserve calibrate'"
    unknown = build_space(shipped(), calibrated=[Calibrated("klt-x", "d" * 64)]).left_out
    assert unknown["klt"] == "'per' of the calibrated file 'klt-x' is not known; calibrate it again"


def test_a_third_partys_component_joins_by_being_installed(with_example: Registry) -> None:
    assert "installed" in build_space(shipped(), registry=default_registry()).left_out
    joined = build_space(shipped(), registry=with_example)
    points = joined.points(2000)
    quantized = [p for p in points if p.at["family"] == "installed"]
    assert {p.at["*.quantizer"] for p in quantized} == {"example.sign"}
    assert {p.at["*.example.sign.axis"] for p in quantized} == {"token", "channel"}  # its Tunable field
    assert "example.rle" in {p.at["codec"] for p in points if p.at["family"] == "minmax"}
    without = shipped().model_copy(update={"without": (*shipped().without, "example.sign", "example.rle")})
    assert build_space(without, registry=with_example).count() == build_space(shipped()).count()


def test_a_component_that_cannot_be_made_without_being_told_is_counted_with_the_reason() -> None:
    made = build_space(config(family(planes={"*": slots({"name": "*"})})))
    mixhq = [why for why in made.dropped() if "give scores or scores_artefact" in why]
    assert len(mixhq) == 1


def test_a_third_partys_component_that_cannot_be_searched_is_left_out_with_the_reason(
    with_example: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = with_example.load("quantizer", "example.sign").Config
    extra = {"tunable": {"choices": [Path("a"), Path("b")], "low": None, "high": None, "log": False}}
    monkeypatch.setattr(odd.model_fields["axis"], "json_schema_extra", extra)
    made = build_space(shipped(), registry=with_example)
    assert "installed" in made.left_out
    assert "is no JSON value" in made.left_out["installed"]
    assert made.count() > 1000


def test_chains_that_cannot_run_are_dropped_with_the_reason() -> None:
    made = build_space(config(family(planes={"*": slots(uniform({"$try": [300, 4]}), codec=["zstd", "nvcomp_ans"])})))
    reasons = " ".join(made.dropped())
    assert "nvcomp_ans" in reasons
    assert {p.at["*.codec"] for p in made.points()} == {"zstd"}
    here = build_space(config(family(planes={"*": slots(codec=["zstd"])})), device="cuda")
    assert here.left_out["f"] == "codec 'zstd' does not run on 'cuda'"
    exact = {"name": "bitplane"}
    after = slots(exact, codec=["zstd"], transforms=[["hadamard"]])
    refused = build_space(config(family(planes={"*": after}))).left_out["f"]
    assert refused == "an exact quantizer cannot follow a transform that is not exact"


def test_a_plane_that_a_component_does_not_take_is_dropped() -> None:
    klt = {"name": "klt", "configuration": {"basis": "b" * 64, "cutoff": 0.1}}
    latent = build_space(config(family(planes={"latent": slots(transforms=[[klt]])})))
    assert latent.left_out["f"] == "transform 'klt' does not take plane 'latent'"


def test_a_model_refuses_what_does_not_fit_it() -> None:
    wanted = family(planes={"k": slots(transforms=[[], ["derope"]]), "v": slots(transforms=[[], ["derope"]])})
    assert build_space(config(wanted)).count() == 16
    made = build_space(config(wanted), kv=model())
    assert made.count() == 8  # V has no positions to undo
    assert {p.at["v.transforms"] for p in made.points()} == {"none"}
    latent = build_space(config(family(planes={"latent": slots()})), kv=model())
    assert "this model has no plane 'latent'" in latent.left_out["f"]


def test_every_shipped_family_gives_pipelines_that_run() -> None:
    kv = model()
    made = build_space(shipped(), kv=kv)
    torch.manual_seed(0)
    for f in made.families:
        for p in (f.point(0), f.point(f.size - 1)):
            pipeline = Pipeline.build(p.spec, kv, whole(kv))
            header, plan = pipeline.header("r", 300, p.name)
            x = {q.at: torch.randn(len(q.at.layers), len(q.at.heads), q.at.num_tokens, 16).bfloat16() for q in plan}
            back = Decoder(header, kv).decode(pipeline.encode([(q, x[q.at]) for q in plan]))
            assert {q.at for q in plan} == {at for at, _ in back}


def test_thousands_are_listed_with_names_that_a_profile_may_have() -> None:
    made = build_space(shipped(), calibrated=[HEADS, *BASES])
    points = made.points()
    assert made.count() == len(points) > 2000
    assert len({p.key for p in points}) == len({p.name for p in points}) == len(points)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", p.name) for p in points)
    assert len({p.at["family"] for p in points}) >= 8


def test_a_limit_is_shared_evenly_and_drawn_by_the_seed() -> None:
    made = build_space(shipped())
    few, again, other = made.points(100, 1), made.points(100, 1), made.points(100, 2)
    assert len(few) == 100
    assert [p.key for p in few] == [p.key for p in again]
    assert fingerprint(few) == fingerprint(again) != fingerprint(other)
    count = {f.name: sum(p.at["family"] == f.name for p in few) for f in made.families}
    assert count["fp8"] == 8
    assert max(count.values()) - min(n for name, n in count.items() if name != "fp8") <= 1


@pytest.mark.parametrize(
    ("sizes", "total", "shares"),
    [([2, 100, 100], 50, [2, 24, 24]), ([5, 5], 100, [5, 5]), ([9, 9, 9], 10, [3, 3, 4]), ([3], 2, [2])],
)
def test_shares(sizes: list[int], total: int, shares: list[int]) -> None:
    assert share(sizes, total) == shares


def test_a_space_too_large_to_list_is_counted_and_sampled() -> None:
    wide = uniform({"$try": list(range(2, 202))}, axis={"$try": ["token", "channel", "token_head", "tensor"]})
    planes = {"k": slots(wide), "v": slots(wide)}
    made = build_space(config(family(planes=planes, sink_tokens=list(range(8)))))
    assert made.count() == 800 * 800 * 8
    with pytest.raises(ConfigError, match="5120000 pipelines; give a limit of at most"):
        made.points()
    assert len(made.points(500)) == 500


def test_an_empty_space_says_why() -> None:
    empty = build_space(shipped().model_copy(update={"only": ("klt",)}))
    assert isinstance(empty, Space)
    with pytest.raises(ConfigError, match=r"empty \(klt: needs a calibrated file"):
        empty.points()


def test_text_that_is_wrong_is_refused_where_it_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="families: names of families must differ, but 'f'"):
        config(family(), family())
    with pytest.raises(UnknownNameError, match="unknown quantizer 'unifrom'; did you mean 'uniform'"):
        build_space(config(family(planes={"*": slots({"name": "unifrom"})})))
    with pytest.raises(ConfigError, match=r"families\.0\.sinks: unknown field 'sinks'|did you mean 'sink_tokens'"):
        config(family(sinks=[4]))
    with pytest.raises(ConfigError, match=r"families\.0\.layer_block\.0: .*greater than or equal to 1"):
        config(family(layer_block=[0]))
    with pytest.raises(ConfigError, match="unknown family 'g'; allowed: f"):
        config(family(), only=["g"])
    with pytest.raises(ConfigError, match=r"families\.f: planes names 'kv' and \['k'\]"):
        build_space(config(family(planes={"k": slots(), "kv": slots()}))).points()
    path = tmp_path / "space.toml"
    path.write_text('[[families]]\nname = "f"\n[families.planes.k]\nquantizer = ["fp8"]\ncodec = ["raw"]\n')
    assert build_space(SpaceConfig.read(path)).count() == 2
    path.write_text("[[", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"space\.toml: cannot be read"):
        SpaceConfig.read(path)


def test_the_family_in_the_document_is_one() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").split("```json\n")[1].partition("```")[0]
    made = build_space(SpaceConfig.parse(json.loads(text)), calibrated=[HEADS])
    assert made.left_out == {}
    assert not made.dropped()
    assert all(p.at["k.mixhq.high.levels"] >= p.at["k.mixhq.low.levels"] for p in made.points(200))  # type: ignore[operator]  # numbers


def test_the_shipped_families_name_all_that_is_built_in() -> None:
    """So that ``*`` stands for what others install, and a new built-in is put somewhere on purpose."""
    registry = Registry(load_plugins(list(BUILT_INS), {}))
    for kind in ("quantizer", "codec"):
        assert set(registry.names(kind)) <= named(shipped())  # type: ignore[arg-type]  # both are kinds
    assert {"affine", "center", "derope", "hadamard", "klt"} <= named(shipped())
