"""Engines around tiny random models."""

from __future__ import annotations

import pytest
import torch

from kvserve_core.spec import DType
from kvserve_hf.engine import Engine
from tiny_models import VOCAB, make


@pytest.fixture(params=["llama", "gemma"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """float32 compute, float32 KV."""
    return make(request.param, DType.F32)


@pytest.fixture
def ids() -> list[int]:
    """Forty tokens: more than twice the window."""
    return torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
