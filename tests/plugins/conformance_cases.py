"""How each built-in component is put through the conformance kit: configurations, bounds and calibrated files.

A component that is not named here is checked in its default configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import Kind
from kvserve_core.registry import default_registry
from kvserve_core.testing import Subject
from plugins import klt_files
from plugins.rans_files import OWN_TABLES

GOLDEN = Path(__file__).parents[1] / "golden" / "components"
SCORES = [[0.1, 0.9, 0.2, 0.8], [0.7, 0.3, 0.6, 0.4], [0.5, 0.05, 0.95, 0.15]]


@dataclass(frozen=True)
class Setup:
    """Configurations to check, a promised error, and the files and the model that calibrated components are for.

    calibrated: makes what a calibrated component needs: ``configuration`` and fields of :class:`Subject`. labels: of
    the golden frame of a configuration other than the first.
    """

    configurations: tuple[Mapping[str, Any] | None, ...] = (None,)
    max_error: Callable[[Any, Any], Any] | None = None
    calibrated: Callable[[], dict[str, Any]] | None = None
    labels: Mapping[int, str] = field(default_factory=dict)


def klt_bases() -> dict[str, bytes]:
    """Bases per head, and over all heads, over all layers of a small model."""
    source, layers, heads = klt_files.Source(), klt_files.model().groups[0].layers, range(klt_files.HEADS)
    each = source.file([(layers, (head,)) for head in heads])
    return {"head": each, "all": source.file([(layers, tuple(heads))])}


def klt() -> dict[str, Any]:
    """The bases, and values like those they are made of."""
    model, source = klt_files.model(), klt_files.Source()
    artefacts = Artefacts()
    for data in klt_bases().values():
        artefacts.add(data)
    return {
        "artefacts": artefacts,
        "model": model,
        "plane": "kv",
        "sample": source.values,
    }


def own_tables() -> dict[str, Any]:
    """The published tables of ``rans``, and a file of others."""
    return {"artefacts": Artefacts({OWN_TABLES.digest: OWN_TABLES.data})}


SETUPS: dict[tuple[Kind, str], Setup] = {
    ("transport", "nccl"): Setup(({"backend": "gloo"},)),  # over NCCL both ends would need a GPU of their own
    ("transform", "hadamard"): Setup(max_error=lambda x, _: 2e-6 * x.norm(dim=-1, keepdim=True)),
    ("transform", "klt"): Setup(
        tuple({"basis": blake3(data).hexdigest(), "per": per} for per, data in klt_bases().items()),
        calibrated=klt,
    ),
    ("quantizer", "uniform"): Setup(
        (
            *({"axis": axis} for axis in ("channel", "token", "token_head", "tensor", "group")),
            {"levels": 1000, "param_dtype": "f32", "axis": "token_head"},
            {"levels": 12, "axis": "group", "group_size": 40},
        )
    ),
    ("quantizer", "mixhq"): Setup(
        (
            {"scores": SCORES},
            {"scores": SCORES, "low": None},
            {"scores": SCORES, "high": "bitplane", "low": "identity"},
            {"granularity": "layer", "scores": SCORES},
            {"granularity": "layer"},
            *({"granularity": "token", "token_score": score} for score in ("position", "low_norm", "high_norm")),
        )
    ),
    ("quantizer", "kivi"): Setup((None, {"axis": "channel_group"}, {"bits": 2, "group_size": 64})),
    ("quantizer", "cachegen"): Setup((None, {"axis": "token_head"})),
    ("quantizer", "fp8"): Setup((None, {"axis": "channel"})),
    ("quantizer", "turboquant"): Setup((None, {"bits": 2, "norm_correction": False})),
    ("transform", "affine"): Setup((None, {"scale": "max", "shift": False})),
    ("transform", "delta"): Setup((None, {"group_tokens": 32})),
    ("codec", "zstd"): Setup((None, {"level": 1})),
    ("codec", "rans"): Setup((None, {"tables": OWN_TABLES.digest}), calibrated=own_tables, labels={1: "tables"}),
    ("policy", "static"): Setup(({"profile": "lossless"},)),
}


class Row(NamedTuple):
    """A component in one of its configurations."""

    kind: Kind
    name: str
    index: int


def built_ins() -> list[tuple[Kind, str]]:
    """What kvserve comes with."""
    manifests = default_registry().manifests.items()
    return [key for key, manifest in manifests if manifest.provider.built_in]


def rows() -> list[Row]:
    """Every built-in in every configuration to be checked."""
    return [Row(*key, i) for key in built_ins() for i in range(len(SETUPS.get(key, Setup()).configurations))]


def label_of(row: Row) -> str:
    """Of a further golden frame; empty for none."""
    return SETUPS.get((row.kind, row.name), Setup()).labels.get(row.index, "")


def subject(row: Row, folder: Path | None = None) -> Subject:
    """The component as the kit takes it. ``folder``: for a transport that needs one."""
    setup = SETUPS.get((row.kind, row.name), Setup())
    more: dict[str, Any] = setup.calibrated() if setup.calibrated else {}
    configuration = more.pop("configuration", setup.configurations[row.index])
    if (row.kind, row.name) == ("transport", "file"):
        configuration = {"path": str(folder)}
    if setup.max_error is not None:
        more["max_error"] = setup.max_error
    if row.index == 0 and row.kind in ("transform", "quantizer", "codec"):
        more["golden"] = GOLDEN
    return Subject.of(row.kind, row.name, configuration, **more)
