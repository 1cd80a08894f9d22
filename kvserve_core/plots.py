"""Matplotlib for pictures in files. Imported by what draws; matplotlib itself only when something is drawn."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from kvserve_core.errors import ConfigError, UnavailableComponentError


def pyplot() -> Any:
    """Matplotlib, drawing to files only.

    Raises:
        UnavailableComponentError: it is not installed; the message names the extra.
    """
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UnavailableComponentError("a plot needs 'matplotlib'; pip install 'kvserve[profile]'") from error


def save(plots: Any, figure: Any, out: Path) -> None:
    """Write a figure of ``plots`` (what :func:`pyplot` gave) and close it.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: a format it does not know
        raise ConfigError(f"cannot be written: {error}", str(out)) from error
    finally:
        plots.close(figure)
