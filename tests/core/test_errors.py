from __future__ import annotations

import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve_core import errors
from kvserve_core.errors import (
    ArtefactError,
    ConfigError,
    FrameError,
    IntegrityError,
    KVServeError,
    Unacceptable,
    UnknownNameError,
    did_you_mean,
    nearest,
)


def test_every_error_is_a_kvserve_error_with_a_docstring() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    assert len(classes) > 10
    for cls in classes:
        assert issubclass(cls, KVServeError)
        assert cls.__doc__


def test_a_config_error_gains_its_path_from_inside_out() -> None:
    error = UnknownNameError("unknown codec", "codec").under("planes.k").under("").under("profiles.fast")
    assert type(error) is UnknownNameError
    assert error.path == "profiles.fast.planes.k.codec"
    assert str(error) == "profiles.fast.planes.k.codec: unknown codec"
    assert error.reason == "unknown codec"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("bad", "a.b"),
        ArtefactError("gone"),
        FrameError("short", "segment 3"),
        IntegrityError("changed"),
        Unacceptable(["codec:rans@2", "codec:zstd@9"], "too new"),
    ],
)
def test_errors_survive_a_process_boundary(error: KVServeError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_unacceptable_names_the_stages_and_what_to_do() -> None:
    error = Unacceptable(iter(["codec:rans@2"]), "no decoder")
    assert error.stages == ("codec:rans@2",)
    assert str(error).startswith("the consumer cannot read 'codec:rans@2': no decoder; install the same components")


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("zst", ["raw", "zstd"], "unknown codec 'zst'; did you mean 'zstd'? allowed: raw, zstd"),
        ("ZSTD", ["raw", "zstd"], "unknown codec 'ZSTD'; did you mean 'zstd'? allowed: raw, zstd"),
        ("qqq", ["raw", "zstd"], "unknown codec 'qqq'; allowed: raw, zstd"),
        ("x", [], "unknown codec 'x'; allowed: none are installed"),
    ],
)
def test_did_you_mean(name: str, known: list[str], text: str) -> None:
    assert did_you_mean(name, known, "codec") == text


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=12), max_size=6))
def test_the_nearest_name_is_always_a_known_one(name: str, known: list[str]) -> None:
    found = nearest(name, known)
    assert found is None or found in known
    assert did_you_mean(name, known).startswith(f"unknown name {name!r}; ")
