"""Write golden frames: ``python tests/golden/make.py`` adds what is missing and never changes a file.

``NAME@N.kv`` is a frame file, ``NAME@N.bin`` the tensors that it decodes to, in the order of its segments, as bytes.
When a component's encoded bytes change, raise its ``format_version``, raise the case's number in ``NUMBERS``, run
this, and commit the new files beside the old ones: readers decode all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from decode_cases import CHAINS, KV, KV_96, LONGER_HEADS, case, decode_file  # noqa: E402  # the path comes first
from frame_cases import make_file  # noqa: E402  # the same

NONCE = 0x0123_4567_89AB_CDEF
NUMBERS = dict.fromkeys((*CHAINS, *LONGER_HEADS), 1)


def frame(name: str) -> bytes:
    """The file of a case, the same on every run."""
    made = case(name)
    return make_file(msgspec.structs.replace(made.header, nonce=NONCE), made.segments)


def main() -> None:
    """Write the missing files."""
    torch.set_num_threads(1)
    for name, number in NUMBERS.items():
        path = FOLDER / f"{name}@{number}.kv"
        if path.exists():
            continue
        data = frame(name)
        kv = KV_96 if name in LONGER_HEADS else KV
        tensors = decode_file(data, kv).values()
        with path.with_suffix(".bin").open("xb") as expected:
            expected.write(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors))
        with path.open("xb") as out:
            out.write(data)
        sys.stdout.write(f"{path.name}: {len(data)} bytes\n")


if __name__ == "__main__":
    main()
