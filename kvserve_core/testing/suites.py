"""The checks as pytest classes: subclass one, name the component, and all that applies to it is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.component import Kind
from kvserve_core.errors import KVServeError
from kvserve_core.spec import KVSpec
from kvserve_core.testing.catalogue import CHECKS, checks_for
from kvserve_core.testing.check import Check
from kvserve_core.testing.subject import CheckFailed, Sample, Skipped, Subject

ID_CHARS = 40


class ComponentTests:
    """What the suites share. Set ``component``; the rest has defaults.

    component: its registered name. configurations: each is checked; None is the default configuration.
    golden: the folder of its golden frames. device: where it runs.

    A calibrated component sets ``model`` and ``plane``, what it is for, and ``sample``, a staticmethod that gives the
    values of a region of a model as it was calibrated on; its files come from the fixture ``artefacts``, which a test
    module or conftest.py overrides.
    """

    kind: ClassVar[Kind]
    component: ClassVar[str]
    configurations: ClassVar[Sequence[Mapping[str, Any] | None]] = (None,)
    golden: ClassVar[Path | None] = None
    model: ClassVar[KVSpec | None] = None
    plane: ClassVar[str | None] = None
    sample: ClassVar[Sample | None] = None
    device: ClassVar[str] = "cpu"

    def max_error(self, x: Tensor, config: Any) -> Tensor | float | None:
        """The largest ``|x - x'|`` a lossy stage promises for ``x`` (f32 ``[L, H, T, D]``), broadcast against it.

        The default promises nothing: values must be finite and their squared error below their energy.
        """
        del x, config
        return None

    def subject(self, configuration: Mapping[str, Any] | None, artefacts: Artefacts = NONE) -> Subject:
        """The component in one configuration."""
        return Subject.of(
            self.kind,
            self.component,
            configuration,
            max_error=self.max_error,
            golden=self.golden,
            model=self.model,
            plane=self.plane,
            sample=type(self).sample,
            device=torch.device(self.device),
            artefacts=artefacts,
        )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each configuration and each check that applies to it."""
        if {"check", "configuration"} <= set(metafunc.fixturenames):
            metafunc.parametrize(("check", "configuration"), list(self._parameters()))

    def _parameters(self) -> list[Any]:
        found = []
        for configuration in self.configurations:
            label = "" if len(self.configurations) == 1 else f"-{_label(configuration)}"
            for each in self._checks(configuration):
                found.append(pytest.param(each, configuration, id=f"{each.name}{label}"))
        return found

    def _checks(self, configuration: Mapping[str, Any] | None) -> list[Check]:
        try:
            return checks_for(self.subject(configuration))
        except KVServeError:  # said by each test, where pytest shows it, rather than while tests are collected
            return [each for each in CHECKS if self.kind in each.kinds]

    def test_conforms(self, check: Check, configuration: Mapping[str, Any] | None, artefacts: Artefacts) -> None:
        """Run one check."""
        __tracebackhide__ = True
        try:
            check(self.subject(configuration, artefacts))
        except Skipped as reason:
            pytest.skip(str(reason))
        except CheckFailed as failure:
            pytest.fail(f"{self.kind} {self.component!r}: {check.about}\n{failure}", pytrace=False)


def _label(configuration: Mapping[str, Any] | None) -> str:
    text = ",".join(f"{k}={v}" for k, v in (configuration or {}).items()) or "default"
    return "".join(c if c.isalnum() or c in "=,._" else "_" for c in text)[:ID_CHARS]


class TransformTests(ComponentTests):
    """What every transform must do."""

    kind: ClassVar[Kind] = "transform"


class QuantizerTests(ComponentTests):
    """What every quantizer must do."""

    kind: ClassVar[Kind] = "quantizer"


class CodecTests(ComponentTests):
    """What every codec must do."""

    kind: ClassVar[Kind] = "codec"


class TransportTests(ComponentTests):
    """What every transport and store must do."""

    kind: ClassVar[Kind] = "transport"


class PolicyTests(ComponentTests):
    """What every policy must do."""

    kind: ClassVar[Kind] = "policy"
