"""A library as a page: what is in it, that it stands alone, and that a browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from kvserve_core.cli import main
from kvserve_core.errors import ConfigError
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord
from kvserve_core.profile import PipelineSpec
from kvserve_core.report import page, read, write_html, write_png
from kvserve_core.report.data import best_so_far, frontier

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TRACE: list[dict[str, Any]] = [
    {"name": "a", "cr": 3.0, "quality": 0.999, "low": 0.998, "high": 1.0, "chains": {"*": "uniform + zstd"}},
    {"name": "b", "cr": 9.0, "quality": 0.95, "low": 0.94, "high": 0.96, "chains": {"*": "hadamard + uniform + zstd"}},
    {"name": "c", "cr": 0.0, "quality": 0.0, "low": 0.0, "high": 0.0, "error": "it failed"},
    {
        "name": "d",
        "cr": 5.0,
        "quality": 0.995,
        "low": 0.992,
        "high": 0.998,
        "chains": {"*": "hadamard + uniform + zstd"},
    },
]


def profile(name: str, cr: float, quality: float, transforms: list[str]) -> Profile:
    chain = {"transforms": transforms, "quantizer": {"name": "uniform"}, "codec": "zstd"}
    record = QualityRecord(value=quality, lower=quality - 0.002, upper=quality + 0.001, metric="exp(-KL)", samples=16)
    return Profile(
        name=name,
        pipeline=PipelineSpec.parse({"planes": {"*": chain}}),
        cr=cr,
        encode=Speed(1e-3, 1e-9),
        decode=Speed(1e-3, 5e-10),
        quality={"default": record},
    )


@pytest.fixture
def library() -> ProfileLibrary:
    return ProfileLibrary(
        model_id="tiny<model>",
        fingerprint="f" * 64,
        device="cpu",
        created="2026-01-02",
        provenance={"search": {"trace": TRACE, "candidates": 1200, "families": {"hadamard": 700}}},
        profiles=(profile("u", 3.0, 0.998, []), profile("had", 5.0, 0.994, ["hadamard"])),
    )


def test_gains_count_only_what_keeps_the_floor(library: ProfileLibrary) -> None:
    gains = {(g.kind, g.component): (g.cr, g.tried) for g in read(library).gains}
    assert gains["transform", "hadamard"] == (5.0, 3)
    assert gains["transform", "none"] == (3.0, 3)  # the trace's, the library's and raw
    assert gains["codec", "zstd"] == (5.0, 5)
    strict = {(g.kind, g.component): g.cr for g in read(library, floor=0.997).gains}
    assert strict["transform", "hadamard"] == 0.0


def test_the_best_so_far_and_the_frontier(library: ProfileLibrary) -> None:
    assert best_so_far(read(library).steps, 0.99) == [3.0, 3.0, 3.0, 5.0]
    assert frontier([(0.9, 5.0), (0.99, 3.0), (0.95, 2.0), (0.9, 4.0)]) == [(0.99, 3.0), (0.9, 5.0)]


def test_break_evens_are_those_of_theorem_6_1(library: ProfileLibrary) -> None:
    by_name = {row.profile.name: row for row in read(library, nbytes=1e8).rows}
    had, raw = by_name["had"].profile.line(1e8), by_name["raw"].profile.line(1e8)
    at = by_name["had"].break_even_bps
    assert at is not None
    assert had.at(1 / at) == pytest.approx(raw.at(1 / at))
    assert by_name["raw"].break_even_bps is None


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data"):
                self.found.append((tag, value or ""))
            if name == "id" and value:
                self.ids.append(value)


def test_the_page_stands_alone_and_runs_nothing(library: ProfileLibrary) -> None:
    html = page(read(library))
    links = Links()
    links.feed(html)
    assert [link for link in links.found if not link[1].startswith("#")] == []
    assert "<script" not in html
    assert not re.search(r"url\((?!#)|@import", html)
    assert len(set(links.ids)) == len(links.ids)
    assert {link[1][1:] for link in links.found} <= set(links.ids)
    assert "tiny&lt;model&gt;" in html
    assert "tiny<model>" not in html
    assert html.count("<svg") == 4


def test_figures_are_well_formed_and_keep_their_words(library: ProfileLibrary) -> None:
    html = page(read(library))
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)
    assert "bandwidth (Gbps)" in html  # text stays text, so that it can be searched and read aloud
    assert page(read(library)) == html


def test_without_a_search_its_figure_is_left_out(library: ProfileLibrary) -> None:
    plain = library.model_copy(update={"provenance": {}})
    html = page(read(plain))
    assert html.count("<svg") == 3
    assert 'id="search"' not in html


@pytest.mark.parametrize(
    "search",
    [
        [1],
        {"trace": {"a": 1}, "families": [1]},
        {"trace": [5, TRACE[0] | {"cr": "x"}, TRACE[0] | {"cr": 1e308}, TRACE[0] | {"low": float("nan")}]},
        {"trace": [TRACE[0] | {"chains": "uniform"}, TRACE[0] | {"chains": {"*": 5}}]},
    ],
)
def test_what_is_no_search_of_ours_is_not_shown(library: ProfileLibrary, search: Any) -> None:
    found = read(library.model_copy(update={"provenance": {"search": search}}))
    assert found.steps == ()
    assert "<table>" in page(found)


@pytest.mark.parametrize("profiles", [(), ("u",)])
def test_a_library_of_one_profile_or_none_is_shown(library: ProfileLibrary, profiles: tuple[str, ...]) -> None:
    few = library.model_copy(update={"profiles": tuple(p for p in library.profiles if p.name in profiles)})
    found = page(read(few))
    assert found.count("<tr>") == 2 + len(profiles)  # the head and raw


def test_names_are_text_in_the_page_and_in_its_figures(library: ProfileLibrary, tmp_path: Path) -> None:
    odd = '<script>"&$\\bad$'
    row = TRACE[0] | {"name": odd, "chains": {odd: f"{odd} + {odd} + {odd}"}}
    changes = {"model_id": odd, "device": odd, "provenance": {"search": {"trace": [row], "families": {odd: odd}}}}
    found = read(library.model_copy(update=changes), odd)
    text = page(found)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r">[^<]*mathdefault[^<]*</t", text)  # the axes' own formulas are drawn all the same
    write_png(found, tmp_path / "report.png")


def test_the_picture_holds_the_figures(library: ProfileLibrary, tmp_path: Path) -> None:
    write_png(read(library), tmp_path / "r.png")
    pixels = imread(tmp_path / "r.png")
    height, width = pixels.shape[:2]
    quarters = [pixels[y : y + height // 2, x : x + width // 2] for y in (0, height // 2) for x in (0, width // 2)]
    assert all(np.unique(q.reshape(-1, q.shape[-1]), axis=0).shape[0] > 20 for q in quarters)


def test_a_place_that_cannot_be_written_is_said(library: ProfileLibrary, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_html(read(library), tmp_path / "no" / "r.html")


def test_the_command_writes_both(library: ProfileLibrary, tmp_path: Path) -> None:
    library.save(tmp_path / "m.kvlib")
    with pytest.raises(SystemExit) as ended:
        main(
            ["report", str(tmp_path / "m.kvlib"), "--html", str(tmp_path / "r.html"), "--png", str(tmp_path / "r.png")]
        )
    assert ended.value.code == 0
    assert (tmp_path / "r.html").read_text() == page(read(library))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "m.kvlib")])
    assert ended.value.code == 2


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_browser_shows_it(library: ProfileLibrary, tmp_path: Path) -> None:
    write_html(read(library), tmp_path / "r.html")
    shot = tmp_path / "shot.png"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]
    command += ["--window-size=1100,3000", f"--screenshot={shot}", (tmp_path / "r.html").as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert shot.exists(), done.stderr.decode()[-500:]
    pixels = imread(shot)
    rows = np.ptp(pixels[..., :3], axis=(1, 2)) > 0.2
    assert rows[:2400].mean() > 0.5  # figures and text down the page, not an error page's few lines
    blue = (np.abs(pixels[..., :3] - np.array([0x1F, 0x5F, 0xA8]) / 255) < 0.05).all(axis=-1)
    assert blue.sum() > 500
