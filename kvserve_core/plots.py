"""Matplotlib for pictures in files. Imported by what draws; matplotlib itself only when something is drawn."""

from __future__ import annotations

import io
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from kvserve_core.errors import ConfigError, UnavailableComponentError
from kvserve_core.library_files import write_bytes


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
    """Find out before the work whether :func:`save` can write there, as far as can be known without writing.

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
    folder = os.path.dirname(os.path.realpath(out))  # of what a link points to; it is written beside that
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot be written: permission denied in the folder {folder!r}", str(out))
    if out.exists() and not os.access(out, os.W_OK):
        raise ConfigError("cannot be written: permission denied", str(out))


def save(plots: Any, figure: Any, out: Path) -> None:
    """Write a figure of ``plots`` (what :func:`pyplot` gave) and close it. A picture that was there stays until then.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        data = rendered(plots, figure, out.suffix.removeprefix(".").lower(), dpi=120)
    except (OSError, ValueError, RuntimeError) as error:  # a format that it does not know, or lacks a program for
        raise ConfigError(f"cannot be written: {error}", str(out)) from error
    write(out, data)


def rendered(plots: Any, figure: Any, kind: str, **how: Any) -> bytes:
    """A figure of ``plots`` as a file of that kind; closes it."""
    buffer = io.BytesIO()
    try:
        figure.savefig(buffer, format=kind, **how)
    finally:
        plots.close(figure)
    return buffer.getvalue()


def write(out: Path, data: bytes) -> None:
    """Write a file for a user to look at: whoever looks finds the old one or the new one, whole.

    A link keeps pointing where it does, and what is no file, such as ``/dev/stdout``, is written to and not replaced.

    Raises:
        ConfigError: the file cannot be written; an old one is as it was.
    """
    try:
        if out.exists() and not out.is_file():
            out.write_bytes(data)
        else:
            write_bytes(Path(os.path.realpath(out)), data)
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise ConfigError(f"cannot be written: {getattr(error, 'strerror', error)}", str(out)) from error
