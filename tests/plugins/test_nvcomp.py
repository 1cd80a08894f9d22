"""nvCOMP's codecs without a GPU: table, layout of blobs, clear errors. With one: benchmarks/nvcomp_codecs.py."""

from __future__ import annotations

import ctypes
import struct
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from kvserve_core.component import Component
from kvserve_core.errors import UnavailableComponentError
from kvserve_core.registry import summary_of, unavailable
from kvserve_plugins.codecs import kvserve_codecs, nvcomp
from kvserve_plugins.codecs.nvcomp import ALGORITHMS, NvcompCodec
from kvserve_plugins.kernels import nvcomp_api
from kvserve_plugins.kernels.nvcomp_api import ALIGN, NvcompCalls, Options, library
from kvserve_plugins.kernels.nvcomp_layout import Layout, Plan, aligned
from plugins.stage_checks import CPU, bind, model, place

DECLARED = [c for c in kvserve_codecs() if c.name.startswith("nvcomp_")]
CLASSES = NvcompCodec.__subclasses__()


def test_one_class_and_one_manifest_an_algorithm() -> None:
    assert [c.algorithm for c in CLASSES] == list(ALGORITHMS)
    assert [c.name.removeprefix("nvcomp_") for c in DECLARED] == list(ALGORITHMS)
    assert [c.summary for c in DECLARED] == [summary_of(cls) for cls in CLASSES]


@pytest.mark.parametrize("component", DECLARED, ids=lambda c: c.name)
def test_what_is_missing_is_named_with_what_to_install(component: Component, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvserve_core.registry.locate", lambda module: None)
    reason = unavailable(component)
    assert reason is not None
    assert "'nvidia.libnvcomp', 'triton'" in reason
    assert "pip install 'kvserve[nvcomp-cu13]'" in reason
    monkeypatch.setattr("kvserve_core.registry.locate", lambda module: object())
    monkeypatch.setattr("kvserve_core.registry._has_cuda", lambda: False)
    assert "NVIDIA GPU" in (unavailable(component) or "")


@pytest.mark.parametrize("cls", CLASSES)
def test_use_without_a_gpu_is_a_clear_error(cls: type[NvcompCodec]) -> None:
    config = cls.Config(chunk_bytes=2**18)
    assert cls.Config.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(UnavailableComponentError, match="NVIDIA GPU, not on 'cpu'"):
        bind(cls(cls.Config()), model(), place(256))
    assert cls.caps.async_size


def test_a_missing_library_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    library.cache_clear()
    monkeypatch.setitem(sys.modules, "nvidia.libnvcomp.load", None)
    with pytest.raises(UnavailableComponentError, match=r"nvCOMP is not installed .*nvcomp-cu13"):
        library()
    found = ModuleType("nvidia.libnvcomp.load")
    monkeypatch.setattr(found, "load_library", lambda: None, raising=False)
    for name in ("nvidia", "nvidia.libnvcomp"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "nvidia.libnvcomp.load", found)
    with pytest.raises(UnavailableComponentError, match="does not load here"):
        library()
    library.cache_clear()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("way", ["Compress", "Decompress"])
def test_options_are_64_bytes_that_begin_with_the_fields(name: str, way: str) -> None:
    algorithm = ALGORITHMS[name]
    made = algorithm.options(way)  # type: ignore[arg-type]  # one of the two
    layout, values = algorithm.compress if way == "Compress" else algorithm.decompress
    assert ctypes.sizeof(Options) == 64
    data = bytes(made)
    assert struct.unpack_from("<" + layout, data) == values
    assert not any(data[struct.calcsize("<" + layout) :])


def test_two_byte_floats_are_named_both_ways() -> None:
    for kind, number in (("u8", 1), ("f16", 10)):
        made = nvcomp.NvcompANS(nvcomp.NvcompANS.Config(data_type=kind)).variant
        assert made.compress == made.decompress == ("ii", (0, number))


class FakeLibrary:
    """The functions of a libnvcomp that bounds a chunk by twice its size and wants 100 bytes of scratch."""

    def __init__(self, status: int = 0) -> None:
        self.called: list[str] = []
        self.status = status

    def __getattr__(self, name: str) -> SimpleNamespace:
        fake = self

        class Function(SimpleNamespace):
            def __call__(self, *arguments: object) -> int:
                fake.called.append(name)
                for out in arguments:
                    if isinstance(out, ctypes.c_size_t):
                        out.value = 2 * int(arguments[0]) + 1 if "MaxOutput" in name else 100  # type: ignore[call-overload]  # a number in both
                return fake.status

        return Function()


def calls(monkeypatch: pytest.MonkeyPatch, status: int = 0) -> NvcompCalls:
    fake = FakeLibrary(status)
    monkeypatch.setattr(nvcomp_api, "library", lambda: fake)
    return NvcompCalls(ALGORITHMS["gdeflate"])


def test_bounds_are_aligned_and_errors_name_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch)
    assert made.chunk_bound(100) == 208  # 201 rounded up to 16
    assert made.scratch("Decompress", 4, 100, 400) == 100
    with pytest.raises(RuntimeError, match="nvCOMP Gdeflate bound returned status 11"):
        calls(monkeypatch, 11).chunk_bound(100)


def test_the_layout_of_a_batch() -> None:
    at = Layout.of([0, 5, 250], 100, lambda n: -(-n // ALIGN) * ALIGN)
    assert at.counts.tolist() == [0, 1, 3]
    assert at.part.tolist() == [1, 2, 2, 2]
    assert at.within.tolist() == [0, 0, 100, 200]
    assert at.nbytes.tolist() == [5, 100, 100, 50]
    assert at.bounds.tolist() == [16, 112, 112, 64]
    assert at.header.tolist() == [0, 16, 16]
    assert at.caps.tolist() == [0, 32, 16 + 112 + 112 + 64]
    assert np.array_equal(at.first, [0, 1, 1, 1])


def test_a_plan_places_slots_and_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan((5, 250), 100, CPU, calls(monkeypatch))
    assert plan.slots.tolist() == [0, 16, 16 + 208, 16 + 2 * 208]
    assert plan.target.tolist() == [0, 16, 116, 216]  # the first part is padded to 16
    assert plan.width == 4
    assert plan.table.shape == (8, 4)
    assert Plan((), 100, CPU, calls(monkeypatch)).chunks == 0
    assert Plan((100 * 1000,), 100, CPU, calls(monkeypatch)).width == 1024


def test_memory_at_odd_addresses_is_copied() -> None:
    room = torch.zeros(64, dtype=torch.uint8)
    assert aligned(room).data_ptr() == room.data_ptr()
    odd = room[1:]
    assert aligned(odd).data_ptr() % ALIGN == 0
    assert torch.equal(aligned(odd), odd)


def test_the_table_names_functions_as_nvcomp_does() -> None:
    assert {a.symbol for a in nvcomp.ALGORITHMS.values()} == {
        *("ANS", "Bitcomp", "Cascaded", "Deflate", "Gdeflate", "LZ4", "Zstd")
    }
