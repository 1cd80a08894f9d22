from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Run = Callable[..., Any]
Install = Callable[..., None]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (value["$ref"],) if isinstance(value.get("$ref"), str) else ()
        for inner in value.values():
            yield from references(inner)
    if isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_a_pipeline_takes_the_installed_components_by_slot(kvserve: Run, install: Install) -> None:
    install("good")
    schema = kvserve("schema").json
    slots = schema["$defs"]["Chain"]["properties"]
    assert slots["transforms"]["items"] == {"$ref": "#/$defs/transform"}
    assert slots["codec"]["$ref"] == "#/$defs/codec"
    bare, *options = schema["$defs"]["codec"]["oneOf"]
    names = [option["properties"]["name"]["const"] for option in options]
    assert {"raw", "zstd", "acme.rle"} <= set(names)
    assert "acme.fpga" not in names  # it cannot be used here
    assert "raw" in bare["enum"]
    assert "acme.rle" not in bare["enum"]  # it has a required field
    assert schema["$defs"]["codec.acme.rle"]["properties"]["longest"]["maximum"] == 255
    rle = options[names.index("acme.rle")]
    assert rle["required"] == ["name", "configuration"]


def test_every_reference_leads_somewhere(kvserve: Run, install: Install) -> None:
    install("good")
    for arguments in ((), ("codec",), ("transform",), ("transport",), ("policy",)):
        schema = kvserve("schema", *arguments).json
        found = set(references(schema))
        assert found <= {f"#/$defs/{name}" for name in schema["$defs"]}
    assert "ComponentSpec" not in kvserve("schema").json["$defs"]


def test_one_kind_by_itself(kvserve: Run, install: Install) -> None:
    install()
    schema = kvserve("schema", "policy").json
    assert {option["properties"]["name"]["const"] for option in schema["oneOf"][1:]} == {"analytic", "bandit", "static"}


def test_an_unknown_kind_gives_the_nearest(kvserve: Run) -> None:
    assert "did you mean 'codec'?" in kvserve("schema", "codecs").err
