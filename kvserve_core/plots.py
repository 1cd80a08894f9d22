"""Matplotlib for pictures in files. Imported by what draws; matplotlib itself only when something is drawn."""

from __future__ import annotations

import os
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


def check(plots: Any, out: Path) -> None:
    """Find out before the work whether :func:`save` can write there.

    Raises:
        ConfigError: no such folder, a format that matplotlib does not know, or a place where nothing can be written.
    """
    figure = plots.figure()
    try:
        known = figure.canvas.get_supported_filetypes()
    finally:
        plots.close(figure)
    kind = out.suffix.removeprefix(".").lower()
    if kind not in known:
        raise ConfigError(f"cannot be written: format {kind!r} is not known, use one of {', '.join(known)}", str(out))
    if not out.parent.is_dir() or out.is_dir():
        problem = "it is a folder" if out.is_dir() else f"there is no folder {str(out.parent)!r}"
        raise ConfigError(f"cannot be written: {problem}", str(out))
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigError("cannot be written: permission denied", str(out))


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
