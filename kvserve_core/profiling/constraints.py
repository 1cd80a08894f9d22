"""Constraints between the values of one chain, as text: ``high.levels >= low.levels``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvserve_core.errors import ConfigError
from kvserve_core.profiling.point import Value, Values

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "!=": operator.ne,
    "==": operator.eq,
}


@dataclass(frozen=True)
class Constraint:
    """``left`` and ``right`` are names of dimensions, or the ends of names."""

    left: str
    sign: str
    right: str

    @classmethod
    def parse(cls, text: str, path: str = "") -> Constraint:
        """From text.

        Raises:
            ConfigError: it is not two names with a comparison between them.
        """
        parts = text.split()
        if len(parts) != 3 or parts[1] not in OPERATORS:
            signs = " ".join(OPERATORS)
            raise ConfigError(f"{text!r} is no constraint; write 'name SIGN name' with one of: {signs}", path)
        return cls(*parts)

    def allows(self, values: Values) -> bool:
        """Whether the values meet it. A constraint on what is not there does not bind.

        Raises:
            ConfigError: the two cannot be compared.
        """
        left, right = _find(values, self.left), _find(values, self.right)
        if left is None or right is None:
            return True
        try:
            return OPERATORS[self.sign](left, right)
        except TypeError:
            message = f"{left!r} and {right!r} cannot be compared; name two dimensions that are both numbers"
            raise ConfigError(f"{self.left} {self.sign} {self.right}: {message}") from None


def _find(values: Values, name: str) -> Value | None:
    at: Mapping[str, Value] = dict(values)
    return at.get(name, next((v for n, v in at.items() if ends_with(n, name)), None))


def ends_with(dimension: str, name: str) -> bool:
    """Whether ``name`` is the dimension, or its last parts."""
    return dimension == name or dimension.endswith(f".{name}")
