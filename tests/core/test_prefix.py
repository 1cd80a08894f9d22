"""Keys of cached prefixes."""

from __future__ import annotations

import pytest

from kvserve_core.errors import ConfigError, UnsupportedSpecError
from kvserve_core.prefix import cell_keys, check_storable, classes_for, namespace, quality_class, stored_key
from kvserve_core.spec import SEGMENT_TOKENS as CELL
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Shard

K = PlaneSpec("k", 2, (PlanePart("k", 32),), DType.BF16)
KV = KVSpec("m", (LayerGroup(0, (0,), (K,)),))
SPACE = namespace(KV, Shard((0,)))
TOKENS = list(range(3 * CELL + 7))


def test_only_whole_cells_have_a_key() -> None:
    assert [len(cell_keys(TOKENS[:n], SPACE)) for n in (0, CELL - 1, CELL, len(TOKENS))] == [0, 0, 1, 3]


def test_a_key_covers_all_tokens_before_it_and_none_after() -> None:
    keys = cell_keys(TOKENS, SPACE)
    assert cell_keys([*TOKENS, 5] * 2, SPACE)[:3] == keys
    other = cell_keys([TOKENS[0] + 1, *TOKENS[1:]], SPACE)
    assert set(keys).isdisjoint(other)
    late = cell_keys([*TOKENS[: 2 * CELL], 9, *TOKENS[2 * CELL + 1 :]], SPACE)
    assert (late[:2], late[2] == keys[2]) == (keys[:2], False)


def test_whatever_the_values_depend_on_is_in_the_namespace() -> None:
    other = KVSpec("n", KV.groups)
    spaces = {
        SPACE,
        namespace(other, Shard((0,))),
        namespace(KV, Shard((0,), 0, 2)),
        namespace(KV, Shard((0,)), lora="a"),
        namespace(KV, Shard((0,)), salt="a"),
    }
    assert len({cell_keys(TOKENS, space)[0] for space in spaces}) == len(spaces)
    assert namespace(KV, Shard((0,)), lora=None) == SPACE


def test_an_image_counts_from_the_cell_it_stands_in() -> None:
    plain, imaged = cell_keys(TOKENS, SPACE), cell_keys(TOKENS, SPACE, per_token={CELL + 3: "image"})
    assert (imaged[0], imaged[1] == plain[1], imaged[2] == plain[2]) == (plain[0], False, False)


def test_quality_classes_never_flatter() -> None:
    assert quality_class(1.0) == 0.999
    assert quality_class(0.2, exact=True) == 1.0
    assert [quality_class(q) for q in (0.9949, 0.99, 0.5)] == [0.99, 0.99, 0.0]
    assert classes_for(0.99) == (1.0, 0.999, 0.995, 0.99)
    assert classes_for(1.0) == (1.0,)
    assert stored_key("k", 0.995) != stored_key("k", 0.99)


def test_bad_tokens_and_state_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="64 bits"):
        cell_keys([2**70] * CELL, SPACE)
    state = PlaneSpec("opaque", 1, (PlanePart("opaque", 8),), DType.U8)
    check_storable(KV)
    with pytest.raises(UnsupportedSpecError, match="state"):
        check_storable(KVSpec("m", (LayerGroup(0, (0,), (state,), unit="state"),)))
