"""All layers of a region in one launch, in Triton's interpreter, against layer by layer."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvserve_vllm.paged_copy import stacked

SCRIPT = """
import sys
import torch
from kvserve_vllm import paged_copy
from kvserve_vllm.layout import read, write

dim, size, order = int(sys.argv[1]), int(sys.argv[2]), [int(c) for c in sys.argv[3]]
shape = (20, 4, size, 2 * dim)
caches = [torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(4)]) for _ in range(3)]
ids, heads, start, count = [5, 3, 0, 7, 11], [1, 2, 3], 7, size * 4 - 9
for first in (0, dim):
    views = [c[..., first : first + dim] for c in caches]
    skip = heads[0] * views[0].stride(1) * 4
    stack = paged_copy.Stack(views[0], torch.tensor([v.data_ptr() + skip for v in views]))
    x = paged_copy.gather(stack, torch.tensor(ids), 3, start, count)
    assert torch.equal(x, torch.stack([read(v, torch.tensor(ids), heads, start, start + count) for v in views]))
    y, before = torch.randn_like(x), [c.clone() for c in caches]
    paged_copy.scatter(stack, torch.tensor(ids), start, y, 0)
    got = [c.clone() for c in caches]
    for cache, old in zip(caches, before):
        cache.copy_(old)
    for view, rows in zip(views, y):
        write(view, ids, heads, start, rows, 0)
    assert all(torch.equal(a, b) for a, b in zip(got, caches))
    assert not all(torch.equal(a, b) for a, b in zip(got, before))
"""


@pytest.mark.parametrize("case", [("128", "16", "0123"), ("96", "16", "0213"), ("64", "32", "0123")])
def test_one_launch_moves_what_each_layer_would(case: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernel needs Triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when Triton is imported, hence a process of its own
    assert subprocess.run([sys.executable, "-c", SCRIPT, *case], check=False, timeout=120).returncode == 0


def test_other_layouts_are_copied_layer_by_layer() -> None:
    view = torch.randn(4, 2, 16, 64)
    assert stacked([view, view], [0, 1]) is None  # not on a GPU
