"""The pytest plugin that comes with kvserve: the fixture ``artefacts``, to be overridden by those who have some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvserve_core.artefacts import Artefacts


@pytest.fixture
def artefacts() -> Artefacts:
    """No calibrated files. Define a fixture of this name to give some to the conformance tests."""
    from kvserve_core.artefacts import Artefacts

    return Artefacts()
