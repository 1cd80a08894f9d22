"""The document's tables against the code: offsets, sizes, keys and bounds."""

from __future__ import annotations

import re
import struct
from itertools import accumulate
from pathlib import Path

import msgspec
import pytest

from kvserve_core import bodies, container, payload, wire
from kvserve_core.spec import DType

DOCUMENT = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
DESCRIPTOR = wire._DESCRIPTOR.format + wire._DIGEST.format.removeprefix("<")
STRUCTS = {
    "prelude": wire._PRELUDE.format,
    "descriptor": DESCRIPTOR,
    "entry": container._ENTRY.format,
    "trailer": container._TRAILER.format,
}


def table(marker: str) -> list[list[str]]:
    """Cells of the rows of the table that follows a comment."""
    after = DOCUMENT.split(f"<!-- {marker} -->\n", 1)[1]
    lines = after.split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def sizes(layout: str) -> list[int]:
    return [struct.calcsize("<" + code) for code in re.findall(r"\d*s|[A-Z]", layout.removeprefix("<"))]


@pytest.mark.parametrize("name", STRUCTS)
def test_layouts(name: str) -> None:
    rows = table(f"layout: {name}")
    expected = sizes(STRUCTS[name])
    assert [int(row[1]) for row in rows] == expected
    assert [int(row[0]) for row in rows] == [0, *accumulate(expected)][:-1]


def test_totals() -> None:
    assert [sum(sizes(STRUCTS[n])) for n in STRUCTS] == [32, 48, 48, 64]
    assert f"{wire.PRELUDE_BYTES} bytes of prelude" in DOCUMENT
    assert f"{wire.DESCRIPTOR_BYTES} bytes of descriptor" in DOCUMENT
    assert container.ENTRY_BYTES == 48
    assert f"the last {container.TRAILER_BYTES} bytes of the file" in DOCUMENT


def test_an_entry_repeats_the_descriptor() -> None:
    ours, theirs = table("layout: entry")[2:], table("layout: descriptor")
    assert [row[1:3] for row in ours] == [row[1:3] for row in theirs[:10] + theirs[-1:]]


def test_header_keys() -> None:
    assert [row[0].strip("`") for row in table("fields: header")] == list(wire.FrameHeader.__struct_fields__)


@pytest.mark.parametrize(("name", "struct_"), [("param", payload.ParamMeta), ("stream", payload.PartMeta)])
def test_metadata_fields(name: str, struct_: type[msgspec.Struct]) -> None:
    rows = table(f"fields: {name}")
    assert [row[1].strip("`") for row in rows] == list(struct_.__struct_fields__)
    assert [int(row[0]) for row in rows] == list(range(len(rows)))


def test_dtypes() -> None:
    assert set(re.findall(r"`(\w+)`", table("fields: param")[1][3])) == {d.value for d in DType}


def test_bounds() -> None:
    numbers = [int(row[1].split()[0]) for row in table("bounds")]
    assert numbers == [
        4096,
        wire.MAX_HEADER,
        wire.MAX_META,
        wire.MAX_SEGMENTS,
        wire.MAX_SEGMENT_BYTES,
        payload.MAX_NDIM,
    ]


def test_constants_in_the_text() -> None:
    major, minor = wire.VERSION
    for text in (
        f"format version {major}.{minor}",
        f"pieces of {bodies.PIECE} bytes",
        f"multiple of {wire.ALIGN} bytes",
        f"multiple of {payload.PIECE_ALIGN} bytes",
        f"at most {wire.MAX_PLANES}, each once",
        f"below {wire.MAX_ID}",
        f"0x{bodies._SEED_STEP:X}",
    ):
        assert text in DOCUMENT
    magic = {name: table(f"layout: {name}")[0][3].strip("`") for name in ("prelude", "trailer")}
    assert magic["prelude"].encode().decode("unicode_escape").encode() == wire.MAGIC
    assert magic["trailer"].encode().decode("unicode_escape").encode() == container.END_MAGIC
