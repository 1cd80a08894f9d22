"""The digest kernel in Triton's interpreter (or on a GPU) against xxhash."""

from __future__ import annotations

import pytest
import torch
from xxhash import xxh3_64_digest

from kvserve_core.bodies import PIECE
from kvserve_plugins.kernels.digest import piece_hashes
from triton_cases import DEVICE


def body(nbytes: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=draw, dtype=torch.uint8).to(DEVICE)


def expected(x: torch.Tensor) -> bytes:
    data = x.cpu().numpy().tobytes()
    return b"".join(xxh3_64_digest(data[i : i + PIECE]) for i in range(0, len(data), PIECE))


SIZES = [64, 128, 192, 256, 320, 960, 1024, 1088, 2048, 8192, PIECE - 64, PIECE, PIECE + 64, PIECE + 256, 3 * PIECE]


def test_bodies_of_all_lengths_hash_as_on_the_host() -> None:
    bodies = [body(n, i) for i, n in enumerate(SIZES)]
    assert piece_hashes(bodies) == [expected(b) for b in bodies]


def test_one_byte_changes_the_hash_of_its_piece_only() -> None:
    x = body(3 * PIECE, 0)
    y = x.clone()
    y[PIECE + 777] ^= 1
    (a,), (b,) = piece_hashes([x]), piece_hashes([y])
    assert a[:8] == b[:8]
    assert a[8:16] != b[8:16]
    assert a[16:] == b[16:]


def test_values_that_carry_and_overflow() -> None:
    bodies = [torch.full((1024,), value, dtype=torch.uint8, device=DEVICE) for value in (0, 255, 128)]
    assert piece_hashes(bodies) == [expected(b) for b in bodies]


def test_no_bodies_and_empty_ones() -> None:
    assert piece_hashes([]) == []
    empty = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    assert piece_hashes([empty, body(64, 1), empty]) == [b"", expected(body(64, 1)), b""]


@pytest.mark.parametrize(("start", "stop"), [(0, 65), (8, 72)])
def test_lengths_and_addresses_that_the_kernel_cannot_take_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="expected multiples of 64 and 16"):
        piece_hashes([body(256, 0)[start:stop]])
