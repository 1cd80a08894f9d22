from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvserve_core.cli import check, components, doctor, main, schema, show
from kvserve_core.registry import Registry, locate
from plugin_folders import Fakes, forget


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output as JSON."""
        return json.loads(self.out)


@pytest.fixture
def kvserve(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs a command in this process."""

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        code = caught.value.code
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes the commands see the built-ins and these fake plugins, and nothing else."""
    locate.cache_clear()
    fakes = Fakes(monkeypatch)

    def use(*names: str, disabled: str = "") -> None:
        registry = Registry(fakes.load(*names, built_ins=True, disabled=disabled))
        for module in (check, components, doctor, schema, show):
            monkeypatch.setattr(module, "default_registry", lambda: registry)

    yield use
    forget()
    locate.cache_clear()
